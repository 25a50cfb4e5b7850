"""Runs on data, from a configuration to the finished folder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np

from groupwise.config import Config
from groupwise.config.connect import (
    configured_engine,
    load_configured,
    make_scorer,
    select_device,
)
from groupwise.config.data import load_eval, load_train, rendered
from groupwise.errors import UsageError
from groupwise.evaluation.measure import measure
from groupwise.kernels import select
from groupwise.models import Policy
from groupwise.models.devices import use_threads
from groupwise.models.scoring import ScorerKind, load_scorer, scorer_of
from groupwise.models.seeds import own_random_numbers
from groupwise.prompts.order import PromptOrder
from groupwise.prompts.templates import Rendered
from groupwise.rewards import Scorer
from groupwise.rundir.files import RunLog
from groupwise.rundir.lock import RunLock
from groupwise.settings import DatasetSettings
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.evaluation import Evaluation
from groupwise.training.hub import check_login, push_final
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.monitor.trackers import check_trackers, make_trackers
from groupwise.training.monitor.watchdog import Watchdog, make_watchdog
from groupwise.training.offline.own_answers import OwnAnswers
from groupwise.training.offline.trainer import OfflineSettings, OfflineTrainer, Task
from groupwise.training.prepare import evaluation_row
from groupwise.training.resume import (
    ResumePoint,
    check_fingerprints,
    find_resume_point,
    log_lost_lines,
    other_fingerprints,
    plain_settings,
    policy_fingerprints,
    resume_facts,
)
from groupwise.training.stages.warmup import warm_up
from groupwise.types import Engine
from groupwise.updates import TorchLearner
from groupwise.updates.heads import Head


class RunOptions(TypedDict, total=False):
    """How a run on data begins and is shown, as `train_config` has it."""

    resume: bool
    allow_changes: bool
    restart: bool
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What a run on data is made from.

    Attributes:
        policy: as it is before the first step.
        engine: samples from the policy; None where it cannot write.
        scorer: of the recipe's rewards; None where it has none.
        run_log: the run directory.
        resumed: whether the run goes on from a checkpoint.
    """

    config: Config
    policy: Policy
    engine: Engine | None
    scorer: Scorer | None
    run_log: RunLog
    progress: Progress
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one kind of run on data makes of its workplace.

    Attributes:
        task: what is learned.
        learner: takes the steps.
        items: what is trained on, in order.
        patience: as in `Evaluation`.
    """

    task: Task
    learner: TorchLearner
    items: Sequence[Any]
    patience: int = 0


def run_on_data(
    config: Config,
    settings: DatasetSettings,
    make: Callable[[Workplace], Job],
    *,
    name: str,
    method: str,
    load: Callable[[Config, Progress], Policy] | None = None,
    learner: str = "policy",
    resume: bool = False,
    allow_changes: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Run a configuration on data to its end; write `final/` and the report.

    Args:
        settings: section of the configuration.
        make: from the workplace to the job.
        name: of the run in the progress and in its report: that of the loss.
        method: what the run does, for its model card.
        load: loads the model that is trained, if it is not a language model; it gets no engine.
        learner: name of what is trained, in checkpoints.
        resume, allow_changes, restart, progress: as `train_config` has them.

    Returns:
        The run directory.
    """
    _check_hub(config)
    check_trackers(config.logging.trackers)
    with ExitStack() as stack:
        select(config.model.kernels)
        use_threads(config.threads)
        showing = progress or stack.enter_context(closing(show_progress({})))
        scorer = stack.enter_context(closing(make_scorer(config))) if config.rewards else None
        stack.enter_context(closing(RunLock(config.output)))
        found = ResumePoint()
        if resume:
            found = find_resume_point(config, allow_changes, restart=restart, log=showing.log)
        policy = _policy(config, load, found, allow_changes, showing)
        engine = None if load else stack.enter_context(closing(configured_engine(config, policy)))
        described = _described(config, name=name, method=method)
        resume_at = found.step if resume else None
        run_log = RunLog(config.output, settings=described, resume_at=resume_at)
        watchdog = stack.enter_context(closing(make_watchdog(config, run_log, progress=showing)))
        workplace = Workplace(
            config=config,
            policy=policy,
            engine=engine,
            scorer=scorer,
            run_log=run_log,
            progress=showing,
            resumed=found.saved is not None,
        )
        job = make(workplace)
        steps = total_steps(config, settings, len(job.items))
        shown = progress or stack.enter_context(closing(show_progress({name: steps})))
        trainer = _trainer(
            replace(workplace, progress=shown),
            job,
            steps=steps,
            name=name,
            learner=learner,
            watchdog=watchdog,
        )
        trainer.checkpoints.check_room([trainer.learner], log=showing.log)
        _restore(trainer, found, config, allow_changes, log=showing.log)
        for tracker in trainer.trackers:
            stack.callback(tracker.close)
        trainer.run()
        trainer.finish()
    return _reported(config)


