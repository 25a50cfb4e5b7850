"""The kinds of stages. Each calls the function that the command of its name calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from groupwise.config import Config, load
from groupwise.errors import UsageError, suggest
from groupwise.registry import Registry

Output = Literal["model", "rows", "figures"]

STAGES = Registry("stage", ("work",))
"""Kinds of stages: functions of the stage's folder that return its figures."""

OUTPUTS: Mapping[Output, str] = {"model": "final", "rows": "rows.jsonl", "figures": "figures.json"}
"""Where in its folder a stage leaves its output."""

TAKES: Mapping[str, Output] = {
    "model": "model",
    "models": "model",
    "teacher": "model",
    "reward_model": "model",
    "adapter": "model",
    "rows": "rows",
    "also": "rows",
    "rules": "rows",
}
"""What a setting of that name takes from other stages."""


OF_ROWS: dict[str, Any] = {"data.prompt_column": "prompt", "data.transforms": []}
"""How a recipe reads the prompts of rows, which have been through its transforms already."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Where a stage works.

    Attributes:
        folder: of the stage.
        seed: of the pipeline; None leaves the recipe's own.
        names: by path, what to call the outputs of other stages in tables.
        starts: by the name of a model, that of the model which its stage started from.
    """

    folder: Path
    seed: int | None
    names: Mapping[str, str]
    starts: Mapping[str, str] = field(default_factory=dict)

    @property
    def final(self) -> Path:
        """The model that a stage leaves."""
        return self.folder / OUTPUTS["model"]

    @property
    def rows(self) -> Path:
        """The rows that a stage leaves."""
        return self.folder / OUTPUTS["rows"]

    def config(self, recipe: str, overrides: Sequence[str], **more: Any) -> Config:
        """The configuration of a stage; overrides of the pipeline come last."""
        seed = [] if self.seed is None else [f"seed={self.seed}"]
        own = [f"{key}={_toml(value)}" for key, value in more.items()]
        folder = f"output={_toml(str(self.folder))}"
        return load(recipe, [*seed, *overrides, *own, folder])


Figures = Mapping[str, Any]
"""The figures of a stage; the same for every run of it."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of stage.

    Attributes:
        name: of the registered function.
        output: what it leaves.
        configured: which configuration follows from its settings, or which several by name; None
            where it has no recipe.
    """

    name: str
    output: Output
    configured: Callable[..., Config | Mapping[str, Config]] | None = None

    @property
    def shown(self) -> str:
        """The name as files write it."""
        return self.name.replace("_", "-")


_KINDS: dict[str, Kind] = {}


def stage(
    output: Output, configured: Callable[..., Config | Mapping[str, Config]] | None = None
) -> Callable[[Callable[..., Figures]], Callable[..., Figures]]:
    """Register a kind of stage.

    Args:
        output: what it leaves in its folder.
        configured: called with the work and its settings by name; its configuration is checked
            before the first stage starts.
    """

    def registered(function: Callable[..., Figures]) -> Callable[..., Figures]:
        name = function.__name__
        _KINDS[name] = Kind(name=name, output=output, configured=configured)
        return STAGES.register(function)

    return registered


def kind_of(name: str) -> Kind:
    """The kind of a name, with - or _ between words.

    Raises:
        UsageError: there is none.
    """
    plain = name.replace("-", "_")
    if plain not in _KINDS:
        known = [kind.shown for kind in _KINDS.values()]
        raise UsageError(f"stage = {name!r}: no such kind of stage; {suggest(name, known)}")
    return _KINDS[plain]


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = [f"{_toml(key)} = {_toml(each)}" for key, each in value.items()]
        return "{" + ", ".join(pairs) + "}"
    return json.dumps(value, ensure_ascii=False)


def _train_config(
    work: Work,
    *,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    reward_model: str | None = None,
    part: str = "all",
    teacher: str | None = None,
    set: Sequence[str] = (),
    **_: Any,
) -> Config:
    own: dict[str, Any] = {}
    if model is not None:
        own["model.path"] = model
    if rows is not None:
        own |= {"data.train": rows, "data.answer_column": "answer"}
        own |= {"data.answer_style": "plain", "data.id_column": "id"} | OF_ROWS
    if teacher is not None:
        own["distillation.teacher"] = teacher
    if reward_model is not None:
        own["rewards"] = _learnt_rewards(work.config(recipe, set, **own), reward_model, part)
    return work.config(recipe, set, **own)


def _learnt_rewards(config: Config, reward_model: str, part: str) -> list[Mapping[str, Any]]:
    """A reward model as the only reward; those of the recipe are measured."""
    rewards = config.model_dump(mode="json")["rewards"]
    given = [{key: v for key, v in each.items() if v is not None} for each in rewards]
    learnt = {"name": "reward_model", "model": reward_model, "part": part}
    return [*({**each, "weight": 0.0} for each in given), learnt]


