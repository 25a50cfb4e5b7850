"""What is refused before the first stage starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Config
from groupwise.config.data import load_eval, load_train
from groupwise.errors import UsageError
from groupwise.pipelines.plan import Pipeline, Stage, references
from groupwise.pipelines.resolved import configured, resolved
from groupwise.prompts.contamination import shared_prompts
from groupwise.training.stages.recipe import base_of, base_phases
from groupwise.training.stages.select import rules_of

if TYPE_CHECKING:
    from groupwise.training.stages.average import Parts

LEARNING = ("train", "distil", "sft", "prefer", "reward_model")
"""Kinds of stages that train on the prompts of their recipe unless they take rows."""

RUNS = ("train", "distil")
"""Kinds of stages whose folder is a run directory."""


def check_settings(stage: Stage, given: Mapping[str, Any]) -> None:
    """Refuse what a stage's function would refuse after the stages before it have run."""
    try:
        if stage.kind.name == "select":
            rules_of(given.get("keep", ()))
            if given.get("ratio", 1.5) <= 1:
                raise UsageError(f"ratio = {given['ratio']!r}: must be greater than 1.")
        if stage.kind.name == "base":
            base_phases(given["phases"])
        for name in ("count", "seeds", "prompts", "most"):
            if (number := given.get(name)) is not None and number < 1:
                raise UsageError(f"{name} = {number!r}: must be at least 1.")
        if stage.kind.name == "average":
            from groupwise.training.stages.average import shares

            shares(given["models"], given.get("weights"))
        if stage.kind.name == "report" and (figure := given.get("figure")):
            from groupwise.report import check_figure

            check_figure(figure)
    except UsageError as error:
        raise UsageError(f"{stage.name}: {error}") from None


def check_models(stage: Stage, pipeline: Pipeline) -> None:
    """Refuse to average models that differ in architecture, size or vocabulary, and adapters, and
    to report on models that no run trained. The output of a stage has the architecture of the model
    that it started from, or of the recipe that makes the first one.

    Raises:
        UsageError: there are such models.
    """
    try:
        if stage.kind.name == "average":
            from groupwise.training.stages.average import check_alike

            check_alike([_origin(model, stage, pipeline) for model in stage.settings["models"]])
        if stage.kind.name == "report":
            for model in stage.settings["models"]:
                _check_run(model, stage, pipeline)
    except UsageError as error:
        raise UsageError(f"{stage.name}: {error}") from None


def _check_run(model: str, stage: Stage, pipeline: Pipeline) -> None:
    if model.startswith("@"):
        maker = pipeline.stage(stage.takes[model[1:]])
        if maker.kind.name not in RUNS:
            raise UsageError(
                f"{model}: is the model of a stage {maker.kind.shown}, which keeps no curves; "
                f"report on stages {' or '.join(RUNS)}."
            )
    else:
        from groupwise.report import RunData

        RunData.read(Path(model).parent)


def _origin(model: str, stage: Stage, pipeline: Pipeline, *, merged: bool = False) -> Parts:
    """The parts of the model from outside, or of a stage `base`, that a model descends from."""
    from groupwise.training.stages.average import parts_of

    if not model.startswith("@"):
        return parts_of(model)
    maker = pipeline.stage(stage.takes[model[1:]])
    if maker.kind.name == "merge":
        return _origin(maker.settings["adapter"], maker, pipeline, merged=True)
    if maker.kind.name == "base":
        recipe = base_phases(maker.settings["phases"])
        return parts_of(base_of(recipe).fresh(recipe), name=model)
    if maker.kind.name == "average":
        return _origin(maker.settings["models"][0], maker, pipeline)
    (config,) = configured(maker, resolved(maker, pipeline), pipeline).values()
    if config.model.adapter is not None and not merged:
        raise UsageError(f"{model}: is an adapter; merge it into its base by a stage merge first.")
    start = maker.settings.get("model")
    return parts_of(config.model.path) if start is None else _origin(start, maker, pipeline)


def check_overlap(stage: Stage, pipeline: Pipeline) -> None:
    """Refuse a stage that measures a model on prompts that it is trained on: held-out prompts of a
    training stage, or those of an evaluation.

    Raises:
        UsageError: there are such prompts, or the data cannot be loaded.
    """
    if stage.kind.name not in ("train", "distil", "eval"):
        return
    has_rows = "rows" in stage.settings
    learned = cache(lambda: [*_learned(stage, pipeline)])
    for config in configured(stage, resolved(stage, pipeline), pipeline).values():
        if has_rows and (stage.kind.name == "eval" or config.data.eval is None):
            continue
        held_out = load_eval(config)
        for maker, source, split in learned() if held_out else ():
            prompts = load_train(source) if split == "train" else load_eval(source)
            if shared := shared_prompts(prompts, held_out):
                seen = "training prompts" if maker == stage else f"training prompts of {maker.name}"
                raise UsageError(
                    f"{stage.name}: {shared} of {len(held_out)} held-out prompts are {seen}; "
                    "choose others by data.eval or data.eval_split."
                )


def _learned(stage: Stage, pipeline: Pipeline) -> Iterator[tuple[Stage, Config, str]]:
    """The stages whose prompts the measured models are trained on, with configuration and split; of
    several with the same prompts the first."""
    if stage.kind.name == "eval":
        names = {stage.takes[name] for name in references(stage.settings["models"])}
    else:
        names = {stage.name}
    open_names, known = sorted(names), list[Any]()
    while open_names:
        maker = pipeline.stage(open_names.pop())
        found = {*maker.takes.values()} - names
        names |= found
        open_names += sorted(found)
        draws = maker.kind.name in (*LEARNING, "sample", "contexts")
        if draws and "rows" not in maker.settings:
            for config in configured(maker, resolved(maker, pipeline), pipeline).values():
                split = maker.settings.get("split", "train")
                prompts = config.data, config.seed, config.evaluation.prompts, split
                if prompts not in known and not _has_own_data(maker, config):
                    known.append(prompts)
                    yield maker, config, split


def _has_own_data(stage: Stage, config: Config) -> bool:
    """Whether a stage learns from a file of its section of the recipe."""
    section = {"sft": "sft", "prefer": "preference", "reward_model": "reward_model"}
    own = getattr(config, section.get(stage.kind.name, ""), None)
    return getattr(own, "data", None) is not None