def _reported(config: Config) -> Path:
    """The run directory, once its report is written and its model is uploaded."""
    from groupwise.report import write_run_report

    folder = Path(config.output)
    write_run_report(folder)
    push_final(config.hub, folder / "final")
    return folder


def _check_hub(config: Config) -> None:
    if config.hub is not None and config.hub.every_steps:
        raise UsageError(
            f"hub.every_steps = {config.hub.every_steps}: runs on data upload only "
            "final/; remove it."
        )
    check_login(config.hub)


def _described(config: Config, *, name: str, method: str) -> dict[str, Any]:
    """The settings of a run as its report and its card read them: there is no algorithm of
    reinforcement learning, and the loss stands in its place."""
    return plain_settings(config) | {"method": method, "learned_by": name}


def _policy(
    config: Config,
    load: Callable[[Config, Progress], Policy] | None,
    found: ResumePoint,
    allow_changes: bool,
    progress: Progress,
) -> Policy:
    """The model as it is before the first step."""
    with own_random_numbers(config.seed):  # An adapter begins with random numbers.
        policy = load_configured(config) if load is None else load(config, progress)
    now = policy_fingerprints(policy)
    check_fingerprints(found.saved, now, allow_changes=allow_changes, log=progress.log)
    select_device(config, policy)
    return policy


def total_steps(config: Config, settings: DatasetSettings, items: int) -> int:
    """Number of optimizer steps of a run over `items` prompts."""
    if settings.epochs is None:
        return config.steps
    return max(1, math.ceil(settings.epochs * items / config.prompts_per_step))


def _trainer(
    workplace: Workplace,
    job: Job,
    *,
    steps: int,
    name: str,
    learner: str,
    watchdog: Watchdog,
) -> OfflineTrainer:
    config, run_log = workplace.config, workplace.run_log
    checkpoints = CheckpointManager(
        run_log,
        settings=config.checkpoint,
        about=resume_facts(config, workplace.policy),
        watch=watchdog.waiting,
    )
    evaluation = config.evaluation
    return OfflineTrainer(
        settings=OfflineSettings(
            steps=steps,
            items=min(config.prompts_per_step, len(job.items)),
            max_bad_steps=config.guards.max_bad_steps,
        ),
        task=job.task,
        learner=job.learner,
        order=PromptOrder(len(job.items), seed=config.seed),
        data=data_hash(job.items),
        run_log=run_log,
        progress=workplace.progress,
        checkpoints=checkpoints,
        evaluation=Evaluation(
            evaluate=lambda step: {},
            every_steps=evaluation.every_steps,
            keep_best=evaluation.keep_best,
            patience=job.patience,
        ),
        name=name,
        learner_name=learner,
        trackers=make_trackers(
            config.logging.trackers,
            run_log.folder,
            plain_settings(config),
            resume_at=run_log.resume_at,
        ),
        watch=watchdog.waiting,
    )


