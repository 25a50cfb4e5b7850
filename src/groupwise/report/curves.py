"""The data of the charts, for the page and the picture."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupwise.evaluation import is_share, seed_mean, smooth, title_of
from groupwise.report.data import RunData, estimate
from groupwise.report.metrics import METRICS, figure_meaning, metric
from groupwise.report.text import number

WINDOW = 5
MOST_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class Line:
    """One algorithm in a chart.

    Attributes:
        label: of the algorithm.
        mean: smoothed curve of one seed, or mean of the smoothed curves of several.
        low, high: interval over seeds, or of the evaluation; NaN where there is none.
        thin: smoothed curves of all seeds, or the raw values of a single one.
    """

    label: str
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    thin: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One metric over the steps, for all algorithms.

    Attributes:
        key: of the metric.
        title: heading of the chart.
        meaning: what the metric is, shown while the mouse is on the heading.
        share: whether values are shares, drawn from 0 to 100 %.
        axis: unit of the steps.
        steps: of the points; lines are NaN where a run has no point.
        lines: in the order of the labels.
    """

    key: str
    title: str
    meaning: str
    share: bool
    axis: str
    steps: np.ndarray
    lines: tuple[Line, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "key": self.key,
            "title": self.title,
            "meaning": self.meaning,
            "share": self.share,
            "axis": self.axis,
            "steps": self.steps.tolist(),
            "lines": [
                {
                    "label": line.label,
                    "mean": line.mean.tolist(),
                    "low": line.low.tolist(),
                    "high": line.high.tolist(),
                    "thin": [values.tolist() for values in line.thin],
                }
                for line in self.lines
            ],
        }


def labels_of(runs: Sequence[RunData]) -> tuple[str, ...]:
    """Labels in order of first appearance, which determines their colours."""
    return tuple(dict.fromkeys(run.label for run in runs))


def seeds_of(runs: Sequence[RunData]) -> int:
    """Largest number of runs of a label."""
    return max((sum(run.label == label for run in runs) for label in labels_of(runs)), default=0)


def metric_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart for each metric, in the order of the list of metrics."""
    flat = [_series(run) for run in runs]
    keys = dict.fromkeys(key for series in flat for key in series)
    order = [key for key in METRICS if key in keys]
    order += [key for key in keys if key not in METRICS and not key.startswith("seconds.")]
    return [_chart(key, runs, [series.get(key, {}) for series in flat]) for key in order]


def evaluation_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart for each held-out figure with at least three evaluations."""
    charts = []
    keys = dict.fromkeys(
        (str(row.get("split")), str(name))
        for run in runs
        for row in run.evaluations
        for name in row["figures"]
    )
    for split, name in keys:
        points = [_evaluated(run, split, name) for run in runs]
        if max(map(len, points), default=0) >= 3:
            values = [{step: cell[0] for step, cell in run.items()} for run in points]
            title = f"{title_of(split)}: {title_of(name)}".capitalize()
            chart = _chart(f"{split}.{name}", runs, values, title=title, measured=True)
            charts.append(_with_intervals(chart, runs, points))
    return charts


def stage_seconds(runs: Sequence[RunData]) -> dict[str, dict[str, float]]:
    """Mean seconds per step by label and stage."""
    found: dict[str, dict[str, float]] = {}
    for label in labels_of(runs):
        stages: dict[str, list[float]] = {}
        for run in runs:
            if run.label == label:
                for key, points in _series(run).items():
                    if key.startswith("seconds."):
                        stages.setdefault(key.removeprefix("seconds."), []).extend(points.values())
        found[label] = {stage: float(np.mean(values)) for stage, values in stages.items()}
    return {label: stages for label, stages in found.items() if stages}


def _series(run: RunData) -> dict[str, dict[float, float]]:
    """Every numeric metric by its dotted key: value by step."""
    found: dict[str, dict[float, float]] = {}
    for row in run.metrics:
        step = number(row.get("step"))
        for key, value in _flat(row):
            if step is not None and key != "step":
                found.setdefault(key, {})[step] = value
    return found


