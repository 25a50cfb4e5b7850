"""The look of the study's figures, on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from measured import Task

from groupwise.evaluation import Estimate, smooth

EDGE = 2
"""Steps at both ends of a curve where the smoothing window is cut off."""

ARMS = {
    "softrank": ("warm", "-"),
    "softrank_matched": ("warm", "--"),
    "grpo": ("cold", "-"),
    "dr_grpo": ("cold", "--"),
    "maxrl": ("amber", "-"),
    "reinforce": ("green", "-"),
    "log_odds": ("violet", "-"),
    "softrank_two_sided": ("violet", "--"),
}
"""Colour and line of every arm."""


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Colours of a figure."""

    paper: str
    ink: str
    muted: str
    line: str
    warm: str
    cold: str
    green: str
    violet: str
    amber: str


LIGHT = Palette(
    paper="#ffffff", ink="#1f2328", muted="#656d76", line="#d0d7de", warm="#c2410c",
    cold="#1d5fb4", green="#1a7f5a", violet="#7c3fb0", amber="#8a6a08",
)  # fmt: skip
DARK = Palette(
    paper="#0d1117", ink="#e6edf3", muted="#9198a1", line="#3d444d", warm="#ff9a62",
    cold="#6cb2ff", green="#5bd1a5", violet="#c99cff", amber="#e3c04b",
)  # fmt: skip


def sheet(palette: Palette, *, size: tuple[float, float], columns: int = 1, **more: Any) -> Any:
    """A figure with axes in the colours of a palette; returns both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=144, layout="constrained", facecolor=palette.paper)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, columns, squeeze=False, **more)[0]
    for axes in panels:
        axes.set_facecolor(palette.paper)
        axes.tick_params(colors=palette.muted, labelsize=8, length=3)
        axes.grid(axis="y", color=palette.line, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(palette.line)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set(color=palette.ink, fontsize=9)
        axes.title.set(color=palette.ink, fontsize=10)
    return figure, panels


def legend(axes: Any, palette: Palette, **more: Any) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, fontsize=8, labelcolor=palette.ink, **more)


def with_bars(
    axes: Any, places: Sequence[float], found: Sequence[Estimate], *, colour: str, label: str,
    line: str = "-",
) -> None:  # fmt: skip
    """Means in percent, joined by a line where there is one, with their intervals."""
    middle, low, high = (
        100 * np.array([getattr(e, end) for e in found]) for end in ("value", "low", "high")
    )
    axes.plot(places, middle, marker="o", markersize=4, color=colour, label=label, linewidth=1.6,
              linestyle=line)  # fmt: skip
    axes.vlines(places, low, high, color=colour, linewidth=1.2, alpha=0.7)


def mean_curve(task: Task, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean smoothed metric over seeds in percent, and its standard error."""
    curves = [
        smooth(np.asarray(run.curve[task.plan.metric], dtype=float))
        for run in task.results[arm].values()
    ]
    stacked = 100 * np.stack(curves)
    return stacked.mean(0), stacked.std(0, ddof=1) / np.sqrt(len(stacked))


def draw_curve(
    axes: Any, task: Task, arm: str, *, colour: str, label: str, line: str = "-"
) -> None:
    """A learning curve with a band of one standard error."""
    mean, error = (each[EDGE:-EDGE] for each in mean_curve(task, arm))
    steps = np.arange(1, mean.size + 1) + EDGE
    axes.plot(steps, mean, color=colour, label=label, linewidth=1.6, linestyle=line)
    axes.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
