"""The study's figures, each for light and dark pages.

    python studies/softrank/figures.py            all of them
    python studies/softrank/figures.py forest     one of them

They are written beside the pages, as NAME.png and NAME-dark.png.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sealed
from conditions import LONG, PARTS, REINFORCE, TAUS, done, joined, read_third
from corrections import GRPO, PAPER, at
from fourth_pictures import equal_norm, learning_rates, mechanism
from measured import Task, read_task
from pictures import ARMS, DARK, LIGHT, Palette, draw_curve, legend, sheet, with_bars
from second import FACTORIAL, MECHANISM, RATES, SETTINGS, primary, read_second, spoken
from third import primary as third_primary

from groupwise.evaluation import Estimate, SeedDifference

OUTPUT = Path(__file__).parents[2] / "docs" / "studies"
FIRST_TASKS = ("word-problems", "lists", "long-answers")
CURVES = (*FIRST_TASKS, "sharpening")


def dose(palette: Palette) -> Any:
    """Area minus that of GRPO, over τ with REINFORCE beside it, and over K."""
    tasks = read_third()
    names = [name for name in ("temperature", "groups") if name in done(tasks)]
    if not names:
        return None
    figure, panels = sheet(palette, size=(4.6 * len(names), 3.4), columns=len(names), sharey=True)
    for name, axes in zip(names, panels, strict=True):
        task, rows = joined(tasks, name), PARTS[name].rows
        rows = rows[:-1] if name == "temperature" else sorted(rows, key=lambda row: group(row[0]))
        found = [task.contrast("area", *pair).result.difference for _, *pair in rows]
        label = f"{PAPER} − {GRPO}"
        with_bars(axes, range(len(rows)), found, colour=palette.warm, label=label)
        if name == "temperature":
            last = task.contrast("area", REINFORCE, GRPO).result.difference
            with_bars(
                axes, [len(rows)], [last], colour=palette.green, label=f"{REINFORCE} − {GRPO}"
            )
            words = [f"{tau:g}" for tau in TAUS] + ["∞"]
        else:
            words = [str(group(row[0])) for row in rows]
        axes.set_xticks(range(len(words)), words)
        axes.axhline(0, color=palette.muted, linewidth=1)
        axes.set_xlabel("temperature τ" if name == "temperature" else "completions per prompt, K")
        legend(axes, palette, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    panels[0].set_ylabel("difference of the area, pp")
    return figure


def group(words: str) -> int:
    """The size of the groups that a condition names."""
    return int(words.removeprefix("K = "))


Row = tuple[str, Estimate, bool]


def forest_rows() -> dict[str, list[Row]]:
    """By group, the contrasts in words, with their interval and whether they are primary."""
    groups: dict[str, list[Row]] = {}
    for name, task in read_second().items():
        rows: list[Row] = [("mean over the rates", primary(task).result.difference, True)]
        for rate in RATES:
            found = task.contrast("area", at(PAPER, rate), at(GRPO, rate))
            rows.append((f"{rate:g}", found.result.difference, False))
        groups[f"Second edition: {spoken(name)}, {PAPER} − {GRPO}"] = rows
    tasks = read_third()
    planned = third_primary(tasks)
    for name in done(tasks):
        task = joined(tasks, name)
        rows = [
            (words, task.contrast("area", first, second).result.difference, False)
            for words, first, second in PARTS[name].rows
        ]
        rows += [(one.contrast.short, one.result.difference, True) for one in planned[name]]
        first = PAPER if name != "temperature" else "arm"
        groups[f"{PARTS[name].title}, {first} − {GRPO}"] = rows
    return groups


def forest(palette: Palette) -> Any:
    """Every contrast of the area, with its interval."""
    groups = forest_rows()
    lines = sum(len(rows) + 1.6 for rows in groups.values())
    figure, (axes,) = sheet(palette, size=(8.0, 0.6 + 0.2 * lines))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=palette.line, linewidth=0.6)
    axes.axvline(0, color=palette.muted, linewidth=1)
    place, ticks = 0.0, []
    for title, rows in groups.items():
        axes.text(
            -0.01, place, title, transform=axes.get_yaxis_transform(), fontsize=8.5, va="center",
            ha="right", color=palette.ink, fontweight="bold",
        )  # fmt: skip
        place += 1
        for words, each, is_primary in rows:
            colour = palette.warm if is_primary else palette.muted
            marker = "D" if is_primary else "o"
            axes.plot([100 * each.low, 100 * each.high], [place, place], color=colour, lw=1.5)
            axes.plot(100 * each.value, place, marker=marker, color=colour, markersize=5)
            ticks.append((place, words, palette.ink if is_primary else palette.muted))
            place += 1
        place += 0.6
    axes.set_yticks([each[0] for each in ticks], [each[1] for each in ticks])
    for label, (_, _, colour) in zip(axes.get_yticklabels(), ticks, strict=True):
        label.set(color=colour, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(place - 0.6, -0.8), xlabel="difference of the area, percentage points")
    axes.spines["left"].set_visible(False)
    return figure


def draw_arm(axes: Any, task: Task, arm: str, palette: Palette) -> None:
    """The curve of an arm in its own colour."""
    colour, line = ARMS[arm]
    draw_curve(axes, task, arm, colour=getattr(palette, colour), label=arm, line=line)


def task_curves(palette: Palette, *, name: str) -> Any:
    """Learning curves of all arms of a task of the first edition."""
    task = read_task(name, f"{name}-candidates")
    if task is None:
        return None
    figure, (axes,) = sheet(palette, size=(7.4, 3.8))
    for arm in task.arms:
        draw_arm(axes, task, arm, palette)
    steps = len(next(iter(task.runs)).curve["step"])
    axes.axhline(100 * task.plan.threshold, color=palette.muted, linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel=f"training {task.plan.metric}, %", xlim=(1, steps))
    legend(axes, palette, loc="lower right", ncols=2)
    return figure


def rates(palette: Palette, *, name: str) -> Any:
    """Area over the learning rate of both arms, and their paired difference at each rate."""
    task = read_second().get(name)
    if task is None:
        return None
    figure, (left, right) = sheet(palette, size=(8.0, 3.4), columns=2)
    words = [f"{rate:g}" for rate in RATES]
    for shift, (arm, colour) in enumerate(((PAPER, palette.warm), (GRPO, palette.cold))):
        means = [task.mean(at(arm, rate), "area") for rate in RATES]
        places = [place + 0.06 * (shift - 0.5) for place in range(len(RATES))]
        with_bars(left, places, means, colour=colour, label=arm)
    found = [task.contrast("area", at(PAPER, r), at(GRPO, r)).result.difference for r in RATES]
    with_bars(right, range(len(RATES)), found, colour=palette.ink, label=f"{PAPER} − {GRPO}")
    right.axhline(0, color=palette.muted, linewidth=1)
    for axes in (left, right):
        axes.set_xticks(range(len(RATES)), words)
        axes.set_xlabel("learning rate")
    left.set_ylabel(f"{task.plan.metric} over training, %")
    right.set_ylabel("difference of the area, pp")
    legend(left, palette, loc="lower right")
    legend(right, palette, loc="upper left")
    return figure


def curves(palette: Palette) -> Any:
    """Learning curves of the longer runs."""
    tasks = read_third()
    if "long" not in done(tasks):
        return None
    figure, (axes,) = sheet(palette, size=(6.4, 3.4))
    for arm, colour in ((PAPER, palette.warm), (GRPO, palette.cold)):
        draw_curve(axes, tasks["long"], f"{arm}-long", colour=colour, label=arm)
    axes.set(xlabel="step", ylabel="training accuracy, %", xlim=(1, LONG))
    legend(axes, palette, loc="lower right")
    return figure


def factorial(palette: Palette) -> Any:
    """The four arms of the factorial: their areas, and their curves."""
    task = read_task(MECHANISM)
    if task is None:
        return None
    figure, (left, right) = sheet(palette, size=(8.0, 3.4), columns=2, width_ratios=(2, 3))
    for baseline, colour in ((False, palette.warm), (True, palette.cold)):
        arms = sorted((a for a, (b, _) in FACTORIAL.items() if b is baseline), key=FACTORIAL.get)
        means = [task.mean(arm, "area") for arm in arms]
        shift = 0.03 if baseline else -0.03
        words = "group mean as baseline" if baseline else "no baseline"
        with_bars(left, [0 + shift, 1 + shift], means, colour=colour, label=words)
    left.set_xticks((0, 1), ("uniform", "by pass rate"))
    left.set(
        xlim=(-0.4, 1.4), xlabel="weights of right answers", ylabel="accuracy over training, %"
    )
    left.set(ylim=(67.5, None))
    legend(left, palette, loc="lower left")
    for arm in FACTORIAL:
        draw_arm(right, task, arm, palette)
    right.set(xlabel="step", ylabel="training accuracy, %", xlim=(1, None))
    legend(right, palette, loc="lower right")
    return figure


def heat(palette: Palette) -> Any:
    """Tasks × algorithms of the first edition: area minus that of GRPO."""
    tasks = {name: task for name in FIRST_TASKS if (task := read_task(name, f"{name}-candidates"))}
    arms = [arm for arm in next(iter(tasks.values())).arms if arm != GRPO]
    cells = [
        [
            (task.contrast("area", arm, GRPO).result, "" if task.same_rate(arm, GRPO) else " †")
            for arm in arms
        ]
        for task in tasks.values()
    ]
    names = [arm.replace("softrank_", "softrank_\n") for arm in arms]
    return shaded(palette, [spoken(name) for name in tasks], names, cells, height=2.5)[0]


def heat_sealed(palette: Palette) -> Any:
    """Sealed tasks × contrasts of the search for an estimator, over the rates and at each."""
    import candidates  # noqa: F401 (registers the finalist)

    tasks = sealed.read_sealed()
    if not tasks:
        return None
    cells = [
        [(each, "") for pair in sealed.pairs() for each in sealed.by_rate(task, *pair)]
        for task in tasks.values()
    ]
    columns = ["mean", *(f"{rate:g}" for rate in RATES)]
    names = [sealed.named(name) for name in tasks]
    height = 1.2 + 0.4 * len(tasks)
    figure, axes = shaded(palette, names, columns * len(sealed.pairs()), cells, height=height)
    axes.tick_params(axis="x", labelsize=7.5)
    for place, (first, second) in enumerate(sealed.pairs()):
        start = len(columns) * place
        axes.text(
            start + (len(columns) - 1) / 2, -0.65, f"{first} − {second}", ha="center",
            va="bottom", color=palette.ink, fontsize=8.5,
        )  # fmt: skip
        if place:
            axes.axvline(start - 0.5, color=palette.paper, linewidth=5)
    return figure


def shaded(
    palette: Palette,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[tuple[SeedDifference, str]]],
    *,
    height: float,
) -> tuple[Any, Any]:
    """Figure and axes of a table of differences in percentage points, coloured by value and bold
    where the interval excludes 0; a mark follows each."""
    from matplotlib.colors import LinearSegmentedColormap

    values = 100 * np.array([[each.difference.value for each, _ in row] for row in cells])
    figure, (axes,) = sheet(palette, size=(8.0, height))
    axes.grid(visible=False)
    shades = LinearSegmentedColormap.from_list(
        "difference", [palette.cold, palette.paper, palette.warm]
    )
    reach = float(np.abs(values).max())
    axes.imshow(values, cmap=shades, vmin=-1.4 * reach, vmax=1.4 * reach, aspect="auto")
    for y, row in enumerate(cells):
        for x, (each, mark) in enumerate(row):
            text = f"{round(values[y, x], 1) + 0.0:+.1f}".replace("-", "−") + mark
            axes.text(x, y, text, ha="center", va="center", color=palette.ink, fontsize=9,
                      fontweight="bold" if each.difference.excludes(0.0) else "normal")  # fmt: skip
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labelcolor=palette.ink)
    axes.spines[:].set_visible(False)
    return figure, axes


FIGURES: dict[str, Callable[[Palette], Any]] = {
    **{f"softrank-{name}": partial(task_curves, name=name) for name in CURVES},
    **{f"second-{name}": partial(rates, name=name) for name in SETTINGS},
    "dose": dose, "forest": forest, "curves": curves, "factorial": factorial, "heat": heat,
    "learning-rates": learning_rates, "equal-norm": equal_norm, "mechanism": mechanism,
    "heat-sealed": heat_sealed,
}  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Draw the figures whose results are there."""
    for name in names or FIGURES:
        for palette, end in ((LIGHT, ""), (DARK, "-dark")):
            figure = FIGURES[name](palette)
            if figure is not None:
                place = OUTPUT / f"{name}{end}.png"
                figure.savefig(place, metadata={"Software": None}, facecolor=palette.paper)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
