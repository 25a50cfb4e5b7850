"""The pictures of the fourth part, which `figures.py` draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from conditions import REINFORCE
from corrections import GRPO, PAPER, at
from fourth_design import CELLS, GRID_ARMS, GRID_RATES, GRID_SEEDS, read_fourth
from pictures import ARMS, Palette, legend, sheet, with_bars
from rates import at_norms, common_norms, grid, read_norms, smoothed

from groupwise.evaluation import seed_mean

SHIFT = 0.05
"""Between the marks of arms at one rate, in steps of the grid."""
CURVE = 60
"""Points of a drawn curve."""
NORM_TICKS = (0.01, 0.02, 0.04, 0.08, 0.16)


def learning_rates(palette: Palette) -> Any:
    """Area over the learning rate with its smoothed curve, and the paired differences."""
    task = read_fourth().get("rates")
    if task is None:
        return None
    figure, (left, right) = sheet(palette, size=(8.4, 3.6), columns=2)
    places = np.arange(len(GRID_RATES), dtype=float)
    between = np.linspace(0, places[-1], CURVE)
    steps = np.log2(GRID_RATES)
    for number, arm in enumerate(GRID_ARMS):
        colour = getattr(palette, ARMS[arm][0])
        means = [task.mean(at(arm, rate), "area") for rate in GRID_RATES]
        shifted = list(places + SHIFT * (number - 1))
        with_bars(left, shifted, means, colour=colour, label=arm, line="none")
        curve = smoothed(np.array([each.value for each in means]), GRID_RATES,
                         2 ** np.interp(between, places, steps))  # fmt: skip
        left.plot(between, 100 * curve, color=colour, linewidth=1.3, alpha=0.8)
    for number, first in enumerate((PAPER, REINFORCE)):
        found = [
            task.contrast("area", at(first, rate), at(GRPO, rate)).result.difference
            for rate in GRID_RATES
        ]
        shifted = list(places + 2 * SHIFT * (number - 0.5))
        colour = getattr(palette, ARMS[first][0])
        with_bars(right, shifted, found, colour=colour, label=f"{first} − {GRPO}")
    right.axhline(0, color=palette.muted, linewidth=1)
    for axes in (left, right):
        axes.set_xticks(places, [f"{rate:g}" for rate in GRID_RATES])
        axes.set_xlabel("learning rate")
    left.set_ylabel("accuracy over training, %")
    right.set_ylabel("difference of the area, pp")
    legend(left, palette, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    legend(right, palette, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def equal_norm(palette: Palette) -> Any:
    """Area over the norm of the update, and the paired difference at equal norm."""
    task, norms = read_fourth().get("rates"), read_norms()
    if task is None or not norms:
        return None
    figure, (left, right) = sheet(palette, size=(8.4, 3.6), columns=2)
    areas = grid(task, GRID_ARMS, GRID_RATES, GRID_SEEDS)
    of = {arm: [norms[arm][rate] for rate in GRID_RATES] for arm in GRID_ARMS}
    for arm in GRID_ARMS:
        means = [seed_mean(list(column)) for column in areas[arm].T]
        with_bars(left, of[arm], means, colour=getattr(palette, ARMS[arm][0]), label=arm)
    for first in (PAPER, REINFORCE):
        places = common_norms(of[first], of[GRPO])
        rest = at_norms(areas[first], of[first], places) - at_norms(areas[GRPO], of[GRPO], places)
        found = [seed_mean(list(column)) for column in rest.T]
        colour = getattr(palette, ARMS[first][0])
        middle, low, high = (
            100 * np.array([getattr(each, end) for each in found])
            for end in ("value", "low", "high")
        )
        right.plot(places, middle, color=colour, linewidth=1.6, label=f"{first} − {GRPO}")
        right.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    right.axhline(0, color=palette.muted, linewidth=1)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(NORM_TICKS, [f"{tick:g}" for tick in NORM_TICKS])
        axes.minorticks_off()
        axes.set_xlabel("norm of the update, mean over the steps")
    left.set_ylabel("accuracy over training, %")
    right.set_ylabel("difference of the area, pp")
    legend(left, palette, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    legend(right, palette, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def mechanism(palette: Palette) -> Any:
    """The cells of the factorial, with and without a baseline."""
    task = read_fourth().get("mechanism")
    if task is None:
        return None
    figure, (axes,) = sheet(palette, size=(7.4, 3.6))
    words = list(dict.fromkeys((cell.weight, cell.over) for cell in CELLS))
    for baseline, colour in ((False, palette.warm), (True, palette.cold)):
        cells = {(c.weight, c.over): c for c in CELLS if c.baseline is baseline}
        means = [task.mean(cells[each].advantage, "area") for each in words]
        places = [place + SHIFT * (1 if baseline else -1) for place in range(len(words))]
        label = "the group's mean as baseline" if baseline else "no baseline"
        with_bars(axes, places, means, colour=colour, label=label, line="none")
    shown = {"1/sd": "1/√(p(1 − p))"}
    axes.set_xticks(
        range(len(words)),
        [f"{shown.get(w, w)}\n{f'p of the {over}' if over else ''}" for w, over in words],
    )
    axes.set(ylabel="accuracy over training, %", xlabel="weight of an answer")
    legend(axes, palette, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure
