"""Preparing a run: everything is loaded, checked and connected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.algorithms.binding import POLICY
from groupwise.config import Config
from groupwise.config.checks import value_loss
from groupwise.config.connect import (
    Connected,
    Reward,
    best_device,
    connect,
    load_configured,
    make_scorer,
    second_model,
)
from groupwise.config.data import load_eval, load_train, rendered, split_validation
from groupwise.config.engines import check_support
from groupwise.config.pool import judges_on_cluster
from groupwise.config.preferences import described, method_of
from groupwise.evaluation.measure import Measurement, measure
from groupwise.kernels import select
from groupwise.models import Policy
from groupwise.models.devices import use_threads
from groupwise.models.seeds import own_random_numbers
from groupwise.prompts.contamination import contamination_warning, shared_prompts
from groupwise.prompts.remarks import remarks
from groupwise.prompts.templates import Rendered
from groupwise.rewards import Scorer
from groupwise.rewards.scoring.rows import check_rows
from groupwise.rollouts.ahead import AheadSource
from groupwise.rollouts.source import RolloutSource
from groupwise.rollouts.streaming import StreamingSource
from groupwise.rundir.files import RunLog, read_lines
from groupwise.rundir.lock import RunLock
from groupwise.training.callbacks import Callback
from groupwise.training.changing import Changing, check_schedules
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.critic import CriticTrainer
from groupwise.training.distillation import with_teacher
from groupwise.training.evaluation import Evaluate, Evaluation
from groupwise.training.hub import uploads
from groupwise.training.monitor.alerts import Alerts
from groupwise.training.monitor.divergence_guard import DivergenceGuard
from groupwise.training.monitor.monitor import Monitor
from groupwise.training.monitor.progress import Progress
from groupwise.training.monitor.trackers import check_trackers, make_trackers
from groupwise.training.monitor.watchdog import make_watchdog
from groupwise.training.online_preferences import on_own_pairs
from groupwise.training.process import ProcessTrainer, make_step_scorer
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
from groupwise.training.sources import make_journals, make_source, spans_of
from groupwise.training.stages.pretraining import ready_critic
from groupwise.training.stages.warmup import warm_up
from groupwise.training.token_reward import TokenRewardTrainer
from groupwise.training.trainer import Trainer, TrainerSettings
from groupwise.types import Engine, Learner, Prompt, Watch

Connector = Callable[..., Connected]
"""From a configuration, a bound algorithm and `policy` to the policy with learner and engine."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        splits: held-out prompts by the name of their split.
        opened: resources that are closed with the run.
    """

    config: Config
    policy: Policy
    engine: Engine
    scorer: Scorer
    trainer: Trainer
    splits: Mapping[str, Rendered]
    opened: ExitStack

    def close(self) -> None:
        """Close workers, threads and trackers, and release the run directory."""
        if isinstance(self.trainer.source, AheadSource | StreamingSource):
            self.trainer.source.close()
        self.opened.close()

    def evaluate(self, split: str) -> dict[str, Any]:
        """The row of an evaluation on one split."""
        return evaluation_row(self.measure(self.splits[split]), split=split)

    def evaluate_all(self, step: int) -> dict[str, Any]:
        """Evaluate on every split: the first one's row, with those of the others."""
        first, *others = [self.evaluate(split) for split in self.splits]
        return first | {"others": others}

    def measure(self, ready: Rendered) -> Measurement:
        """Greedy and sampled answers of the current model."""
        return measure(
            self.engine,
            self.scorer,
            ready.prompts,
            ready.tokens,
            sampling=self.config.sampling,
            samples=self.config.evaluation.samples,
        )


