"""A run from a configuration, from a recipe, or from three arguments."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise import checkpoint
from groupwise.algorithms import bind
from groupwise.checkpoint import Checkpoint
from groupwise.config import Config, build
from groupwise.errors import UsageError
from groupwise.evaluation.measure import Measurement, measure
from groupwise.execution import connect
from groupwise.logs import Progress, RunLog, make_trackers, show_progress
from groupwise.models import Policy, make_policy
from groupwise.prompts.sources import GENERATORS, load_prompts
from groupwise.prompts.templates import Rendered, check_round_trip, render_all
from groupwise.rewards import (
    REWARDS,
    RewardPart,
    Scorer,
    build_scorer,
    dropped_tags,
    from_functions,
)
from groupwise.source import RolloutSource
from groupwise.stages.warmup import warm_up
from groupwise.trainer import Trainer, TrainerSettings
from groupwise.types import Engine, Metrics, Prompt

Reward = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    Attributes:
        config: every setting.
        folder: the run directory.
        model, tokenizer: what was trained.
        metrics: one row per step.
        evaluations: one row per evaluation on held-out prompts.
    """

    config: Config
    folder: Path
    model: Any
    tokenizer: PreTrainedTokenizerBase
    metrics: Sequence[Metrics]
    evaluations: Sequence[Mapping[str, Any]]

    def report(self) -> Path:
        """Write the report of the run, one self-contained HTML file, and return its path."""
        from groupwise.report import write_run_report

        return write_run_report(self.folder)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is ready to go: the trainer, and what else evaluation needs."""

    config: Config
    policy: Policy
    engine: Engine
    scorer: Scorer
    trainer: Trainer

    def measure(self, ready: Rendered) -> Measurement:
        """Greedy and sampled answers of the model as it stands."""
        return measure(
            self.engine,
            self.scorer,
            ready.prompts,
            ready.tokens,
            sampling=self.config.sampling.to_sampling(),
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
        progress: shows the run; None shows it on standard error.
        settings: everything else as in a recipe: `group_size=8, sampling={"max_tokens": 64}`.

    Returns:
        The run, with `.model`, `.metrics` and `.report()`.

    Raises:
        UsageError: a setting, file or argument that cannot work; raised before training starts.
    """
    rewards = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    named = all(isinstance(item, str) for item in rewards)
    values: dict[str, Any] = {"steps": steps, **settings}
    values["algorithm"] = {"name": algorithm, **settings.get("algorithm", {})}
    values["rewards"] = [{"name": item} for item in rewards] if named else []
    from_data = isinstance(prompts, str | Path)
    if from_data:
        values["data"] = {**settings.get("data", {}), "train": str(prompts)}
    policy = None
    if isinstance(model, str | Path):
        values["model"] = {"path": str(model), **settings.get("model", {})}
    elif tokenizer is None:
        raise UsageError("tokenizer = None: a model at hand needs its tokenizer, as tokenizer=….")
    else:
        policy = make_policy(model, tokenizer)
    config = build(values)
    held_out = None if eval_prompts is None else _prompts(config, eval_prompts)
    return train_config(
        config,
        policy=policy,
        functions=[] if named else rewards,
        prompts=None if from_data else _prompts(config, prompts),
        eval_prompts=[] if held_out is None and not from_data else held_out,
        resume=resume,
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
    progress: Progress | None = None,
) -> Run:
    """Run a configuration to its end and write `final/` and the report.

    Args:
        policy, functions, prompts, eval_prompts: in place of what the configuration names.
        resume: go on from the newest whole checkpoint of the run directory, or start.
        progress: shows the run; None shows it on standard error.
    """
    showing = progress or show_progress({config.algorithm.name: config.steps})
    try:
        prepared = prepare(
            config,
            policy=policy,
            functions=functions,
            prompts=prompts,
            eval_prompts=eval_prompts,
            resume=resume,
            progress=showing,
        )
        try:
            prepared.trainer.run()
            prepared.trainer.finish()
        finally:
            prepared.scorer.close()
    finally:
        if progress is None:
            showing.close()
    run = Run(
        config=config,
        folder=Path(config.output),
        model=prepared.policy.model,
        tokenizer=prepared.policy.tokenizer,
        metrics=prepared.trainer.metrics,
        evaluations=prepared.trainer.evaluations,
    )
    run.report()
    return run


