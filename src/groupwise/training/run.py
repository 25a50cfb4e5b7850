"""A run from a configuration, from a recipe, or from three arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.config import Config, build
from groupwise.config.connect import (
    Connected,
    Reward,
    best_device,
    connect,
    load_configured,
    make_scorer,
)
from groupwise.config.data import load_eval, load_source, load_train, rendered
from groupwise.config.memory import memory_plan, memory_savings
from groupwise.errors import GroupwiseError, RunError, UsageError
from groupwise.evaluation.measure import Measurement, measure
from groupwise.models import Policy, make_policy
from groupwise.prompts.contamination import contamination_warning, shared_prompts
from groupwise.prompts.templates import Rendered, fix_variables
from groupwise.rewards import Scorer
from groupwise.rewards.cache import RewardCache
from groupwise.rollouts.source import RolloutSource
from groupwise.rundir.files import RunLog, read_lines
from groupwise.rundir.lock import RunLock
from groupwise.training import resume as resuming
from groupwise.training.callbacks import Callback
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.evaluation import Evaluation
from groupwise.training.monitor.alerts import Alerts
from groupwise.training.monitor.divergence_guard import DivergenceGuard
from groupwise.training.monitor.monitor import Monitor
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.monitor.trackers import make_trackers
from groupwise.training.monitor.watchdog import Watchdog
from groupwise.training.stages.warmup import warm_up
from groupwise.training.trainer import POLICY, Trainer, TrainerSettings
from groupwise.types import Engine, Metrics, Prompt, Watch


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run.

    Attributes:
        config: every setting.
        folder: the run directory.
        model, tokenizer: what was trained.
    """

    config: Config
    folder: Path
    model: Any
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        """One line: a notebook shows the last value of a cell, and a model prints a page."""
        config = self.config
        return f"Run({config.algorithm.name}, {config.steps} steps, in {str(self.folder)!r})"

    @property
    def metrics(self) -> list[Metrics]:
        """One row per step, read from the run directory."""
        return list(read_lines(self.folder / "metrics.jsonl"))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row per evaluation on held-out prompts, read from the run directory."""
        path = self.folder / "evaluations.jsonl"
        return list(read_lines(path)) if path.exists() else []

    def report(self) -> Path:
        """Write the report of the run, one self-contained HTML file, and return its path."""
        from groupwise.report import write_run_report

        return write_run_report(self.folder)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        splits: held-out prompts by the name of their split.
    """

    config: Config
    policy: Policy
    engine: Engine
    scorer: Scorer
    trainer: Trainer
    watchdog: Watchdog
    lock: RunLock
    splits: Mapping[str, Rendered]

    def close(self) -> None:
        """End workers and threads, and let others have the run directory."""
        self.scorer.close()
        self.engine.close()
        self.watchdog.close()
        self.lock.close()

    def evaluate(self, split: str) -> dict[str, Any]:
        """The row of an evaluation on one split."""
        return evaluation_row(self.measure(self.splits[split]), split=split)

    def evaluate_all(self, step: int) -> dict[str, Any]:
        """Evaluate on every split: the first one's row; those of the others are logged."""
        first, *others = [self.evaluate(split) for split in self.splits]
        for row in others:
            self.trainer.monitor.write_evaluation(step, row)
        return first

    def measure(self, ready: Rendered) -> Measurement:
        """Greedy and sampled answers of the model as it stands."""
        return measure(
            self.engine,
            self.scorer,
            ready.prompts,
            ready.tokens,
            sampling=self.config.sampling,
            samples=self.config.evaluation.samples,
        )