def _begun(config: Config) -> bool:
    """Whether a stage has been run before, if not to its end."""
    return (Path(config.output) / "config.json").exists()


@stage("model", _train_config)
def train(
    work: Any,
    *,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    reward_model: str | None = None,
    part: str = "all",
    set: Sequence[str] = (),
) -> Figures:
    """Reinforcement learning by a recipe.

    Args:
        recipe: name or path.
        model: to start from; None takes the recipe's.
        rows: prompts to train on, one per distinct id; None takes the recipe's data.
        reward_model: scores the completions; the recipe's rewards are then measured only.
        part: what of a completion the reward model sees: "all", or the "answer" alone.
        set: further settings of the recipe.
    """
    from groupwise.training.run import train_config

    rows = None if rows is None else str(_one_row_each(work, rows))
    given = {"model": model, "rows": rows, "reward_model": reward_model, "part": part, "set": set}
    config = _train_config(work, recipe=recipe, **given)
    run = train_config(config, resume=_begun(config))
    return {"steps": config.steps, **_last_evaluation(run.evaluations)}


@stage("model", _train_config)
def distil(
    work: Any,
    *,
    recipe: str,
    teacher: str,
    model: str | None = None,
    set: Sequence[str] = (),
) -> Figures:
    """On-policy distillation by a recipe whose algorithm takes a teacher.

    Args:
        recipe: name or path.
        teacher: has the policy's tokenizer.
        model: to start from; None takes the recipe's.
        set: further settings of the recipe.
    """
    from groupwise.training.run import train_config

    config = _train_config(work, recipe=recipe, model=model, teacher=teacher, set=set)
    run = train_config(config, resume=_begun(config))
    return {"steps": config.steps, **_last_evaluation(run.evaluations)}


def _one_row_each(work: Work, rows: str) -> Path:
    """The distinct prompts of a file of answers."""
    from groupwise.prompts.rows import read_rows
    from groupwise.training.stages.rows import write_rows

    path = work.folder / "prompts.jsonl"
    first: dict[Any, Mapping[str, Any]] = {}
    for row in read_rows(rows):
        first.setdefault(row["id"], row)
    drop = ("completion", "tokens", "sample", "finish", "reward", "correct", "parts")
    write_rows(path, [{k: v for k, v in r.items() if k not in drop} for r in first.values()])
    return path