def prepare(
    config: Config,
    *,
    progress: Progress,
    name: str | None = None,
    policy: Policy | None = None,
    functions: Sequence[Reward] = (),
    prompts: Sequence[Prompt] | None = None,
    eval_prompts: Sequence[Prompt] | None = None,
    resume: bool = False,
) -> Prepared:
    """Load, check and connect everything a run needs; nothing is trained yet but a warm-up.

    Args:
        name: of the run in the progress; the algorithm's by default. For the others see
            `train_config`.
    """
    name = name or config.algorithm.name
    saved = _newest(config, progress) if resume else None
    rules = bind(config.algorithm.name, config.algorithm.overrides())
    scorer = make_scorer(config, functions)
    connected = connect(config, rules, policy=policy)
    train_on = rendered(config, connected.policy, prompts or load_train(config))
    held_out = load_eval(config) if eval_prompts is None else eval_prompts
    measure_on = None
    if held_out:
        measure_on = rendered(config, connected.policy, held_out[: config.evaluation.prompts])
    if config.warmup is not None and saved is None:
        warm_up(config, connected.policy, progress=progress)
    settings = json.loads(config.to_json())
    log = RunLog(
        config.output,
        settings=settings,
        resume_at=(0 if saved is None else saved.step) if resume else None,
    )
    trainer = Trainer(
        settings=_settings(config),
        source=RolloutSource(
            train_on.prompts,
            train_on.tokens,
            engine=connected.engine,
            scorer=scorer,
            keep=rules.filter,
            group=config.group_size,
            sampling=config.sampling.to_sampling(),
            seed=config.seed,
            max_draws=config.algorithm.max_draws,
        ),
        engine=connected.engine,
        learner=connected.learner,
        rules=rules,
        log=log,
        progress=progress,
        trackers=make_trackers(config.logging.trackers, log.folder, settings),
        name=name,
    )
    prepared = Prepared(
        config=config,
        policy=connected.policy,
        engine=connected.engine,
        scorer=scorer,
        trainer=trainer,
    )
    if measure_on is not None:
        trainer.evaluate = lambda step: evaluation_row(prepared.measure(measure_on))
    if train_on.dropped:
        progress.say(f"{train_on.dropped} prompts are too long and were left out")
    if saved is not None:
        trainer.restore(saved)
        progress.say(f"resumed at step {saved.step}")
    return prepared


def evaluation_row(result: Measurement, *, split: str = "held_out") -> dict[str, Any]:
    """An evaluation as it is logged; "score" decides which model is the best."""
    figures = result.figures
    return {
        "split": split,
        "figures": {name: estimate.as_dict() for name, estimate in figures.items()},
        "truncated_share": result.truncated,
        "score": figures["sampled"].value if "sampled" in figures else figures["reward"].value,
    }


def load_train(config: Config) -> list[Prompt]:
    """The training prompts of a configuration."""
    data = config.data
    return _prompts(config, data.train, split=data.train_split, limit=data.limit)


def load_eval(config: Config) -> list[Prompt]:
    """Held-out prompts; none where the data is one file, which has no split to take them from."""
    data = config.data
    if data.eval is None and Path(data.train).is_file():
        return []
    source = data.eval or data.train
    limit = config.evaluation.prompts
    endless = source in GENERATORS
    held_out = _prompts(config, source, split=data.eval_split, limit=limit if endless else None)
    return held_out[:limit]


def rendered(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Rendered:
    """Prompts as the model sees them.

    Raises:
        UsageError: a prompt is too long, or an answer does not survive the tokenizer.
    """
    room = policy.context - config.sampling.max_tokens
    if room < 1:
        raise UsageError(
            f"sampling.max_tokens = {config.sampling.max_tokens}: the model's context is "
            f"{policy.context} tokens, which leaves no room for a prompt."
        )
    answers = sorted({p.answer for p in prompts[:100] if p.answer})
    problems = check_round_trip(policy.tokenizer, answers)
    if problems:
        raise UsageError(f"tokenizer: {problems[0]}")
    if tags := dropped_tags(policy.tokenizer):
        warnings.warn(
            f"{', '.join(tags)} are special tokens of this tokenizer: rewards here see them, but "
            "programs that decode with special tokens skipped will not; prefer ordinary tokens.",
            stacklevel=2,
        )
    limit = min(room, config.data.max_prompt_tokens or room)
    return render_all(prompts, policy.tokenizer, limit=limit, too_long=config.data.too_long)


def make_scorer(config: Config, functions: Sequence[Reward] = ()) -> Scorer:
    """The scorer of a configuration, or of functions in its place.

    Raises:
        UsageError: there is no reward at all.
    """
    pool = config.reward_pool
    limits: dict[str, Any] = {
        "workers": pool.workers,
        "timeout_s": pool.timeout_s,
        "memory_mb": pool.memory_mb,
        "max_tokens": config.sampling.max_tokens,
    }
    if functions:
        return from_functions(list(functions), **limits)
    if not config.rewards:
        raise UsageError(
            "rewards = []: a run needs at least one; add a section [[rewards]] with a name. "
            f"Known: {', '.join(REWARDS.names())}."
        )
    parts = [RewardPart(name=p.name, weight=p.weight, settings=p.settings) for p in config.rewards]
    return build_scorer(parts, **limits)


def _newest(config: Config, progress: Progress) -> Checkpoint | None:
    """The newest whole checkpoint of the run directory; says which were skipped and why."""
    saved, skipped = checkpoint.newest(Path(config.output) / "checkpoints")
    for line in skipped:
        progress.say(f"skipped {line}")
    return saved


def _prompts(
    config: Config, source: Any, *, split: str = "train", limit: int | None = None
) -> list[Prompt]:
    data = config.data
    return load_prompts(
        source,
        split=split,
        subset=data.subset,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        id_column=data.id_column,
        answer_style=data.answer_style,
        system=data.system,
        wording=data.wording,
        chat=data.chat,
        limit=limit,
    )


def _settings(config: Config) -> TrainerSettings:
    return TrainerSettings(
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        seed=config.seed,
        epochs=config.update.epochs,
        minibatches=config.update.minibatches,
        checkpoint_every_steps=config.checkpoint.every_steps,
        checkpoint_every_minutes=config.checkpoint.every_minutes,
        keep_last=config.checkpoint.keep_last,
        evaluate_every_steps=config.evaluation.every_steps,
        keep_best=config.evaluation.keep_best,
        rollouts_every=config.logging.rollouts_every,
    )