def _flat(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    pairs = []
    for key, value in row.items():
        if isinstance(value, Mapping):
            if not prefix:
                pairs += _flat(value, f"{key}.")
        elif (found := number(value)) is not None:
            pairs.append((f"{prefix}{key}", found))
    return pairs


def _chart(
    key: str,
    runs: Sequence[RunData],
    values: Sequence[Mapping[float, float]],
    *,
    title: str | None = None,
    measured: bool = False,
) -> Chart:
    """A chart of one key; evaluated figures have their own intervals and are not smoothed."""
    steps = np.array(sorted({step for points in values for step in points}))
    lines = []
    for label in labels_of(runs):
        mine = [p for run, p in zip(runs, values, strict=True) if run.label == label and p]
        if mine:
            lines.append(_line(label, mine, steps, 1 if measured else WINDOW))
    numbers = [value for points in values for value in points.values()]
    named = key == "accuracy" or key.endswith(("_share", "_fraction"))
    share = (named or measured) and is_share(key.split(".")[-1], numbers)
    keep = np.unique(
        np.linspace(0, steps.size - 1, min(steps.size, MOST_POINTS)).round().astype(int)
    )
    known = metric(key)
    return Chart(
        key=key,
        title=title or (known.title if known else title_of(key.replace(".", ": ")).capitalize()),
        meaning=figure_meaning(key.split(".")[-1]) if measured else known.meaning if known else "",
        share=share,
        axis=runs[0].axis,
        steps=steps[keep],
        lines=tuple(_thinned(line, keep) for line in lines),
    )


def _line(
    label: str, points: Sequence[Mapping[float, float]], steps: np.ndarray, window: int
) -> Line:
    raw = [np.array([run.get(step, np.nan) for step in steps]) for run in points]
    curves = [_smoothed(values, window) for values in raw]
    unknown = np.full(steps.size, np.nan)
    if len(points) == 1:
        return Line(label=label, mean=curves[0], low=unknown, high=unknown, thin=(raw[0],))
    grid = np.array(curves)
    with warnings.catch_warnings():
        # A step without values is a gap in the line.
        warnings.simplefilter("ignore", RuntimeWarning)
        mean = np.nanmean(grid, axis=0)
    found = [
        seed_mean(column) if np.isfinite(column).all() else None
        for column in np.ascontiguousarray(grid.T)
    ]
    low = np.array([cell.low if cell else np.nan for cell in found])
    high = np.array([cell.high if cell else np.nan for cell in found])
    return Line(label=label, mean=mean, low=low, high=high, thin=tuple(curves))


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Moving average over the finite points."""
    finite = np.isfinite(values)
    result = np.full(values.size, np.nan)
    result[finite] = smooth(values[finite], window=window)
    return result


def _thinned(line: Line, keep: np.ndarray) -> Line:
    kept = {name: getattr(line, name)[keep] for name in ("mean", "low", "high")}
    return replace(line, **kept, thin=tuple(values[keep] for values in line.thin))


def _evaluated(run: RunData, split: str, name: str) -> dict[float, tuple[float, float, float]]:
    found = {}
    for row in run.evaluations:
        step, cell = number(row.get("step")), estimate(row["figures"].get(name))
        if str(row.get("split")) == split and step is not None and cell is not None:
            found[step] = (cell.value, cell.low, cell.high)
    return found


def _with_intervals(
    chart: Chart,
    runs: Sequence[RunData],
    points: Sequence[Mapping[float, tuple[float, float, float]]],
) -> Chart:
    """The chart with the intervals of the evaluations on lines of a single seed."""
    lines = []
    for line in chart.lines:
        mine = [p for run, p in zip(runs, points, strict=True) if run.label == line.label and p]
        if len(mine) == 1:
            ends = [mine[0].get(step, (np.nan,) * 3) for step in chart.steps]
            low, high = np.array([e[1] for e in ends]), np.array([e[2] for e in ends])
            line = replace(line, low=low, high=high, thin=())
        lines.append(line)
    return replace(chart, lines=tuple(lines))
