"""Final figures as a table: what is in the cells, and how a terminal shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from groupwise.evaluation.intervals import Estimate, seed_mean

Evaluation = Mapping[str, Mapping[str, Estimate]]
"""Figures by split and name: `{"held_out": {"greedy": Estimate(…)}}`."""


@dataclass(frozen=True, kw_only=True)
class FigureTable:
    """Figures of several models on several splits.

    Attributes:
        models: column names, in order.
        rows: (split, figure), in order.
        cells: estimate by (model, split, figure); a missing key was not measured.
        seeds: how many runs stand behind each model's column.
    """

    models: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    cells: Mapping[tuple[str, str, str], Estimate]
    seeds: Mapping[str, int]

    def percent(self, figure: str) -> bool:
        """Whether a figure is a share, to be shown in percent."""
        values = [cell.value for key, cell in self.cells.items() if key[2] == figure]
        return is_share(figure, values)


def figure_table(evaluations: Mapping[str, Sequence[Evaluation]]) -> FigureTable:
    """Collect evaluations of several models, one per seed, into one table.

    Args:
        evaluations: by model name, in column order; every entry of the sequence is one seed.

    Returns:
        Cells with Student's t interval over seeds; with the evaluation's own interval where there
        is one seed, or where all seeds agree to the last digit.

    Example:
        >>> half = {"held_out": {"greedy": Estimate(value=.5, low=.4, high=.6)}}
        >>> more = {"held_out": {"greedy": Estimate(value=.7, low=.6, high=.8)}}
        >>> table = figure_table({"base": [half], "grpo": [half, more]})
        >>> print(table.cells["base", "held_out", "greedy"])
        0.5 [0.4, 0.6]
        >>> table.cells["grpo", "held_out", "greedy"].value
        0.6

    Source: Student 1908 for the interval over seeds.
    """
    rows = dict.fromkeys(
        (split, figure)
        for runs in evaluations.values()
        for run in runs
        for split, figures in run.items()
        for figure in figures
    )
    splits = {split: place for place, split in enumerate(dict.fromkeys(split for split, _ in rows))}
    cells = {}
    for model, runs in evaluations.items():
        for split, figure in rows:
            found = [run[split][figure] for run in runs if figure in run.get(split, {})]
            if found:
                pooled = seed_mean([cell.value for cell in found])
                cells[model, split, figure] = pooled if pooled.known else found[0]
    return FigureTable(
        models=tuple(evaluations),
        rows=tuple(sorted(rows, key=lambda row: splits[row[0]])),
        cells=cells,
        seeds={model: len(runs) for model, runs in evaluations.items()},
    )


def is_share(figure: str, values: Sequence[float]) -> bool:
    """Whether a figure is a share: in [0, 1], and not a reward or a length that happens to be.

    Example:
        >>> is_share("greedy", [0.5, 1.0]), is_share("reward", [0.5]), is_share("greedy", [2.0])
        (True, False, False)

    Source: none; rewards have no unit, and a reward of .9 is not 90 % of anything.
    """
    return not figure.startswith(("reward", "length")) and all(0 <= v <= 1 for v in values)


def title_of(key: str) -> str:
    """A key as people write it: `pass_at_8` is pass@8, `held_out` is held-out.

    Example:
        >>> title_of("pass_at_8"), title_of("held_out"), title_of("larger_numbers")
        ('pass@8', 'held-out', 'larger numbers')

    Source: the names used in the literature.
    """
    return re.sub(r"_at_(\d+)$", r"@\1", key).replace("held_out", "held-out").replace("_", " ")


def shown(cell: Estimate | None, *, percent: bool) -> tuple[str, str]:
    """Value and interval of a cell as text; empty strings for what is not known.

    Example:
        >>> shown(Estimate(value=.862, low=.831, high=.889), percent=True)
        ('86.2', '[83.1, 88.9]')

    Source: none; shares are shown in percent with one digit, other figures with three.
    """
    if cell is None:
        return "–", ""
    value, low, high = (
        f"{100 * x:.1f}" if percent else f"{x:.3g}" for x in (cell.value, cell.low, cell.high)
    )
    return value, f"[{low}, {high}]" if cell.known else ""


def terminal_table(
    table: FigureTable, *, verdicts: Sequence[str] = (), title: str | None = None
) -> RenderableType:
    """The table with its verdicts, for `rich.console.Console.print`; 80 columns hold three models.

    Args:
        table: what `figure_table` made.
        verdicts: sentences below the table.
        title: heading above it.

    Returns:
        A renderable in which names and sentences are plain text, never markup.
    """
    accents = ("dim", "bold cyan", "bold dark_orange", "bold magenta", "bold green")
    grid = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2),
    )
    grid.add_column("")
    for place, model in enumerate(table.models):
        seeds = table.seeds[model]
        name = model if seeds == 1 else f"{model} ({seeds} seeds)"
        grid.add_column(
            Text(name, style=accents[place % len(accents)]), justify="right", no_wrap=True
        )
    current = None
    for split, figure in table.rows:
        if split != current:
            grid.add_row(Text(title_of(split), style="bold"), *[""] * len(table.models))
            current = split
        percent = table.percent(figure)
        cells = [
            shown(table.cells.get((model, split, figure)), percent=percent)
            for model in table.models
        ]
        row = [Text.assemble(value, " ", (interval, "dim")) for value, interval in cells]
        grid.add_row(Text(f"  {title_of(figure)}{' %' if percent else ''}"), *row)
    return Group(grid, *[Padding(Text(verdict), (1, 0, 0, 0)) for verdict in verdicts])