def prepare(
    config: Config,
    *,
    progress: Progress,
    name: str | None = None,
    policy: Policy | None = None,
    functions: Sequence[Reward] = (),
    scorer: Scorer | None = None,
    prompts: Sequence[Prompt] | None = None,
    eval_prompts: Sequence[Prompt] | Mapping[str, Sequence[Prompt]] | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    restart: bool = False,
    callbacks: Sequence[Callback] = (),
    connector: Connector = connect,
) -> Prepared:
    """Load, check and connect everything that a run needs. Only a warm-up and the critic's
    pretraining train anything here.

    Args:
        name: of the run in the progress; the algorithm's by default.
        scorer: instead of the rewards of `functions` or the configuration; it is closed with the
            run.
        eval_prompts: held-out prompts, or several splits of them by name, of which the first
            decides which model is best.
        callbacks: called around every step.
        connector: makes learner and engine of a policy.
        For the others see `train_config`.

    Raises:
        UsageError: a setting, a file or the run directory cannot be used; nothing was started.
    """
    check_trackers(config.logging.trackers)
    with ExitStack() as undo:
        select(config.model.kernels)  # before a warm-up, which trains
        if scorer is not None or not judges_on_cluster(config):
            scorer = undo.enter_context(scorer or make_scorer(config, functions))
        undo.enter_context(closing(RunLock(config.output)))
        found = ResumePoint()
        if resume:
            found = find_resume_point(config, allow_changes, restart=restart, log=progress.log)
        algorithm = bind(config.algorithm.name, config.algorithm.overrides())
        policy = _started(config, policy, found, allow_changes, progress=progress)
        # A copy of the policy has to be made before the policy's weights are sharded.
        model = _second_model(config, algorithm, policy)
        connected = connector(config, algorithm, policy=policy)
        undo.callback(connected.engine.close)
        if scorer is None:
            scorer = undo.enter_context(make_scorer(config, functions, connected))
        train_on, splits = _rendered(config, policy, prompts, eval_prompts, scorer, progress.log)
        run_log = _run_log(config, resume_at=found.step if resume else None)
        watchdog = undo.enter_context(closing(make_watchdog(config, run_log, progress=progress)))
        monitor = undo.enter_context(closing(_monitor(config, run_log, progress, name=name)))
        trainer = _trainer(
            config,
            algorithm,
            connected,
            train_on,
            scorer=scorer,
            monitor=monitor,
            evaluate=(lambda step: prepared.evaluate_all(step)) if splits else None,
            callbacks=callbacks,
            watch=watchdog.waiting,
            second=_second(config, algorithm, connected, model, begun=found.saved is not None),
        )
        _restore(trainer, found, config, allow_changes, log=progress.log)
        prepared = Prepared(
            config=config,
            policy=policy,
            engine=connected.engine,
            scorer=scorer,
            trainer=trainer,
            splits=splits,
            opened=undo.pop_all(),
        )
        return prepared


def _run_log(config: Config, *, resume_at: int | None) -> RunLog:
    """The log of a run, with its settings."""
    settings = plain_settings(config) | described(config)
    return RunLog(config.output, settings=settings, resume_at=resume_at)


def _trainer(
    config: Config,
    algorithm: BoundAlgorithm,
    connected: Connected,
    ready: Rendered,
    *,
    scorer: Scorer,
    monitor: Monitor,
    evaluate: Evaluate | None,
    callbacks: Sequence[Callback],
    watch: Watch,
    second: Callable[..., Learner] | None,
) -> Trainer:
    """The trainer with its source, its checkpoints and its learners."""
    run_log = monitor.run_log
    assert run_log is not None
    journals = make_journals(config, connected.engine, run_log.folder / "journal")
    source = partial(
        RolloutSource,
        ready.prompts,
        ready.tokens,
        engine=connected.engine,
        scorer=scorer,
        group=config.group_size,
        sampling=config.sampling,
        max_draws=config.algorithm.max_draws,
        watch=watch,
    )
    spans = spans_of(config, connected.engine)
    watch = watch if spans is None else spans.watching(watch)
    learners = {POLICY: connected.learner}
    if second is not None and algorithm.second_learner is not None:
        learners[algorithm.second_learner] = second(source, log=monitor.log)
    kind = _kind(config, algorithm, connected.policy)
    drawn, taken = make_source(
        config, algorithm, connected, ready, make=source, journals=journals, watch=watch
    )
    trainer = kind(
        settings=_settings(config),
        source=taken,
        engine=connected.engine,
        learners=learners,
        algorithm=algorithm,
        monitor=monitor,
        evaluation=_evaluation(config, evaluate, run_log.folder),
        checkpoints=CheckpointManager(
            run_log,
            settings=config.checkpoint,
            about=resume_facts(config, connected.policy),
            journals=journals.files,
            watch=watch,
        ),
        folder=run_log.folder,
        watch=watch,
    )
    drawn.spans = monitor.spans = spans
    if isinstance(taken, StreamingSource):
        monitor.queue = taken.queue
    changing = Changing(config, trainer, source=drawn, scorer=scorer)
    trainer.callbacks = (changing, *uploads(config.hub, trainer), *callbacks)
    return trainer


