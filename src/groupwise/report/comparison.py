"""Compare runs: curve summaries, contrasts, verdicts, and the table of results."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.errors import UsageError
from groupwise.evaluation import (
    Comparison,
    CurveSummary,
    FigureTable,
    compare_curves,
    figure_table,
    is_share,
    summarise,
    summarise_arm,
    title_of,
)
from groupwise.evaluation.tables import format_cell
from groupwise.report.curves import labels_of
from groupwise.report.data import RunData, figures_at
from groupwise.report.text import number

Points = tuple[list[float], list[float]]
"""Steps and values of a learning curve."""


def compare_runs(
    runs: Sequence[RunData],
    *,
    against: str | None = None,
    threshold: float = 0.6,
    metric: str = "accuracy",
    margin: float | None = None,
) -> Comparison:
    """Compare the labels of runs over the seeds that all of them share.

    Args:
        runs: at least one; each (label, seed) once.
        against: reference label; None takes the last.
        threshold: level of the metric that counts as learned, as a share.
        metric: key of the learning curve.
        margin: see `compare_curves`.

    Returns:
        Contrasts of curves and held-out figures, with verdicts.

    Raises:
        UsageError: no runs, an unknown label, or a label and seed given twice.
    """
    if not runs:
        raise UsageError("runs: must contain at least one run.")
    labels = labels_of(runs)
    points: dict[str, dict[int, Points]] = {label: {} for label in labels}
    finals: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        if run.seed in points[run.label]:
            raise UsageError(f"runs: {run.label} with seed {run.seed} is given twice.")
        if (found := _points(run, metric))[0]:
            points[run.label][run.seed] = found
        for split, figures in figures_at(run, last=True).items():
            for name, cell in figures.items():
                key = f"{_figure(name)} ({title_of(split)})"
                finals.setdefault(key, {}).setdefault(run.label, {})[run.seed] = cell.value
    shares = {
        key: values
        for key, values in finals.items()
        if is_share(key, [v for by_seed in values.values() for v in by_seed.values()])
    }
    return compare_curves(
        {label: summarise_arm(found, threshold=threshold) for label, found in points.items()},
        against=against or labels[-1],
        threshold=threshold,
        metric=metric,
        finals=shares,
        axis=runs[0].axis,
        margin=margin,
    )


def results_table(runs: Sequence[RunData]) -> FigureTable:
    """The table of results: the base model (step 0), then each label at its last evaluation.

    Args:
        runs: of the report.

    Returns:
        A table without a base column if no run was evaluated at step 0.
    """
    bases = [found for run in runs if (found := figures_at(run, last=False))]
    columns = {"base": bases[:1]} if bases else {}
    for label in labels_of(runs):
        found = [figures_at(run, last=True) for run in runs if run.label == label]
        if any(found):
            columns[label] = [figures for figures in found if figures]
    return figure_table(columns)


def changes(table: FigureTable) -> list[str]:
    """Figures before and after one run, without claims about its algorithm."""
    sentences = []
    after = [model for model in table.models if model != "base"]
    for split, figure in table.rows[:3]:
        cells = [table.cells.get((model, split, figure)) for model in ("base", *after[:1])]
        if len(cells) == 2 and all(cells):
            percent = table.percent(figure)
            texts = [" ".join(format_cell(cell, percent=percent)).strip() for cell in cells]
            unit = " %" if percent else ""
            name = f"{title_of(figure)}, {title_of(split)}"
            sentences.append(f"{name[:1].upper()}{name[1:]}: {texts[0]} → {texts[1]}{unit}.")
    return sentences


def curve_summary(run: RunData, *, metric: str, threshold: float) -> CurveSummary | None:
    """Summary of a run's learning curve; None without points."""
    steps, values = _points(run, metric)
    return summarise(steps, values, threshold=threshold) if steps else None


def _points(run: RunData, metric: str) -> Points:
    """Steps and values of the rows that have the metric."""
    pairs = [(number(row.get("step")), number(row.get(metric))) for row in run.metrics]
    points = [(step, value) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in points], [value for _, value in points]


def _figure(name: str) -> str:
    return f"{name} accuracy" if name in ("greedy", "sampled") else title_of(name)
