"""A run from a configuration, from a recipe, or from three arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise import checkpoint
from groupwise.algorithms import bind
from groupwise.config import Config, build
from groupwise.errors import UsageError
from groupwise.evaluation import Measurement, measure
from groupwise.execution import Connected, connect
from groupwise.logs import Progress, RunLog, make_trackers, show_progress
from groupwise.models import Policy, load_policy, make_policy
from groupwise.prompts.sources import load_prompts
from groupwise.prompts.templates import Rendered, check_round_trip, render_all
from groupwise.rewards import REWARDS, Scorer, build_scorer, from_functions
from groupwise.source import RolloutSource
from groupwise.trainer import Trainer, TrainerSettings
from groupwise.types import Metrics, Prompt


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


def train(
    model: str | Path | PreTrainedModel,
    prompts: Any,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
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
        model: folder, hub name, "bundled", or a `transformers` model at hand (then with
            `tokenizer`).
        prompts: a file, hub name or generator, or a list of strings, rows, or `Prompt`s.
        reward: a registered name, a function, or several. Functions are called with what their
            parameters ask for (`text`, `answer`, `group`, …), or in TRL's way if they take
            `completions`.
        algorithm: row of the table.
        steps: batches of rollouts.
        tokenizer: of a model at hand.
        eval_prompts: held-out prompts; None holds out a part of `prompts`, where it can be told
            apart.
        resume: go on from the newest checkpoint in `output`.
        settings: everything else as in a recipe: `group_size=8, sampling={"max_tokens": 64}`.

    Returns:
        the run, with `.model`, `.metrics` and `.report()`.

    Raises:
        UsageError: a setting, file or argument that cannot work; raised before training starts.
    """
    named, functions = _sorted_rewards(reward)
    values: dict[str, Any] = {"steps": steps, **settings}
    values["algorithm"] = {"name": algorithm, **values.get("algorithm", {})}
    if isinstance(model, str | Path):
        values["model"] = {"path": str(model), **values.get("model", {})}
        policy = None
    elif tokenizer is None:
        raise UsageError("tokenizer = None: a model at hand needs its tokenizer, as tokenizer=….")
    else:
        policy = make_policy(model, tokenizer)
    data = dict(values.get("data", {}))
    if isinstance(prompts, str | Path):
        data["train"] = str(prompts)
    values["data"], values["rewards"] = data, named
    config = build(values)
    given = None if isinstance(prompts, str | Path) else _prompts(config, prompts)
    held_out = None if eval_prompts is None else _prompts(config, eval_prompts)
    return train_config(
        config,
        policy=policy,
        functions=functions,
        prompts=given,
        eval_prompts=held_out if given is None or held_out is not None else [],
        resume=resume,
        progress=progress,
    )


def train_config(
    config: Config,
    *,
    policy: Policy | None = None,
    functions: Sequence[Callable[..., Any]] = (),
    prompts: Sequence[Prompt] | None = None,
    eval_prompts: Sequence[Prompt] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    name: str | None = None,
) -> Run:
    """Run a configuration to its end and write `final/`.

    Args:
        policy, functions, prompts, eval_prompts: in place of what the configuration names.
        resume: go on from the newest whole checkpoint in the run directory; start where there is
            none.
        progress: shows the run; None shows it on the terminal.
        name: of the run in the progress.
    """
    saved, skipped = (
        checkpoint.newest(Path(config.output) / "checkpoints") if resume else (None, [])
    )
    rules = bind(config.algorithm.name, config.algorithm.overrides(), where="algorithm")
    policy = policy or warmed_up(config)
    connected = connect(config, rules, policy=policy)
    name = name or config.algorithm.name
    log = RunLog(
        config.output,
        settings=json.loads(config.to_json()),
        resume_at=None if not resume else (0 if saved is None else saved.step),
    )
    showing = progress or show_progress({name: config.steps})
    scorer = _scorer(config, functions)
    try:
        for line in skipped:
            showing.say(f"skipped {line}")
        train_on = rendered(config, connected.policy, prompts or load_train(config))
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
            progress=showing,
            trackers=make_trackers(
                config.logging.trackers, log.folder, json.loads(config.to_json())
            ),
            evaluate=_evaluation(config, connected, scorer, eval_prompts),
            name=name,
        )
        if saved is not None:
            trainer.restore(saved)
            showing.say(f"resumed at step {saved.step}")
        trainer.run()
        trainer.finish()
    finally:
        scorer.close()
        if progress is None:
            showing.close()
    return Run(
        config=config,
        folder=log.folder,
        model=connected.policy.model,
        tokenizer=connected.policy.tokenizer,
        metrics=trainer.metrics,
        evaluations=trainer.evaluations,
    )