def _kind(config: Config, algorithm: BoundAlgorithm, policy: Policy) -> Callable[..., Trainer]:
    """A function that makes the trainer of a run."""
    if algorithm.second_learner == "critic":
        return partial(
            CriticTrainer,
            critic=config.critic,
            value_loss=value_loss(config),
            freeze_policy_steps=config.critic.freeze_policy_steps,
        )
    if algorithm.second_learner == "token_reward":
        frozen = config.token_reward.freeze_policy_steps
        return partial(TokenRewardTrainer, freeze_policy_steps=frozen)
    if config.distillation is not None:
        return with_teacher(config, policy)
    if config.preference is not None and config.preference.online:
        return on_own_pairs(config.preference)
    if config.process is not None:
        return partial(ProcessTrainer, steps=make_step_scorer(config, policy))
    return Trainer


def _second_model(config: Config, algorithm: BoundAlgorithm, policy: Policy) -> Policy | None:
    """The initial model of the second learner, if there is one."""
    name = algorithm.second_learner
    return None if name is None else second_model(config, policy, name)


def _second(
    config: Config,
    algorithm: BoundAlgorithm,
    connected: Connected,
    model: Policy | None,
    *,
    begun: bool,
) -> Callable[..., Learner] | None:
    """The function that makes the second learner for the first step, if there is one."""
    if model is None:
        return None
    make = partial(connected.second, config, model)
    if algorithm.second_learner == "critic":
        return partial(ready_critic, config, algorithm, make, begun=begun)
    optimizer = config.token_reward.optimizer
    return lambda source, log: make(optimizer=optimizer, total_steps=config.steps)


def _rendered(
    config: Config,
    policy: Policy,
    prompts: Sequence[Prompt] | None,
    eval_prompts: Sequence[Prompt] | Mapping[str, Sequence[Prompt]] | None,
    scorer: Scorer,
    log: Callable[[str], None],
) -> tuple[Rendered, dict[str, Rendered]]:
    """The prompts to train on, and the held-out ones by split; what should be known of them is
    logged."""
    apart = 0 if isinstance(eval_prompts, Mapping) else config.evaluation.validation
    training, validation = split_validation(prompts or load_train(config), apart)
    train_on = rendered(config, policy, training)
    splits = _held_out(config, policy, eval_prompts, validation=validation)
    _warn(train_on, splits, log=log)
    per_step = config.prompts_per_step
    for line in remarks(train_on.prompts, policy.tokenizer, per_step=per_step):
        log(line)
    _check_rows(scorer, train_on, splits, log=log)
    return train_on, splits


def _evaluation(config: Config, evaluate: Evaluate | None, folder: Path) -> Evaluation:
    """When the run is evaluated; the base once, also where the run has to start again."""
    path, settings = folder / "evaluations.jsonl", config.evaluation
    has_base = path.exists() and any(row.get("step") == 0 for row in read_lines(path))
    return Evaluation(
        evaluate=evaluate,
        every_steps=settings.every_steps,
        at_start=settings.at_start and not has_base,
        keep_best=settings.keep_best,
        patience=settings.patience,
    )


def _restore(
    trainer: Trainer,
    found: ResumePoint,
    config: Config,
    allow_changes: bool,
    *,
    log: Callable[[str], None],
) -> None:
    """Continue from a checkpoint, with the models that it was made with; without one, write that of
    step 0 where one is needed later."""
    # Only now has the hub been asked for the newest version of the other models.
    others = other_fingerprints(config)
    check_fingerprints(found.saved, others, allow_changes=allow_changes, log=log)
    if trainer.checkpoints is not None:
        trainer.checkpoints.check_room(trainer.learners.values(), log=log)
    if found.saved is not None:
        trainer.restore(found.saved)
        log(f"resumed at step {found.step}")
        folder, evaluated = trainer.folder or Path(config.output), trainer.evaluation.last
        log_lost_lines(folder, step=found.step, evaluated=evaluated, log=log)
    elif (
        config.warmup is not None
        or config.guards.spike is not None
        or ("critic" in trainer.learners and config.critic.pretraining is not None)
    ):
        trainer.save(wait=True)


