"""The study's figures, each for light and dark pages.

    python studies/softrank/figures.py            all of them
    python studies/softrank/figures.py forest     one of them

They are written beside the pages, as NAME.png and NAME-dark.png.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conditions import LONG, PARTS, REINFORCE, TAUS, done, joined, read_third
from corrections import GRPO, PAPER, at
from measured import Task, read_task
from second import FACTORIAL, MECHANISM, RATES, primary, read_second, spoken
from third import primary as third_primary

from groupwise.evaluation import Estimate, smooth

OUTPUT = Path(__file__).parents[2] / "docs" / "studies"
EDGE = 2
"""Steps at both ends of a curve where the smoothing window is cut off."""
FIRST_TASKS = ("word-problems", "lists", "long-answers")


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


LIGHT = Palette(
    paper="#ffffff", ink="#1f2328", muted="#656d76", line="#d0d7de", warm="#c2410c",
    cold="#1d5fb4", green="#1a7f5a", violet="#7c3fb0",
)  # fmt: skip
DARK = Palette(
    paper="#0d1117", ink="#e6edf3", muted="#9198a1", line="#3d444d", warm="#ff9a62",
    cold="#6cb2ff", green="#5bd1a5", violet="#c99cff",
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
    axes: Any, places: Sequence[float], found: Sequence[Estimate], *, colour: str, label: str
) -> None:
    """Means in percent, joined by a line, with their intervals."""
    middle, low, high = (
        100 * np.array([getattr(e, end) for e in found]) for end in ("value", "low", "high")
    )
    axes.plot(places, middle, marker="o", markersize=4, color=colour, label=label, linewidth=1.6)
    axes.vlines(places, low, high, color=colour, linewidth=1.2, alpha=0.7)


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


def mean_curve(task: Task, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean smoothed accuracy over seeds in percent, and its standard error."""
    curves = [
        smooth(np.asarray(run.curve["accuracy"], dtype=float)) for run in task.results[arm].values()
    ]
    stacked = 100 * np.stack(curves)
    return stacked.mean(0), stacked.std(0, ddof=1) / np.sqrt(len(stacked))


def draw_curve(axes: Any, task: Task, arm: str, *, colour: str, label: str) -> None:
    """A learning curve with a band of one standard error."""
    mean, error = (each[EDGE:-EDGE] for each in mean_curve(task, arm))
    steps = np.arange(1, mean.size + 1) + EDGE
    axes.plot(steps, mean, color=colour, label=label, linewidth=1.6)
    axes.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)


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
    colours = dict(
        zip(FACTORIAL, (palette.warm, palette.green, palette.violet, palette.cold), strict=True)
    )
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
        draw_curve(right, task, arm, colour=colours[arm], label=arm)
    right.set(xlabel="step", ylabel="training accuracy, %", xlim=(1, None))
    legend(right, palette, loc="lower right")
    return figure


def heat(palette: Palette) -> Any:
    """Tasks × algorithms of the first edition: area minus that of GRPO."""
    from matplotlib.colors import LinearSegmentedColormap

    tasks = {name: task for name in FIRST_TASKS if (task := read_task(name, f"{name}-candidates"))}
    arms = [arm for arm in next(iter(tasks.values())).arms if arm != GRPO]
    found = [[task.contrast("area", arm, GRPO) for arm in arms] for task in tasks.values()]
    values = 100 * np.array([[each.result.difference.value for each in row] for row in found])
    figure, (axes,) = sheet(palette, size=(8.0, 2.5))
    axes.grid(visible=False)
    shades = LinearSegmentedColormap.from_list(
        "difference", [palette.cold, palette.paper, palette.warm]
    )
    reach = float(np.abs(values).max())
    axes.imshow(values, cmap=shades, vmin=-1.4 * reach, vmax=1.4 * reach, aspect="auto")
    for y, (task, row) in enumerate(zip(tasks.values(), found, strict=True)):
        for x, each in enumerate(row):
            sure = each.result.difference.excludes(0.0)
            same = task.same_rate(arms[x], GRPO)
            text = f"{round(values[y, x], 1) + 0.0:+.1f}".replace("-", "−") + ("" if same else " †")
            axes.text(x, y, text, ha="center", va="center", color=palette.ink, fontsize=9,
                      fontweight="bold" if sure else "normal")  # fmt: skip
    axes.set_xticks(range(len(arms)), [arm.replace("softrank_", "softrank_\n") for arm in arms])
    axes.set_yticks(range(len(tasks)), [spoken(name) for name in tasks])
    axes.tick_params(length=0, labelcolor=palette.ink)
    axes.spines[:].set_visible(False)
    return figure


FIGURES: dict[str, Callable[[Palette], Any]] = {
    "dose": dose, "forest": forest, "curves": curves, "factorial": factorial, "heat": heat,
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