def data_hash(items: Sequence[Any]) -> str:
    """A hash of what is trained on, its order included."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(repr(item).encode(errors="replace"))
    return digest.hexdigest()


Item = TypeVar("Item")


def held_out_split(
    items: Sequence[Item], share: float, *, seed: int
) -> tuple[list[Item], list[Item]]:
    """Prompts to train on and prompts to evaluate, drawn by the seed, each in their order."""
    count = min(len(items) - 1, round(share * len(items)))
    drawn = set(np.random.default_rng([seed, 1]).permutation(len(items))[:count].tolist())
    train = [item for place, item in enumerate(items) if place not in drawn]
    return train, [items[place] for place in sorted(drawn)]


def scorer_to_train(config: Config, progress: Progress, *, kind: ScorerKind = "sequence") -> Policy:
    """The classifier that starts from the model section; with a section [warmup], from the language
    model after it has learned worked answers."""
    if config.warmup is not None:
        policy = load_configured(config)
        warm_up(config, policy, progress=progress)
        return scorer_of(policy, kind=kind)
    model = config.model
    return load_scorer(
        model.path,
        revision=model.revision,
        kind=kind,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        adapter=model.adapter,
        quantization=model.quantization,
        attention=model.attention,
    )


def make_learner(
    workplace: Workplace, settings: DatasetSettings, items: int, *, head: Head | None = None
) -> TorchLearner:
    """The learner of a run over `items` prompts. Log-probabilities are of the untempered
    distribution, which the data are of."""
    config = workplace.config
    return TorchLearner(
        workplace.policy,
        optimizer=config.optimizer,
        total_steps=total_steps(config, settings, items),
        head=head,
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        gradient_checkpointing=config.update.gradient_checkpointing,
        dropout_seed=config.seed,
    )


def generation(
    workplace: Workplace, learner: TorchLearner
) -> Callable[[], Mapping[str, Any]] | None:
    """The evaluation of generated answers to the task's held-out prompts; None where the recipe has
    no rewards or no such prompts."""
    config, scorer, engine = workplace.config, workplace.scorer, workplace.engine
    if scorer is None or engine is None:
        return None
    prompts = load_eval(config)[: config.evaluation.prompts]
    if not prompts:
        return None
    ready: Rendered = rendered(config, workplace.policy, prompts)

    def evaluate() -> Mapping[str, Any]:
        engine.publish(learner.publish())
        measured = measure(
            engine,
            scorer,
            ready.prompts,
            ready.tokens,
            sampling=config.sampling,
            samples=config.evaluation.samples,
        )
        return evaluation_row(measured)

    return evaluate


def _restore(
    trainer: OfflineTrainer,
    found: ResumePoint,
    config: Config,
    allow_changes: bool,
    *,
    log: Callable[[str], None],
) -> None:
    """Continue from a checkpoint, if there is one, with the models that it was made with."""
    others = other_fingerprints(config)
    check_fingerprints(found.saved, others, allow_changes=allow_changes, log=log)
    if found.saved is None:
        return
    trainer.restore(found.saved)
    log(f"resumed at step {found.step}")
    evaluated = trainer.evaluation.last
    log_lost_lines(Path(config.output), step=found.step, evaluated=evaluated, log=log)


def own_answers(
    workplace: Workplace, policy: Policy, engine: Engine, *, prompts: int
) -> OwnAnswers:
    """The own answers of a policy to the first training prompts of a run.

    Args:
        engine: samples from the policy.
        prompts: how many.
    """
    config, scorer = workplace.config, workplace.scorer
    assert scorer is not None
    return OwnAnswers(
        engine=engine,
        scorer=scorer,
        ready=rendered(config, policy, load_train(config)[:prompts]),
        folder=workplace.run_log.folder,
        sampling=config.sampling,
        group=config.group_size,
        seed=config.seed,
        recall=workplace.resumed,
        progress=workplace.progress,
    )
