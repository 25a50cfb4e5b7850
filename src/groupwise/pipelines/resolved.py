"""What the settings of a stage stand for: paths of outputs, configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.pipelines.plan import Pipeline, Stage, references
from groupwise.pipelines.stages import OUTPUTS, TAKES, Work


def resolved(stage: Stage, pipeline: Pipeline) -> dict[str, Any]:
    """The settings with paths in place of "@stage"."""

    def path(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("@"):
            taken = pipeline.stage(stage.takes[value[1:]])
            return str(pipeline.output / taken.name / OUTPUTS[taken.kind.output])
        if isinstance(value, list):
            return [path(each) for each in value]
        return value

    settings = {key: path(value) for key, value in stage.settings.items()}
    for key, value in stage.settings.items():
        for reference in references(value):
            taken = pipeline.stage(stage.takes[reference])
            if key not in TAKES or TAKES[key] != taken.kind.output:
                wants = f"takes a {TAKES[key]}" if key in TAKES else "takes no stage"
                raise UsageError(
                    f"{stage.name}.{key} = '@{reference}': {wants}, and {taken.name} leaves "
                    f"{taken.kind.output}."
                )
    return settings


def work_of(stage: Stage, pipeline: Pipeline) -> Work:
    """Where a stage works."""
    names = {
        str(pipeline.output / each.name / OUTPUTS[each.kind.output]): each.name
        for each in pipeline.stages
    }
    return Work(
        folder=pipeline.output / stage.name,
        seed=pipeline.seed,
        names=names,
        starts=starts_of(pipeline),
    )


def starts_of(pipeline: Pipeline) -> dict[str, str]:
    """The model that each stage started from, by the names of both."""
    return {
        each.name: each.takes[start[1:]] if start.startswith("@") else start
        for each in pipeline.stages
        if each.kind.output == "model" and (start := each.settings.get("model")) is not None
    }


def configured(stage: Stage, given: Mapping[str, Any], pipeline: Pipeline) -> Mapping[str, Config]:
    """The configurations of a stage by the name of the recipe, checked; "" for the only one."""
    if stage.kind.configured is None:
        return {}
    try:
        found = stage.kind.configured(work_of(stage, pipeline), **given)
    except UsageError as error:
        raise UsageError(f"{stage.name}: {error}") from error.__cause__
    if isinstance(found, Mapping) and len(found) > 1:
        return found
    return {"": next(iter(found.values())) if isinstance(found, Mapping) else found}
