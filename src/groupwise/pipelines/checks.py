"""What is refused before the first stage starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Config
from groupwise.config.data import has_eval, load_eval, load_train
from groupwise.errors import UsageError
from groupwise.pipelines.plan import Pipeline, Stage, references
from groupwise.pipelines.resolved import configured, resolved
from groupwise.pipelines.stages import TAKES
from groupwise.prompts.contamination import shared_prompts
from groupwise.prompts.sources import load_prompts
from groupwise.training.changing import check_schedules
from groupwise.training.stages.recipe import base_of, base_phases
from groupwise.training.stages.rows import read_samples
from groupwise.training.stages.select import preference_pairs, rules_of, select
from groupwise.types import Prompt

if TYPE_CHECKING:
    from groupwise.training.stages.average import Parts

LEARNING = ("train", "distil", "sft", "prefer", "reward_model")
"""Kinds of stages that train on the prompts of their recipe unless they take rows."""

RUNS = ("train", "distil")
"""Kinds of stages whose folder is a run directory."""

OF_ROWS = tuple(key for key, output in TAKES.items() if output == "rows" and key != "rules")
"""Settings that take rows with prompts."""


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
        if stage.kind.name == "eval" and len({*given["models"]}) < len(given["models"]):
            raise UsageError(f"models = {', '.join(stage.settings['models'])}: must differ.")
        if stage.kind.name == "average":
            from groupwise.training.stages.average import shares

            shares(given["models"], given.get("weights"))
        if stage.kind.name == "report" and (figure := given.get("figure")):
            from groupwise.report import check_figure

            check_figure(figure)
    except UsageError as error:
        raise UsageError(f"{stage.name}: {error}") from None


def check_configurations(stage: Stage, configs: Mapping[str, Config]) -> None:
    """Refuse schedules with a value that their setting cannot have at one of their points."""
    if stage.kind.name not in ("train", "distil"):
        return
    for config in configs.values():
        try:
            check_schedules(config)
        except UsageError as error:
            raise UsageError(f"{stage.name}: {error}") from None


def check_selection(stage: Stage) -> None:
    """Refuse a selection that leaves nothing of files from outside; what stages will make is not
    known yet.

    Raises:
        UsageError: a rule leaves no rows, or no pairs can be made.
    """
    if stage.kind.name != "select" or stage.takes:
        return
    given = stage.settings
    files = [given["rows"]] if isinstance(given["rows"], str) else given["rows"]
    try:
        rows = [row for path in files for row in read_samples(path)]
        kept = select(rows, rules_of(given.get("keep", ()))).rows
        if given.get("pairs"):
            preference_pairs(kept, ratio=given.get("ratio", 1.5), most=given.get("most", 1))
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
        raise UsageError(f"{model}: is an adapter; merge it first, with a stage `merge`.")
    start = maker.settings.get("model")
    return parts_of(config.model.path) if start is None else _origin(start, maker, pipeline)


def check_overlap(stage: Stage, pipeline: Pipeline) -> None:
    """Refuse a stage that measures a model on prompts that it is trained on, held-out prompts of a
    training stage or those of an evaluation, and a stage that has no held-out prompts to measure
    or sample.

    Raises:
        UsageError: there are such prompts, or none, or the data cannot be loaded.
    """
    settings = stage.settings
    if stage.kind.name == "sample" and settings.get("split") == "eval" and "rows" not in settings:
        _held_out(stage, pipeline)
    if stage.kind.name not in ("train", "distil", "eval"):
        return
    learned = cache(lambda: [*_learned(stage, pipeline)])
    for held_out in _held_out(stage, pipeline):
        for maker, prompts in learned() if held_out else ():
            if shared := shared_prompts(prompts, held_out):
                seen = "training prompts" if maker == stage else f"training prompts of {maker.name}"
                others = "rows" if "rows" in settings else "data.eval or data.eval_split"
                raise UsageError(
                    f"{stage.name}: {shared} of {len(held_out)} held-out prompts are {seen}; "
                    f"choose others by {others}."
                )


def _held_out(stage: Stage, pipeline: Pipeline) -> list[Sequence[Prompt]]:
    """The held-out prompts of a stage, by recipe. Rows of another stage are the prompts that the
    stages before it drew."""
    measures = stage.kind.name in ("eval", "sample")
    rows = stage.settings.get("rows")
    if measures and rows is not None and references(rows):
        names = {stage.takes[name] for name in references(rows)}
        return [prompts for _, prompts in _drawn(names, pipeline, through=OF_ROWS)]
    found = []
    for config in configured(stage, resolved(stage, pipeline), pipeline).values():
        if measures and not has_eval(config):
            raise UsageError(
                f"{stage.name}: data.eval must be set, as {config.data.train} has no split to "
                "evaluate on."
            )
        if rows is None or measures or config.data.eval is not None:
            found.append(load_eval(config))
    return found


def _learned(stage: Stage, pipeline: Pipeline) -> Iterator[tuple[Stage, Sequence[Prompt]]]:
    """The stages whose prompts the measured models are trained on, with these prompts."""
    if stage.kind.name == "eval":
        names = {stage.takes[name] for name in references(stage.settings["models"])}
    else:
        names = {stage.name}
    return _drawn(names, pipeline)


def _drawn(
    names: Iterable[str], pipeline: Pipeline, *, through: Sequence[str] = tuple(TAKES)
) -> Iterator[tuple[Stage, Sequence[Prompt]]]:
    """The prompts that some stages read from outside, and those whose outputs they take by the
    settings `through`; of several stages with the same prompts the first."""
    seen = {*names}
    open_names, known = sorted(seen), list[Any]()
    while open_names:
        maker = pipeline.stage(open_names.pop())
        taken = {
            maker.takes[name] for key in through for name in references(maker.settings.get(key, ""))
        }
        open_names += sorted(taken - seen)
        seen |= taken
        for path in _files(maker, pipeline):
            if path not in known:
                known.append(path)
                yield maker, _prompts_of(path)
        draws = maker.kind.name in (*LEARNING, "sample", "contexts")
        if draws and "rows" not in maker.settings:
            for config in configured(maker, resolved(maker, pipeline), pipeline).values():
                split = maker.settings.get("split", "train")
                prompts = config.data, config.seed, config.evaluation.prompts, split
                if prompts not in known and _own_data(maker, config) is None:
                    known.append(prompts)
                    yield maker, load_train(config) if split == "train" else load_eval(config)


def _files(maker: Stage, pipeline: Pipeline) -> Iterator[str]:
    """The files of rows from outside that a stage reads."""
    for key in OF_ROWS:
        given = maker.settings.get(key, [])
        yield from (
            each for each in ([given] if isinstance(given, str) else given) if each[:1] != "@"
        )
    for config in configured(maker, resolved(maker, pipeline), pipeline).values():
        own = _own_data(maker, config)
        if own is not None and Path(own).is_file() and "rows" not in maker.settings:
            yield own


def _prompts_of(path: str) -> Sequence[Prompt]:
    """The prompts of a file of rows; none where it has another form."""
    try:
        return load_prompts(path)
    except UsageError:
        return []


def _own_data(stage: Stage, config: Config) -> str | None:
    """The data that a stage learns from instead of its prompts, named in its section."""
    section = {"sft": "sft", "prefer": "preference", "reward_model": "reward_model"}
    own = getattr(config, section.get(stage.kind.name, ""), None)
    return getattr(own, "data", None)