def train(
    model: str | Path | PreTrainedModel,
    prompts: Any,
    reward: Reward | Sequence[Reward],
    algorithm: str = "softrank",
    steps: int = 100,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_prompts: Any = None,
    resume: bool = False,
    allow_changes: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Train a model on prompts with a reward.

    Args:
        model: folder, hub name, "bundled", or a `transformers` model at hand (with `tokenizer`).
        prompts: a file, hub name or generator, or a list of strings, rows, or `Prompt`s.
        reward: a registered name, a function, or several. A function is called with what its
            parameters ask for (`text`, `answer`, `group`, …), or in TRL's way if it takes
            `completions`.
        algorithm: row of the table.
        steps: batches of rollouts.
        tokenizer: of a model at hand.
        eval_prompts: held-out prompts; without them only generators and hub data, which have a
            held-out split, are evaluated on.
        resume: go on from the newest checkpoint in `output`; start where there is none.
        allow_changes: resume although settings have changed that change the mathematics.
        progress: shows the run; None shows it on standard error.
        settings: everything else as in a recipe: `group_size=8, sampling={"max_tokens": 64}`.

    Returns:
        The run, with `.model`, `.metrics` and `.report()`.

    Raises:
        UsageError: a setting, file or argument that cannot work; raised before training starts.
    """
    if not (isinstance(reward, str | Sequence) or callable(reward)):
        raise UsageError(
            f"reward = {reward!r}: must be a function, the name of a reward, or a list of those."
        )
    rewards = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    named = all(isinstance(item, str) for item in rewards)
    values: dict[str, Any] = {"steps": steps, **settings}
    values["algorithm"] = {"name": algorithm, **settings.get("algorithm", {})}
    values["rewards"] = [{"name": item} for item in rewards] if named else []
    from_data = isinstance(prompts, str | Path)
    train_on = str(prompts) if from_data else "prompts at hand"
    values["data"] = {**settings.get("data", {}), "train": train_on}
    policy = None
    if isinstance(model, str | Path):
        values["model"] = {"path": str(model), **settings.get("model", {})}
    elif tokenizer is None:
        raise UsageError("tokenizer = None: a model at hand needs its tokenizer, as tokenizer=….")
    else:
        policy = make_policy(model, tokenizer)
        named_as = getattr(model, "name_or_path", "") or type(model).__name__
        values["model"] = {**settings.get("model", {}), "path": named_as}
    config = build(values)
    if policy is not None:
        fix_variables(policy.tokenizer, config.data.chat_template_kwargs)
    held_out = None
    if eval_prompts is not None:
        held_out = load_source(config, eval_prompts, setting="eval")
    return train_config(
        config,
        policy=policy,
        functions=[] if named else rewards,
        prompts=None if from_data else load_source(config, prompts),
        eval_prompts=[] if held_out is None and not from_data else held_out,
        resume=resume,
        allow_changes=allow_changes,
        progress=progress,
    )


def train_config(
    config: Config,
    *,
    policy: Policy | None = None,
    functions: Sequence[Reward] = (),
    prompts: Sequence[Prompt] | None = None,
    eval_prompts: Sequence[Prompt] | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Run a configuration to its end and write `final/` and the report.

    Args:
        policy, functions, prompts, eval_prompts: in place of what the configuration names.
        resume: go on from the newest whole checkpoint of the run directory, or start.
        allow_changes: resume although settings have changed that change the mathematics.
        progress: shows the run; None shows it on standard error.
    """
    showing = progress or show_progress({config.algorithm.name: config.steps})
    try:
        with _memory_named(config if policy is None else None):
            prepared = prepare(
                config,
                policy=policy,
                functions=functions,
                prompts=prompts,
                eval_prompts=eval_prompts,
                resume=resume,
                allow_changes=allow_changes,
                progress=showing,
            )
            try:
                prepared.trainer.run()
                prepared.trainer.finish()
            finally:
                prepared.close()
    finally:
        if progress is None:
            showing.close()
    run = Run(
        config=config,
        folder=Path(config.output),
        model=prepared.policy.model,
        tokenizer=prepared.policy.tokenizer,
    )
    run.report()
    return run


@contextmanager
def _memory_named(config: Config | None) -> Iterator[None]:
    """Running out of memory in words, whichever library found out, with the plan of the run where
    its model can be planned."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in said.lower():
            said = (said.strip().splitlines() or ["no message"])[0]
            raise RunError(
                f"out of memory ({said}); {_smaller(config)}. Checkpoints are intact: go on with "
                "--resume."
            ) from error
        raise


def _smaller(config: Config | None) -> str:
    """The plan of a run that did not fit, and what to change first."""
    try:
        if config is not None:
            first = ", ".join(map(str, islice(memory_savings(config), 3)))
            return f"planned were {memory_plan(config)}; set, one on top of the other: {first}"
    except (GroupwiseError, MemoryError, RuntimeError):
        pass  # There may be no memory left to plan in.
    return (
        "lower update.tokens_per_microbatch, engine.max_rows or sampling.max_tokens, or set "
        "update.gradient_checkpointing = true"
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
    callbacks: Sequence[Callback] = (),
) -> Prepared:
    """Load, check and connect everything a run needs; nothing but a warm-up is trained yet.

    Args:
        name: of the run in the progress; the algorithm's by default.
        scorer: in place of what `functions` or the configuration name; it is closed with the run.
        eval_prompts: held-out prompts, or several splits of them by name, of which the first
            decides which model is best.
        callbacks: called around every step.
        For the others see `train_config`.

    Raises:
        UsageError: a setting, a file or the run directory cannot be used; nothing was started.
    """
    with ExitStack() as undo:
        scorer = undo.enter_context(scorer or make_scorer(config, functions))
        lock = undo.enter_context(closing(RunLock(config.output)))
        found = resuming.Resumed()
        if resume:
            found = resuming.find(config, allow_changes=allow_changes, log=progress.log)
        algorithm = bind(config.algorithm.name, config.algorithm.overrides())
        policy = _started(config, policy, found, progress=progress)
        connected = connect(config, algorithm, policy=policy)
        undo.callback(connected.engine.close)
        train_on = rendered(config, policy, prompts or load_train(config))
        splits = _held_out(config, policy, eval_prompts)
        _warn(train_on, splits, log=progress.log)
        run_log = RunLog(
            config.output,
            settings=resuming.plain(config),
            resume_at=found.step if resume else None,
        )
        watchdog = Watchdog(
            run_log.folder,
            limit_s=60 * config.watchdog.limit_minutes,
            stop=config.watchdog.stop,
            log=progress.log,
        )
        undo.callback(watchdog.close)
        source, cache = _source(
            config, algorithm, connected, train_on, scorer=scorer, watch=watchdog.waiting
        )
        trainer = Trainer(
            settings=_settings(config),
            source=source,
            engine=connected.engine,
            learners={POLICY: connected.learner},
            algorithm=algorithm,
            monitor=_monitor(config, run_log, progress=progress, name=name),
            evaluation=Evaluation(
                evaluate=(lambda step: prepared.evaluate_all(step)) if splits else None,
                every_steps=config.evaluation.every_steps,
                keep_best=config.evaluation.keep_best,
            ),
            checkpoints=CheckpointManager(
                run_log,
                settings=config.checkpoint,
                about=resuming.about(config),
                cache=cache,
                watch=watchdog.waiting,
            ),
            callbacks=callbacks,
            folder=run_log.folder,
            watch=watchdog.waiting,
        )
        prepared = Prepared(
            config=config,
            policy=policy,
            engine=connected.engine,
            scorer=scorer,
            trainer=trainer,
            watchdog=watchdog,
            lock=lock,
            splits=splits,
        )
        if found.saved is not None:
            trainer.restore(found.saved)
            progress.log(f"resumed at step {found.step}")
        elif config.warmup is not None or config.guards.spike is not None:
            trainer.save(wait=True)
        undo.pop_all()
        return prepared


def _source(
    config: Config,
    algorithm: BoundAlgorithm,
    connected: Connected,
    ready: Rendered,
    *,
    scorer: Scorer,
    watch: Watch,
) -> tuple[RolloutSource, RewardCache]:
    """The source of the run's scored groups, and its cache of verdicts."""
    cache = RewardCache(
        Path(config.output) / "journal",
        rewards=config.model_dump_json(include={"rewards", "combine"}),
    )
    source = RolloutSource(
        ready.prompts,
        ready.tokens,
        engine=connected.engine,
        scorer=scorer,
        keep=algorithm.filter,
        group=config.group_size,
        sampling=config.sampling,
        seed=config.seed,
        max_draws=config.algorithm.max_draws,
        journal=cache,
        watch=watch,
    )
    return source, cache


def _monitor(config: Config, run_log: RunLog, *, progress: Progress, name: str | None) -> Monitor:
    return Monitor(
        run_log=run_log,
        progress=progress,
        trackers=make_trackers(config.logging.trackers, run_log.folder, resuming.plain(config)),
        alerts=Alerts(thresholds=config.alarms),
        guard=DivergenceGuard(settings=config.guards),
        name=name or config.algorithm.name,
        rollouts_every=config.logging.rollouts_every,
    )


def _warn(
    train_on: Rendered, splits: Mapping[str, Rendered], *, log: Callable[[str], None]
) -> None:
    """Log what should be known of the prompts before training."""
    if train_on.dropped:
        log(f"{train_on.dropped} prompts are too long and were left out")
    for held_out in splits.values():
        if shared := shared_prompts(train_on.prompts, held_out.prompts):
            log(contamination_warning(shared, len(held_out.prompts)))


def _held_out(
    config: Config,
    policy: Policy,
    prompts: Sequence[Prompt] | Mapping[str, Sequence[Prompt]] | None,
) -> dict[str, Rendered]:
    """The held-out prompts by split, those of the configuration by default."""
    if not isinstance(prompts, Mapping):
        prompts = {"held_out": load_eval(config) if prompts is None else prompts}
    limit = config.evaluation.prompts
    return {
        split: rendered(config, policy, found[:limit]) for split, found in prompts.items() if found
    }


def _started(
    config: Config, policy: Policy | None, found: resuming.Resumed, *, progress: Progress
) -> Policy:
    """The policy as it was before the first step: a reference model is a copy of this one."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if policy is None:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)  # an adapter begins with random numbers
            policy = load_configured(config)
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
    """An evaluation as it is logged; "score" (NaN where nothing was judged) decides which model is
    the best."""
    figures = result.figures
    score = figures.get("sampled") or figures.get("reward")
    return {
        "split": split,
        "figures": {name: estimate.as_dict() for name, estimate in figures.items()},
        "truncated_share": result.truncated,
        "score": math.nan if score is None else score.value,
    }


def _settings(config: Config) -> TrainerSettings:
    return TrainerSettings(
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        seed=config.seed,
        epochs=config.update.epochs,
        minibatches=config.update.minibatches,
    )
