"""The figures of `variance` as tables for 80 columns, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from groupwise.errors import UsageError
from groupwise.evaluation import Estimate
from groupwise.experiments.variance import BINS, Estimator, Variance
from groupwise.report.png import ACCENTS, INK, RULE, SOFT, picture_path, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDING = 1e-5
"""Relative rounding noise of a float32 gradient."""

Column = tuple[str, Callable[[Estimator], str]]

GRADIENT: tuple[Column, ...] = (
    ("‖mean‖²", lambda e: _size(e.whole.squared_norm)),
    ("tr Cov", lambda e: _size(e.whole.trace)),
    ("tr/‖·‖²", lambda e: _size(e.whole.noise)),
    ("SNR step", lambda e: _with_reach(e.whole.signal_to_noise)),
    ("cos step", lambda e: _with_reach(e.whole.step_cosine)),
)
WEIGHTS: tuple[Column, ...] = (
    ("A > 0 %", lambda e: _percent(e.whole.positive)),
    ("A < 0 %", lambda e: _percent(e.whole.negative)),
    ("A ≠ 0 %", lambda e: _percent(e.whole.nonzero)),
    ("samples", lambda e: _size(e.whole.effective_samples)),
    ("r = 1", lambda e: _size(e.constant)),
    ("r + 1", lambda e: _size(e.shift if e.shift > ROUNDING else 0.0)),
    ("2r", lambda e: _size(e.scale)),
)


def variance_table(found: Variance) -> RenderableType:
    """A summary of the measurement, then three tables with a row per estimator.

    Args:
        found: what `variance` returned.

    Returns:
        A renderable for `rich.console.Console.print`.
    """
    groups = found.estimators[0].whole.groups if found.estimators else 0
    how = "exact gradients" if found.exact else "gradients projected to fewer numbers"
    head = (
        f"{groups} groups of {found.group}, pass rate {100 * found.pass_rate:.0f} %; {how} of "
        f"{found.parameters:,} parameters. A step is {found.step} groups. Reference: gradient of "
        f"the expected reward over {found.reference:,} other completions, whose halves agree to "
        f"cos = {_size(found.agreement)}."
    )
    labels = [label for label, _, _ in BINS]
    counts = {
        label: signal.groups for e in found.estimators for label, signal in e.by_pass_rate.items()
    }
    rates: list[Column] = [
        (f"{label}\n{counts.get(label, 0)}", lambda e, label=label: _at(e, label))
        for label in labels
    ]
    parts: list[RenderableType] = [
        Text(head),
        Text("\nGradient of a group; ± is half a 95 % interval", style="bold"),
        _table(found.estimators, GRADIENT),
        Text("\nAdvantages; gradient if every reward were 1, one higher, doubled", style="bold"),
        _table(found.estimators, WEIGHTS),
        Text("\nSNR of a step of groups with this pass rate, and how many there are", style="bold"),
        _table(found.estimators, rates),
    ]
    parts += [Text(f"left out: {name}: {why}") for name, why in found.left_out.items()]
    return Group(*parts)


def write_variance_png(found: Variance, output: str | Path) -> Path:
    """Draw signal-to-noise and cosine of every estimator, and where each pulls hardest.

    Args:
        found: what `variance` returned.
        output: the file to write; its ending (png, svg, pdf) decides the format.

    Returns:
        The file written.

    Raises:
        UsageError: an ending that is not a picture format, or no gradient anywhere.
        RunError: the file cannot be written.
    """
    path = picture_path(output, where="--png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [e for e in found.estimators if math.isfinite(e.whole.step_cosine.value)]
    if not shown:
        raise UsageError("--png: no estimator has a gradient here, so there is nothing to plot.")
    figure = Figure(figsize=(9.5, 1.4 + 0.26 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.1))
    _dots(axes[0], [e.whole.signal_to_noise for e in shown], f"SNR of {found.step} groups")
    _dots(axes[1], [e.whole.step_cosine for e in shown], "cosine with the reference")
    axes[0].set_yticks(range(len(shown)), [e.name for e in shown])
    axes[0].set_ylim(len(shown) - 0.4, -0.6)
    _heat(axes[2], shown)
    return write_figure(figure, path)


def _heat(axes: Axes, estimators: Sequence[Estimator]) -> None:
    """Share of each pass rate in the pull along the reference."""
    labels = [label for label, _, _ in BINS if any(label in e.by_pass_rate for e in estimators)]
    pulls = np.array([[_pull(e, label) for label in labels] for e in estimators])
    axes.imshow(pulls, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(pulls):
        if math.isfinite(value):
            text = f"{round(100 * value)}".replace("-", "−")
            colour = "white" if abs(value) > 0.7 else INK
            axes.text(column, row, text, ha="center", va="center", size=7, color=colour)
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.set_title("% of the pull, by pass rate", loc="left", size=9)


def _dots(axes: Axes, estimates: Sequence[Estimate], title: str) -> None:
    places = range(len(estimates))
    axes.hlines(
        places, [e.low for e in estimates], [e.high for e in estimates], color=ACCENTS[0], lw=1.2
    )
    axes.plot([e.value for e in estimates], places, "o", color=ACCENTS[0], ms=4)
    axes.axvline(0, color=RULE, lw=0.8)
    axes.grid(axis="x", color=RULE, lw=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=SOFT, labelcolor=INK, length=0, labelsize=8)
    axes.set_title(title, loc="left", size=9)


def _table(estimators: Sequence[Estimator], columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in estimators:
        table.add_row(Text(each.name), *(Text(shown(each)) for _, shown in columns))
    return table


def _at(estimator: Estimator, label: str) -> str:
    signal = estimator.by_pass_rate.get(label)
    return "–" if signal is None else _size(signal.signal_to_noise.value)


def _pull(estimator: Estimator, label: str) -> float:
    signal = estimator.by_pass_rate.get(label)
    return math.nan if signal is None else signal.pull


def _size(value: float) -> str:
    """Three digits; 0 only where it is exactly 0."""
    return f"{value:.3g}".replace("-", "−").replace("e−0", "e−") if math.isfinite(value) else "–"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "–"


def _with_reach(estimate: Estimate) -> str:
    """A figure with half the width of its interval."""
    reach = (estimate.high - estimate.low) / 2
    if not (math.isfinite(estimate.value) and math.isfinite(reach)):
        return _size(estimate.value)
    return f"{estimate.value:.2f} ± {reach:.2f}".replace("-", "−")
