"""Evaluate several models on several tasks, and at several token budgets, as one family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.evaluation import (
    Contrast,
    Estimate,
    Figure,
    FigureTable,
    SeedDifference,
    figure_table,
    holm,
    paired_seeds,
    prompt_mean,
    sentence,
)
from groupwise.evaluation.details import adherence, curve_over_k
from groupwise.evaluation.evaluate import EvaluationResult, answer_style, evaluate, short_names
from groupwise.evaluation.sections import Section, sections
from groupwise.models.loading import configuration, resolve


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Sampled accuracy, pass@k or maj@k along an axis.

    Attributes:
        axis: what varies.
        places: numbers, or names in the order given.
        lines: by name, an estimate for each place; None where there is none.
    """

    axis: str
    places: tuple[str | int, ...]
    lines: Mapping[str, tuple[Estimate | None, ...]]


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """Figures of models × tasks, and paired differences from the first model.

    Attributes:
        figures: by model, then by section: a task, in a template, for a target, at a budget.
        sections: what was measured, in order.
        differences: sampled accuracy of each other model minus that of the first, by section.
        ks: values of k for pass@k and maj@k.
        notes: sections without a difference, and why.
    """

    figures: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    sections: tuple[Section, ...]
    ks: tuple[int, ...]
    differences: Mapping[tuple[str, str], Contrast]
    notes: tuple[str, ...] = ()

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence for each difference, then the notes."""
        return (*(f"{sentence(each)}." for each in self.differences.values()), *self.notes)

    def table(self) -> FigureTable:
        """All figures with intervals."""
        return figure_table({model: [sections] for model, sections in self.figures.items()})

    def curve(self) -> Curve:
        """Sampled accuracy over budgets or target lengths; without any, pass@k and maj@k over k;
        without k, sampled accuracy over the models, or over the sections of a single model."""

        def found(model: str, section: str) -> Estimate | None:
            return self.figures[model][section].get("sampled")

        names = [each.name for each in self.sections]
        places = tuple(sorted({each.place for each in self.sections if each.place is not None}))
        if places:
            axis = "token budget" if self.sections[0].budgeted else "target length (tokens)"
            by_place = {(each.line, each.place): each.name for each in self.sections}
            along = {
                f"{model}, {line}": tuple(found(model, by_place[line, n]) for n in places)
                for model in self.figures
                for line in dict.fromkeys(each.line for each in self.sections)
            }
            return Curve(axis=axis, places=places, lines=along)
        if self.ks:
            along = {
                f"{model}, {section}, {kind}@k": tuple(cells.get(f"{kind}_at_{k}") for k in self.ks)
                for model, each in self.figures.items()
                for section, cells in each.items()
                for kind in ("pass", "maj")
                if f"{kind}_at_{self.ks[0]}" in cells
            }
            return Curve(axis="k", places=self.ks, lines=along)
        if len(self.figures) > 1:
            lines = {name: tuple(found(model, name) for model in self.figures) for name in names}
            return Curve(axis="model", places=tuple(self.figures), lines=lines)
        lines = {model: tuple(found(model, name) for name in names) for model in self.figures}
        return Curve(axis="task", places=tuple(names), lines=lines)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "models": {
                model: {
                    section: {name: figure.as_dict() for name, figure in figures.items()}
                    for section, figures in sections.items()
                }
                for model, sections in self.figures.items()
            },
            "differences": [
                {
                    "model": model,
                    "against": each.second,
                    "section": section,
                    "figure": "sampled",
                    **each.result.difference.as_dict(),
                    "p": each.result.p,
                    "p_holm": each.p_holm,
                }
                for (model, section), each in self.differences.items()
            ],
            "verdicts": list(self.verdicts),
        }


def evaluate_suite(
    tasks: Mapping[str, Config],
    models: Sequence[str],
    *,
    seeds: int = 1,
    ks: Sequence[int] = (),
    budgets: Sequence[int] = (),
    targets: Sequence[int] = (),
    templates: Mapping[str, str | None] | None = None,
    names: Sequence[str] | None = None,
) -> SuiteResult:
    """Evaluate every model on every task; compare each model with the first.

    Sampled accuracy is compared by a paired t test over prompts. Holm's correction covers all
    differences of the call: (models − 1) × tasks × templates × targets × budgets.

    Args:
        tasks: settings by the name of the task.
        models: folders, hub names or "bundled"; the others are compared with the first.
        seeds: number of sampling seeds, counted up from each recipe's.
        ks: values of k for pass@k and maj@k, all from the same samples.
        budgets: token limits, each in place of the recipe's `sampling.max_tokens`. Equal random
            numbers make the answers at a smaller budget prefixes of those at a larger one.
        targets: lengths in tokens that the prompts ask for, each in place of the bounds of the
            recipe's transform `target_length`.
        templates: texts with {question} by name; None stands for the recipe's own prompts.
        names: what to call the models; None takes the ends of their paths.

    Raises:
        UsageError: before a model's weights are loaded, if a model is given twice or does not
            exist, k exceeds the samples, or as `sections` raises it.

    Source: Holm 1979; pass@k by Chen et al. 2021, equation 1.
    """
    _check(tasks, models, seeds, ks)
    measured = sections(tasks, budgets=budgets, targets=targets, templates=templates)
    names = names or short_names(models)
    figures: dict[str, dict[str, dict[str, Estimate]]] = {name: {} for name in names}
    found: dict[tuple[str, str], SeedDifference] = {}
    notes = []
    for each in measured:
        section, result = each.name, evaluate(each.config, models, seeds=seeds, names=names)
        for name in names:
            figures[name][section] = _figures(result, name, each, ks)
        for name in names[1:]:
            difference = _difference(result, name, names[0])
            if difference is None:
                notes.append(f"{section}: {name} and {names[0]} have no prompts to pair.")
            else:
                found[name, section] = difference
    corrected = holm([each.p for each in found.values()])
    differences = {
        (name, section): Contrast(
            figure=Figure.named(f"sampled accuracy on {section}", unit="pp"),
            first=name,
            second=names[0],
            result=result,
            p_holm=p,
        )
        for ((name, section), result), p in zip(found.items(), corrected, strict=True)
    }
    return SuiteResult(
        figures=figures,
        sections=tuple(measured),
        ks=tuple(sorted(ks)),
        differences=differences,
        notes=tuple(notes),
    )


def _check(
    tasks: Mapping[str, Config], models: Sequence[str], seeds: int, ks: Sequence[int]
) -> None:
    homes = [resolve(model) for model in models]
    places = [str(Path(home).resolve()) if Path(home).exists() else home for home in homes]
    if len(set(places)) < len(places):
        raise UsageError(f"models = {', '.join(models)}: must differ.")
    if len(set(ks)) < len(ks) or any(k < 1 for k in ks):
        listed = ",".join(map(str, ks))
        raise UsageError(f"--k = {listed}: must be different numbers, at least 1.")
    for task, config in tasks.items():
        samples = config.evaluation.samples * seeds
        if ks and max(ks) > samples:
            raise UsageError(
                f"--k = {max(ks)}: {task} draws {samples} samples per prompt; "
                f"--set evaluation.samples={-(-max(ks) // seeds)} draws enough."
            )
    trusted = all(config.model.trust_remote_code for config in tasks.values())
    for model in models:
        configuration(model, trust_remote_code=trusted)


def _figures(
    result: EvaluationResult, name: str, section: Section, ks: Sequence[int]
) -> dict[str, Estimate]:
    """Figures of the split; `within_budget` is the share of samples that end by themselves."""
    measured = result.measurements[name]
    figures = dict(result.figures[name][result.split])
    if ks:
        figures = {k: v for k, v in figures.items() if "_at_" not in k}
        figures |= curve_over_k(measured, ks, style=answer_style(section.config))
    if section.budgeted:
        figures["within_budget"] = prompt_mean(1.0 - measured.truncations)
    if section.target is not None:
        figures |= adherence(measured.lengths, section.target)
    return figures


def _difference(result: EvaluationResult, name: str, against: str) -> SeedDifference | None:
    first, second = (result.measurements[m].by_prompt["sampled"] for m in (name, against))
    if len(first) != len(second):
        return None
    both = ~(np.isnan(first) | np.isnan(second))
    return paired_seeds(first[both], second[both]) if both.any() else None