def _last_evaluation(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not evaluations:
        return {}
    return {"held_out": {name: cell["value"] for name, cell in evaluations[-1]["figures"].items()}}


def _sft_config(
    work: Work,
    *,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    set: Sequence[str] = (),
    **_: Any,
) -> Config:
    own: dict[str, Any] = {}
    if model is not None:
        own["model.path"] = model
    if rows is not None:
        own |= {"data.train": rows, "data.answer_column": "answer"}
        own |= {"data.answer_style": "plain"} | OF_ROWS
    config = work.config(recipe, set, **own)
    if config.sft is None and config.warmup is None:
        raise UsageError(f"recipe = {recipe!r}: has no section [sft] or [warmup].")
    if rows is not None:
        section = "warmup" if config.sft is None else "sft"
        config = work.config(recipe, set, **own, **{f"{section}.column": "completion"})
    return config


@stage("model", _sft_config)
def sft(
    work: Any,
    *,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    set: Sequence[str] = (),
) -> Figures:
    """Supervised fine-tuning by the section [sft] of a recipe, or else [warmup].

    Args:
        recipe: name or path.
        model: to start from; None takes the recipe's.
        rows: answers to learn; None takes the worked answers of the recipe's data.
        set: further settings of the recipe.
    """
    from groupwise.training.offline.supervised import fine_tune
    from groupwise.training.stages.recipe import supervise_config

    config = _sft_config(work, recipe=recipe, model=model, rows=rows, set=set)
    if config.sft is not None:
        fine_tune(config, resume=_begun(config))
        return {"steps": config.steps}
    loss = supervise_config(config, work.final)
    return {"loss": loss}


def _section_config(
    work: Work,
    *,
    section: str,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    set: Sequence[str] = (),
) -> Config:
    """The configuration of a stage whose section of the recipe reads the rows."""
    own: dict[str, Any] = {} if model is None else {"model.path": model}
    if rows is not None:
        own[f"{section}.data"] = rows
    config = work.config(recipe, set, **own)
    if getattr(config, section) is None:
        raise UsageError(f"recipe = {recipe!r}: has no section [{section}].")
    return config


@stage("model")
def base(work: Any, *, phases: str) -> Figures:
    """Make a small model from nothing: `groupwise sft` with a recipe that has phases.

    Args:
        phases: that recipe, name or path; the seed of the pipeline is added to its seeds.
    """
    from groupwise.training.stages.recipe import base_phases, make_base

    plan = base_phases(phases, seed=work.seed)
    make_base(plan, work.final)
    return {"steps": sum(phase["steps"] for phase in plan["phases"])}


_prefer_config = partial(_section_config, section="preference")


@stage("model", _prefer_config)
def prefer(
    work: Any,
    *,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    set: Sequence[str] = (),
) -> Figures:
    """Training on preferences: `groupwise prefer`.

    Args:
        recipe: name or path.
        model: to start from; None takes the recipe's.
        rows: pairs; None samples the model's own answers.
        set: further settings of the recipe.
    """
    from groupwise.training.offline.preference import prefer

    config = _prefer_config(work, recipe=recipe, model=model, rows=rows, set=set)
    prefer(config, resume=_begun(config))
    return {"steps": config.steps}


_reward_model_config = partial(_section_config, section="reward_model")


@stage("model", _reward_model_config)
def reward_model(
    work: Any,
    *,
    recipe: str,
    model: str | None = None,
    rows: str | None = None,
    set: Sequence[str] = (),
) -> Figures:
    """Training a reward model: `groupwise reward-model`.

    Args:
        recipe: name or path.
        model: to start from; None takes the recipe's.
        rows: pairs; None takes the recipe's data, or ranks the model's own answers.
        set: further settings of the recipe.
    """
    from groupwise.training.offline.reward_model import train_reward_model

    config = _reward_model_config(work, recipe=recipe, model=model, rows=rows, set=set)
    train_reward_model(config, resume=_begun(config))
    return {"steps": config.steps}


def rows_config(
    work: Work,
    *,
    recipe: str,
    rows: str | None = None,
    split: str = "train",
    reward_model: str | None = None,
    part: str = "all",
    set: Sequence[str] = (),
    **_: Any,
) -> Config:
    """The configuration of a stage that answers the prompts of a split, or those of the rows."""
    own: dict[str, Any] = {}
    if rows is not None:
        own = {f"data.{split}": rows, "data.answer_column": "answer", "data.id_column": "id"}
        own |= OF_ROWS
    if reward_model is not None:
        own["rewards"] = _learnt_rewards(work.config(recipe, set, **own), reward_model, part)
    return work.config(recipe, set, **own)


@stage("rows", rows_config)
def sample(
    work: Any,
    *,
    model: str,
    recipe: str,
    rows: str | None = None,
    count: int = 8,
    split: str = "train",
    prompts: int | None = None,
    reward_model: str | None = None,
    part: str = "all",
    set: Sequence[str] = (),
) -> Figures:
    """Sample and score answers: `groupwise sample`.

    Args:
        model: that answers.
        recipe: with prompts, rewards and sampling.
        rows: prompts of the split; None takes the recipe's.
        count: answers per prompt.
        split: "train" or "eval".
        prompts: use only this many prompts.
        reward_model, part: as in `train`; correctness is still that of the recipe's rewards.
        set: further settings of the recipe.
    """
    from groupwise.training.stages.sample import sample

    learnt = {"reward_model": reward_model, "part": part}
    config = rows_config(work, recipe=recipe, rows=rows, split=split, set=set, **learnt)
    found = sample(config, model, work.rows, count=count, split=split, prompts=prompts)
    known = {"answers": found.rows, "prompts": found.prompts, "judged": found.judged}
    return known | {"right": found.correct, "prompts_solved": found.solved}


@stage("model")
def average(work: Any, *, models: Sequence[str], weights: Sequence[float] | None = None) -> Figures:
    """The weighted mean of several models' parameters.

    Args:
        models: of one architecture and vocabulary.
        weights: one per model, in any scale; None weighs all equally.
    """
    from groupwise.training.checkpoint.files import replace_folder
    from groupwise.training.stages.average import average

    # A kill may have left the model without its record.
    replace_folder(work.final, lambda place: average(models, place, weights=weights))
    return {"models": len(models)}


@stage("model")
def merge(work: Any, *, adapter: str, dtype: str | None = None) -> Figures:
    """Merge an adapter into its base model: `groupwise merge`.

    Args:
        adapter: folder.
        dtype: of the weights written.
    """
    from groupwise.training.checkpoint.files import replace_folder
    from groupwise.training.stages.merge import merge

    replace_folder(work.final, lambda place: merge(adapter, place, dtype=dtype))
    return {}


def clear(folder: Path) -> None:
    """Remove the output of a stage."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