def _monitor(config: Config, run_log: RunLog, progress: Progress, *, name: str | None) -> Monitor:
    return Monitor(
        run_log=run_log,
        progress=progress,
        trackers=make_trackers(
            config.logging.trackers,
            run_log.folder,
            plain_settings(config),
            resume_at=run_log.resume_at,
        ),
        alerts=Alerts(thresholds=config.alerts),
        guard=DivergenceGuard(settings=config.guards),
        name=name or method_of(config),
        rollouts_every=config.logging.rollouts_every,
    )


def _warn(
    train_on: Rendered, splits: Mapping[str, Rendered], *, log: Callable[[str], None]
) -> None:
    """Log what should be known of the prompts before training."""
    if train_on.dropped:
        log(f"{train_on.dropped} prompts were too long and were dropped")
    for held_out in splits.values():
        if shared := shared_prompts(train_on.prompts, held_out.prompts):
            log(contamination_warning(shared, len(held_out.prompts)))


def _check_rows(
    scorer: Scorer,
    train_on: Rendered,
    splits: Mapping[str, Rendered],
    *,
    log: Callable[[str], None],
) -> None:
    """Raise an error for data that the rewards cannot judge, and log how many rows are affected."""
    named = {"data.train": train_on, **{f"data.eval ({k})": v for k, v in splits.items()}}
    for where, ready in named.items():
        for line in check_rows(scorer, ready.prompts, where=where):
            log(line)


def _held_out(
    config: Config,
    policy: Policy,
    prompts: Sequence[Prompt] | Mapping[str, Sequence[Prompt]] | None,
    *,
    validation: Sequence[Prompt] = (),
) -> dict[str, Rendered]:
    """The held-out prompts by split, those of the configuration by default; the first split, that
    of validation where there is one, chooses the best model."""
    if not isinstance(prompts, Mapping):
        held_out = {"held_out": load_eval(config) if prompts is None else prompts}
        prompts = {"validation": validation, **held_out}
    limit = config.evaluation.prompts
    return {
        split: rendered(config, policy, found[:limit]) for split, found in prompts.items() if found
    }


def _started(
    config: Config,
    policy: Policy | None,
    found: ResumePoint,
    allow_changes: bool,
    *,
    progress: Progress,
) -> Policy:
    """The policy as it was before the first step: a reference model is a copy of this one."""
    check_schedules(config)
    check_support(config)
    if config.threads is not None or found.saved is None:  # a resumed run keeps those it had
        use_threads(config.threads)
    if policy is None:
        progress.log(f"loading {config.model.path}")
        with own_random_numbers(config.seed):  # adapters are initialised at random
            policy = load_configured(config)
    now = policy_fingerprints(policy)
    check_fingerprints(found.saved, now, allow_changes=allow_changes, log=progress.log)
    if config.model.quantization is None:
        policy.model.to(best_device())
    if found.start is not None:
        own = dict(policy.model.named_parameters())
        with torch.no_grad():
            for name, weight in found.start.weights[POLICY].items():
                own[name].copy_(weight)
    elif config.warmup is not None:
        warm_up(config, policy, progress=progress)
    return policy


def evaluation_row(result: Measurement, *, split: str = "held_out") -> dict[str, Any]:
    """An evaluation as it is logged; the best model has the highest "score" (NaN: none judged)."""
    figures = result.figures
    score = figures.get("sampled") or figures.get("reward")
    return {
        "split": split,
        "figures": {name: estimate.as_dict() for name, estimate in figures.items()},
        "truncated_share": result.truncated,
        "score": math.nan if score is None else score.value,
    }


def _settings(config: Config) -> TrainerSettings:
    partly = config.partial_rollouts
    return TrainerSettings(
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        seed=config.seed,
        epochs=config.update.epochs,
        minibatches=config.update.minibatches,
        proximal=config.update.proximal,
        masks_old_tokens=partly is not None and partly.old_tokens == "mask",
    )
