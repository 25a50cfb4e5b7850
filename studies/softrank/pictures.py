"""Learning curves of a task as a small picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measured import Task

from groupwise.evaluation import smooth

COLOURS = {
    "softrank": "#bf4a17",
    "softrank_matched": "#e09a6f",
    "grpo": "#1f5fa8",
    "dr_grpo": "#6d9fd0",
    "maxrl": "#8a6a08",
    "reinforce": "#9a9a9a",
    "log_odds": "#2a7a57",
    "softrank_two_sided": "#6d47a6",
}


def curves_picture(task: Task, output: Path, *, title: str) -> None:
    """Smoothed mean curve of every arm over its seeds, with a band of one standard error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for arm in task.arms:
        curves = [r.curve[task.plan.metric] for r in task.results[arm].values()]
        heights = np.stack([smooth(np.asarray(curve, dtype=float)) for curve in curves])
        mean = heights.mean(0)
        error = heights.std(0, ddof=1) / np.sqrt(len(heights))
        steps = np.arange(1, mean.size + 1)
        colour = COLOURS.get(arm)
        axes.plot(steps, mean, label=arm, color=colour, linewidth=1.4)
        axes.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(task.plan.threshold, color="#999999", linewidth=0.7, linestyle=":")
    axes.set(xlabel="step", ylabel=task.plan.metric, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    figure.savefig(output, metadata={"Software": None})


def rates_picture(task: Task, output: Path, *, rates: Sequence[float], arms: Sequence[str]) -> None:
    """Mean area of every arm over the learning rate, and the paired difference at each rate.

    Args:
        arms: the difference is the first minus the second; both with 95 % t intervals over seeds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    curves, forest = figure.subplots(1, 2)
    places = np.arange(len(rates))
    for arm in arms:
        means = [task.mean(f"{arm}@{rate:g}", "area") for rate in rates]
        heights = 100 * np.array([[mean.value, mean.low, mean.high] for mean in means])
        curves.plot(places, heights[:, 0], marker="o", label=arm, color=COLOURS.get(arm))
        curves.fill_between(
            places, heights[:, 1], heights[:, 2], color=COLOURS.get(arm), alpha=0.15, linewidth=0
        )
    curves.set_xticks(places, [f"{rate:g}" for rate in rates])
    curves.set(xlabel="learning rate", ylabel=f"{task.plan.metric} over training, %")
    curves.legend(frameon=False, fontsize=8)
    pairs = [tuple(f"{arm}@{rate:g}" for arm in arms) for rate in rates]
    found = [task.contrast("area", *pair).result.difference for pair in pairs]
    for place, each in zip(places, found, strict=True):
        forest.plot([100 * each.low, 100 * each.high], [place, place], color="#444444")
        forest.plot(100 * each.value, place, marker="s", color="#444444")
    forest.axvline(0, color="#999999", linewidth=0.7, linestyle=":")
    forest.set_yticks(places, [f"{rate:g}" for rate in rates])
    forest.set(xlabel=f"{arms[0]} minus {arms[1]}, pp", ylabel="learning rate", ylim=(-0.5, 2.5))
    for axes in (curves, forest):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, metadata={"Software": None})