def warmed_up(config: Config) -> Policy:
    """The policy of a configuration, supervised first where it has a `warmup` section."""
    policy = load_policy(
        config.model.path,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    return policy


def load_train(config: Config) -> list[Prompt]:
    """The training prompts of a configuration."""
    return _prompts(
        config, config.data.train, split=config.data.train_split, limit=config.data.limit
    )


def load_eval(config: Config) -> list[Prompt]:
    """The held-out prompts of a configuration; none where its data has no split to take them
    from."""
    from groupwise.prompts.sources import GENERATORS

    data = config.data
    if data.eval is None and Path(data.train).is_file():
        return []
    source = data.eval or data.train
    endless = source in GENERATORS
    limit = config.evaluation.prompts
    return _prompts(config, source, split=data.eval_split, limit=limit if endless else None)[:limit]


def rendered(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Rendered:
    """Prompts as the model sees them.

    Raises:
        UsageError: a prompt is too long, or decoding would drop an answer or a tag of the format.
    """
    room = policy.context - config.sampling.max_tokens
    if room < 1:
        raise UsageError(
            f"sampling.max_tokens = {config.sampling.max_tokens}: the model's context is "
            f"{policy.context} tokens, which "
            "leaves no room for a prompt."
        )
    texts = {p.answer for p in prompts[:100] if p.answer} | set(_tags(config))
    problems = check_round_trip(policy.tokenizer, sorted(texts))
    if problems:
        raise UsageError(f"tokenizer: {problems[0]}")
    limit = min(room, config.data.max_prompt_tokens or room)
    return render_all(prompts, policy.tokenizer, limit=limit, too_long=config.data.too_long)


def _tags(config: Config) -> list[str]:
    """What the rewards look for in a completion, so that it is known to survive the tokenizer."""
    return [tag for part in config.rewards for tag in getattr(REWARDS.get(part.name), "tags", ())]


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
        seed=0,
    )


def _sorted_rewards(reward: Any) -> tuple[list[dict[str, Any]], list[Callable[..., Any]]]:
    """Names and functions among the rewards given."""
    given = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    return [{"name": r} for r in given if isinstance(r, str)], [
        r for r in given if not isinstance(r, str)
    ]


def _scorer(config: Config, functions: Sequence[Callable[..., Any]]) -> Scorer:
    if functions and config.rewards:
        raise UsageError(
            "reward: give registered names or functions, not both; a function may call registered "
            "ones."
        )
    if functions:
        return from_functions(functions, max_tokens=config.sampling.max_tokens)
    if not config.rewards:
        raise UsageError(
            "rewards = []: a run needs at least one reward; Known: "
            + ", ".join(REWARDS.names())
            + "."
        )
    pool = config.reward_pool
    return build_scorer(
        config.rewards,
        workers=pool.workers,
        timeout_s=pool.timeout_s,
        memory_mb=pool.memory_mb,
        max_tokens=config.sampling.max_tokens,
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


def _evaluation(
    config: Config, connected: Connected, scorer: Scorer, prompts: Sequence[Prompt] | None
) -> Callable[[int], Mapping[str, Any]] | None:
    """A function that measures the model as it stands on the held-out prompts."""
    held_out = load_eval(config) if prompts is None else list(prompts)[: config.evaluation.prompts]
    if not held_out:
        return None
    ready = rendered(config, connected.policy, held_out)

    def evaluate(step: int) -> Mapping[str, Any]:
        result = measured(config, connected, scorer, ready)
        figures = {name: estimate.as_dict() for name, estimate in result.figures.items()}
        score = result.figures.get("sampled", result.figures["reward"]).value
        return {"split": "held_out", "figures": figures, "score": score}

    return evaluate


def measured(config: Config, connected: Connected, scorer: Scorer, ready: Rendered) -> Measurement:
    """Greedy and sampled answers of the model as it stands."""
    return measure(
        connected.engine,
        scorer,
        ready.prompts,
        ready.tokens,
        sampling=config.sampling.to_sampling(),
        samples=config.evaluation.samples,
    )
