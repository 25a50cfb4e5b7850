"""The stage that measures models: one task or several, at token budgets or for target lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.pipelines.stages import OUTPUTS, Figures, Work, rows_config, stage
from groupwise.rundir.files import replace_text

Cells = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""Figures with their intervals, by model and name."""


def tasks_of(
    work: Work,
    *,
    recipe: str | Sequence[str],
    rows: str | None = None,
    budgets: Sequence[int] = (),
    targets: Sequence[int] = (),
    reflection: bool = False,
    set: Sequence[str] = (),
    **_: Any,
) -> dict[str, Config]:
    """The configurations of an evaluation by the names of their recipes, checked.

    Raises:
        UsageError: no recipe or one given twice, rows for several recipes, budgets or targets that
            a recipe cannot have, or the reflection test together with any of these.
    """
    from groupwise.evaluation.sections import sections

    recipes = [recipe] if isinstance(recipe, str) else list(recipe)
    names = [Path(each).stem for each in recipes]
    if not names or len(names) > len(dict.fromkeys(names)):
        raise UsageError(
            f"recipe = {recipes!r}: must be one recipe, or several with different names."
        )
    if rows is not None and len(names) > 1:
        raise UsageError(f"rows = {rows!r}: replace the prompts of one recipe, not of several.")
    if reflection and (len(names) > 1 or budgets or targets):
        raise UsageError("reflection = true: takes one recipe, without budgets and targets.")
    found = {
        name: rows_config(work, recipe=each, rows=rows, split="eval", set=set)
        for name, each in zip(names, recipes, strict=True)
    }
    sections(found, budgets=budgets, targets=targets)
    return found


@stage("figures", tasks_of)
def eval(
    work: Any,
    *,
    models: Sequence[str],
    recipe: str | list[str],
    rows: str | None = None,
    seeds: int = 1,
    budgets: Sequence[int] = (),
    targets: Sequence[int] = (),
    reflection: bool = False,
    set: Sequence[str] = (),
) -> Figures:
    """Measure models on held-out prompts, paired: `groupwise eval`.

    Args:
        models: the others are compared with the last one, and with the one that they started from.
        recipe: with prompts, rewards and sampling; a list measures on each, and corrects the
            comparisons of all of them together.
        rows: held-out prompts; None takes the recipe's.
        seeds: sampling seeds.
        budgets: token limits, each in place of `sampling.max_tokens`.
        targets: lengths in tokens that the prompts ask for, by the transform `target_length`.
        reflection: measure recovery from planted errors and from own wrong answers as well.
        set: further settings of the recipes.
    """
    many = {"budgets": budgets, "targets": targets, "reflection": reflection}
    tasks = tasks_of(work, recipe=recipe, rows=rows, set=set, **many)
    names = [work.names.get(model, model) for model in models]
    if len(tasks) > 1 or budgets or targets:
        figures, values = _of_several(
            tasks, models, names, seeds=seeds, budgets=budgets, targets=targets
        )
    else:
        (config,) = tasks.values()
        pairs = [
            (name, start)
            for name in names
            if (start := work.starts.get(name)) in names[:-1] and name != names[-1]
        ]
        figures, values = _of_one(
            config, models, names, seeds=seeds, reflection=reflection, pairs=pairs
        )
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    replace_text(work.folder / OUTPUTS["figures"], text)
    return figures


def _of_one(
    config: Config,
    models: Sequence[str],
    names: Sequence[str],
    *,
    seeds: int,
    reflection: bool,
    pairs: Sequence[tuple[str, str]],
) -> tuple[Figures, Figures]:
    from groupwise.evaluation.evaluate import evaluate

    values = evaluate(
        config, list(models), seeds=seeds, reflection=reflection, names=names, pairs=pairs
    ).as_dict()
    figures = {"models": values["models"], "verdicts": values["verdicts"]}
    if values["reordered"] is not None:
        figures["reordered"] = values["reordered"]
    if reflection:
        figures["sections"] = _reflection_sections(values)
    return figures, values


def _reflection_sections(values: Mapping[str, Any]) -> dict[str, Cells]:
    """The figures of the evaluated split and of the reflection test, where every model has them."""
    by_model = values["sections"]
    return {
        section: {name: each[section] for name, each in by_model.items()}
        for section in next(iter(by_model.values()))
        if section == values["split"] or section.startswith(("reflection", "own_errors"))
        if all(section in each for each in by_model.values())
    }


def _of_several(
    tasks: Mapping[str, Config],
    models: Sequence[str],
    names: Sequence[str],
    *,
    seeds: int,
    budgets: Sequence[int],
    targets: Sequence[int],
) -> tuple[Figures, Figures]:
    from groupwise.evaluation.suite import evaluate_suite

    # A suite compares with its first model, a stage with its last.
    values = evaluate_suite(
        tasks,
        [models[-1], *models[:-1]],
        seeds=seeds,
        budgets=budgets,
        targets=targets,
        names=[names[-1], *names[:-1]],
    ).as_dict()
    by_model = values["models"]
    sections = {
        section: {name: by_model[name][section] for name in names} for section in by_model[names[0]]
    }
    return {"sections": sections, "verdicts": values["verdicts"]}, values


def sections_of(figures: Mapping[str, Any], stage: str) -> dict[str, Cells]:
    """The figures of an evaluation by the heading of their table; those of one task alone have
    the name of the stage. Nothing for other stages.

    Example:
        >>> sections_of({"models": {"a": {}}}, "table")
        {'table': {'a': {}}}
        >>> sections_of({"sections": {"x": {"a": {}}}}, "table"), sections_of({"rows": 3}, "kept")
        ({'table: x': {'a': {}}}, {})
    """
    if "sections" in figures:
        return {f"{stage}: {name}": models for name, models in figures["sections"].items()}
    models = figures.get("models")
    return {stage: models} if isinstance(models, Mapping) else {}
