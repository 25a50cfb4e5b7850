"""Learning curves of a task as a small picture."""

from __future__ import annotations

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
