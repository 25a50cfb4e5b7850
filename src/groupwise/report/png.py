"""Learning curves, the table of results and curves of evaluations as pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.errors import RunError, UsageError, suggest
from groupwise.evaluation import Estimate, FigureTable, title_of
from groupwise.evaluation.tables import format_cell
from groupwise.report.comparison import results_table
from groupwise.report.curves import (
    Chart,
    evaluation_charts,
    labels_of,
    metric_charts,
    seeds_of,
)
from groupwise.report.data import RunData
from groupwise.report.metrics import METRICS, figure_meaning, metric
from groupwise.report.text import visible
from groupwise.rundir.files import replace_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCENTS = ("#1f5fa8", "#bf4a17", "#2a7a57", "#6d47a6", "#8a6a08", "#a93768")
INK, SOFT, RULE = "#1c1e22", "#666b73", "#dedbd4"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9,
    "svg.hashsalt": "groupwise",
    "svg.fonttype": "none",
    "text.parse_math": False,
}


PAPER = "paper"
"""Name of the figure that repeats those of the SoftRank-GRPO paper."""
PAPER_ROW = ("SoftRank-GRPO paper: GSM8K, Qwen2.5-3B", "accuracy")
PAPER_ACCURACY = {"grpo": 0.724, "softrank": 0.756}
"""Table 1 of the paper by algorithm; it states no interval."""


def write_png(
    runs: Sequence[RunData], output: str | Path, *, title: str = "", figure: str = ""
) -> Path:
    """Draw learning curves and the table of results.

    Args:
        runs: at least one.
        output: the file to write; its suffix (png, svg, pdf) sets the format.
        title: heading; none where empty.
        figure: the metric to draw, such as "reward", or a held-out figure, such as
            "held_out.greedy"; "paper" draws figure 1 and table 1 of the SoftRank-GRPO paper (mean
            reward per step, and the greedy accuracy beside the paper's). Where it is empty,
            accuracy, or else reward.

    Returns:
        The file written.

    Raises:
        UsageError: no runs, no such metric, or a suffix that is not a picture format.
        RunError: the file cannot be written.

    Source: for "paper", the figure of mean reward against step and the table of accuracies of
        SoftRank-GRPO.
    """
    if not runs:
        raise UsageError("runs: must contain at least one run.")
    chosen = _chosen(runs, figure)
    path = picture_path(output, where="output")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    table = _paper_table(runs) if figure == PAPER else results_table(runs)
    rows = len(table.rows) + len({split for split, _ in table.rows}) + 1 if table.rows else 0
    with rc_context(STYLE):
        heights = [3.0, 0.26 * rows + 0.2] if rows else [3.0]
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        picture = Figure(figsize=(6.8, sum(heights) + 0.6), layout=layout)
        FigureCanvasAgg(picture)
        axes = picture.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        if chosen is not None:
            _draw(axes[0], chosen, labels_of(runs), seeds_of(runs))
        if rows:
            _tabulate(axes[1], table, labels_of(runs), rows)
        if title:
            picture.suptitle(visible(title), x=0.01, ha="left", weight="bold", color=INK, size=11)
        return write_figure(picture, path)


def check_figure(figure: str) -> None:
    """Refuse a figure that no run can have, before there are runs.

    Raises:
        UsageError: neither a metric nor a figure of evaluations nor "paper".
    """
    _, dot, of_split = figure.rpartition(".")
    if figure != PAPER and metric(figure) is None and not (dot and figure_meaning(of_split)):
        raise UsageError(
            f"figure = {figure!r}: must be a metric, a held-out figure such as held_out.greedy, or "
            f"{PAPER}; {suggest(figure, [PAPER, *METRICS])}"
        )


def _chosen(runs: Sequence[RunData], figure: str) -> Chart | None:
    """The chart to draw; None where the runs have no metric.

    Raises:
        UsageError: they lack the one asked for.
    """
    charts = {chart.key: chart for chart in (*metric_charts(runs), *evaluation_charts(runs))}
    if not figure:
        return next((charts[key] for key in ("accuracy", "reward", *charts) if key in charts), None)
    key = "reward" if figure == PAPER else figure
    if key not in charts:
        known = suggest(key, [PAPER, *charts])
        raise UsageError(f"figure = {figure!r}: must be a metric of the runs; {known}")
    return charts[key]


def _paper_table(runs: Sequence[RunData]) -> FigureTable:
    """Greedy accuracy of every arm, above the paper's for the algorithms that it compares."""
    own = results_table(runs)
    models = tuple(model for model in own.models if model != "base")
    cells = {key: cell for key, cell in own.cells.items() if key[0] in models}
    rows = [row for row in own.rows if row[1] == "greedy"]
    for run in runs:
        given = PAPER_ACCURACY.get(run.algorithm.partition("@")[0])
        if given is not None:
            cells[run.label, *PAPER_ROW] = Estimate(value=given, low=math.nan, high=math.nan)
    return FigureTable(models=models, rows=(*rows, PAPER_ROW), cells=cells, seeds=own.seeds)


def write_curve(
    lines: Mapping[str, Sequence[Estimate | None]],
    places: Sequence[str | int],
    output: str | Path,
    *,
    axis: str,
    title: str,
) -> Path:
    """Draw shares with their intervals along an axis, one line each.

    Args:
        lines: by name, an estimate for each place; None is a gap.
        places: numbers, or names, which stand at equal distances.
        output: the file to write; its suffix (png, svg, pdf) sets the format.
        axis: label of the places.
        title: heading.

    Returns:
        The file written.

    Raises:
        UsageError: a suffix that is not a picture format.
        RunError: the file cannot be written.
    """
    path = picture_path(output, where="output")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    named = any(isinstance(place, str) for place in places)
    across = np.arange(len(places)) if named else np.array(places, dtype=float)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.8, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for number, (label, cells) in enumerate(lines.items()):
            values, low, high = (
                100 * np.array([np.nan if cell is None else getattr(cell, end) for cell in cells])
                for end in ("value", "low", "high")
            )
            colour = ACCENTS[number % len(ACCENTS)]
            axes.vlines(across, low, high, color=colour, alpha=0.5, lw=1.2)
            axes.plot(across, values, "o-", color=colour, lw=1.6, ms=4, label=visible(label))
        if named:
            axes.set_xticks(
                across, [visible(str(place)) for place in places], rotation=20, ha="right"
            )
        axes.set_ylim(0, 100)
        axes.set_xlabel(visible(axis), color=SOFT)
        axes.set_title(visible(title), loc="left", color=INK, size=9.5)
        axes.legend(frameon=False, fontsize=8)
        _plain(axes)
        return write_figure(figure, path)


def picture_path(output: str | Path, *, where: str) -> Path:
    """Check the suffix of a picture file.

    Args:
        output: path of the file.
        where: name of the option, for the message.

    Raises:
        UsageError: the suffix is not a picture format.
    """
    path = Path(output)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{where} = {str(output)!r}: must end in .png, .svg or .pdf.")
    return path


def write_figure(figure: Figure, path: Path) -> Path:
    """Write a figure without a date, so that equal figures give equal bytes.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
        undated = {} if dated is None else {dated: None}
        image = io.BytesIO()
        kind = path.suffix.lower().removeprefix(".")
        figure.savefig(image, format=kind, dpi=200, facecolor="white", metadata=undated)
        replace_bytes(path, image.getvalue())
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None
    return path


def _draw(axes: Axes, chart: Chart, labels: tuple[str, ...], seeds: int) -> None:
    """The learning curve: bold means, thin seeds, bands, labels at the ends."""
    scale = 100 if chart.share else 1
    ends = []
    for line in chart.lines:
        colour = ACCENTS[labels.index(line.label) % len(ACCENTS)]
        for values in line.thin:
            axes.plot(chart.steps, scale * values, color=colour, alpha=0.3, lw=0.7)
        axes.fill_between(
            chart.steps, scale * line.low, scale * line.high, color=colour, alpha=0.13, lw=0
        )
        axes.plot(chart.steps, scale * line.mean, color=colour, lw=1.9, solid_capstyle="round")
        known = scale * line.mean[np.isfinite(line.mean)]
        ends.append((float(known[-1]), line.label, colour))
    axes.set_ylim(*_limits(chart))
    axes.set_xlim(chart.steps[0], chart.steps[-1])
    above = np.inf
    bottom, top = axes.get_ylim()
    for value, label, colour in sorted(ends, reverse=True):
        above = min(value, above - 0.075 * (top - bottom))
        place = (1.015, (above - bottom) / (top - bottom))
        axes.annotate(
            visible(label),
            place,
            xycoords="axes fraction",
            color=colour,
            weight="bold",
            va="center",
        )
    _plain(axes)
    how = f"mean of {seeds} seeds, 95 % interval" if seeds > 1 else "one seed, moving average"
    unit = " (%)" if chart.share else ""
    axes.set_title(f"{chart.title}{unit}, {how}", loc="left", color=INK, size=9.5)
    axes.set_xlabel(visible(chart.axis), color=SOFT)


def _limits(chart: Chart) -> tuple[float, float]:
    """Ends of the vertical axis, from the curves: a wide band may leave the picture, a curve does
    not."""
    if chart.share:
        return 0.0, 100.0
    values = np.concatenate([curve for line in chart.lines for curve in (line.mean, *line.thin)])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.6 * high else low - pad), high + pad


def _plain(axes: Axes) -> None:
    """Two axes in grey, and a rule for each value."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, length=3)
    axes.grid(axis="y", color=RULE, lw=0.6)
    axes.set_axisbelow(True)


def _tabulate(axes: Axes, table: FigureTable, labels: tuple[str, ...], rows: int) -> None:
    """The table of results as text."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(rows, 0)
    place = np.linspace(1.0, 0.30, len(table.models) + 1)[:-1][::-1]
    for x, model in zip(place, table.models, strict=True):
        colour = ACCENTS[labels.index(model) % len(ACCENTS)] if model in labels else SOFT
        axes.text(x, 0.5, visible(model), ha="right", va="center", weight="bold", color=colour)
    axes.axhline(1, color=SOFT, lw=0.8)
    y, current = 1.0, None
    for split, figure in table.rows:
        if split != current:
            axes.text(0, y + 0.55, title_of(visible(split)), va="center", weight="bold", color=INK)
            y, current = y + 1, split
        percent = table.percent(figure)
        name = f"{title_of(visible(figure))}{' %' if percent else ''}"
        axes.text(0.015, y + 0.5, name, va="center", color=INK)
        for x, model in zip(place, table.models, strict=True):
            value, interval = format_cell(table.cells.get((model, split, figure)), percent=percent)
            axes.text(x - 0.115, y + 0.5, value, ha="right", va="center", color=INK)
            axes.text(x, y + 0.5, interval, ha="right", va="center", color=SOFT, size=7)
        y += 1
        axes.axhline(y, color=RULE, lw=0.5)
