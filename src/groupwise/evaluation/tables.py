"""Final figures as a table, and its display in a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from groupwise.evaluation.intervals import Estimate, seed_mean

ACCENTS = ("dim", "bold cyan", "bold dark_orange", "bold magenta", "bold green")
COLUMN_GAP = 2
"""Blank columns between two models."""

FiguresBySplit = Mapping[str, Mapping[str, Estimate]]
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


def figure_table(evaluations: Mapping[str, Sequence[FiguresBySplit]]) -> FigureTable:
    """Collect evaluations of several models, one per seed, into one table.

    Args:
        evaluations: by model name, in column order; every entry of the sequence is one seed.

    Returns:
        Cells with Student's t interval over seeds, within 0 and 1 for shares; with the evaluation's
        own interval where there is one seed, or where all seeds agree to the last digit. Rewards
        that are the accuracy of the same answers in every cell have no row.

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
    measured = [
        (split, figures)
        for runs in evaluations.values()
        for run in runs
        for split, figures in run.items()
    ]
    repeated = all(_reward_is_accuracy(figures) for _, figures in measured)
    rows = dict.fromkeys(
        (split, figure)
        for split, figures in measured
        for figure in figures
        if not (repeated and figure == "reward")
    )
    splits = {split: place for place, split in enumerate(dict.fromkeys(split for split, _ in rows))}
    cells = {}
    for model, runs in evaluations.items():
        for split, figure in rows:
            found = [run[split][figure] for run in runs if figure in run.get(split, {})]
            if found:
                cells[model, split, figure] = _over_seeds(figure, found)
    return FigureTable(
        models=tuple(evaluations),
        rows=tuple(sorted(rows, key=lambda row: splits[row[0]])),
        cells=cells,
        seeds={model: len(runs) for model, runs in evaluations.items()},
    )


def _over_seeds(figure: str, cells: Sequence[Estimate]) -> Estimate:
    """The mean over seeds; the interval of a share ends where shares do."""
    values = [cell.value for cell in cells]
    pooled = seed_mean(values)
    if not pooled.known:
        return cells[0]
    return pooled.as_share() if is_share(figure, values) else pooled


def _reward_is_accuracy(figures: Mapping[str, Estimate]) -> bool:
    reward, accuracy = figures.get("reward"), figures.get("sampled")
    if reward is None or accuracy is None:
        return reward is None
    return isclose(reward.value, accuracy.value, abs_tol=1e-9)


NO_SHARES = (
    *("reward", "length", "calls", "kappa"),
    *("loss", "perplexity", "margin", "chosen_", "rejected_"),
    *("score_length", "better_length", "score_target", "squared_error"),
)
"""How the names of figures begin that may lie between 0 and 1 without being shares."""


def is_share(figure: str, values: Sequence[float]) -> bool:
    """Whether a figure is a share: in [0, 1], and not a reward or a loss that happens to be.

    Example:
        >>> is_share("greedy", [0.5, 1.0]), is_share("reward", [0.5]), is_share("greedy", [2.0])
        (True, False, False)

    Source: none; rewards have no unit, and a reward of .9 is not 90 % of anything.
    """
    return not figure.startswith(NO_SHARES) and all(0 <= v <= 1 for v in values)


def title_of(key: str) -> str:
    """A key as people write it: `pass_at_8` is pass@8, `held_out` is held-out.

    Example:
        >>> title_of("pass_at_8"), title_of("held_out"), title_of("larger_numbers")
        ('pass@8', 'held-out', 'larger numbers')

    Source: the names used in the literature.
    """
    return re.sub(r"_at_(\d+)$", r"@\1", key).replace("held_out", "held-out").replace("_", " ")


def format_cell(cell: Estimate | None, *, percent: bool) -> tuple[str, str]:
    """Value and interval of a cell as text; empty strings for what is not known.

    Example:
        >>> format_cell(Estimate(value=.862, low=.831, high=.889), percent=True)
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
    parts: list[RenderableType] = [Text(title, style="italic")] if title else []
    parts.append(_Sections(table=table))
    for verdict in verdicts:
        parts += [Text(), Text(verdict)]
    return Group(*parts)


@dataclass(frozen=True, kw_only=True)
class _Sections:
    """A grid per split with the same columns, so that headings of splits widen none of them."""

    table: FigureTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table
        names = [
            Text(
                model if table.seeds[model] == 1 else f"{model} ({table.seeds[model]} seeds)",
                style=ACCENTS[place % len(ACCENTS)],
            )
            for place, model in enumerate(table.models)
        ]
        labels, cells = _texts(table)
        first = max(map(cell_len, labels.values()), default=0)
        # Where the terminal is narrower than the columns, their cells fold.
        share = max((options.max_width - first) // max(len(names), 1) - COLUMN_GAP, 1)
        widths = [
            min(
                share,
                max(each.cell_len for each in (name, *(row[place] for row in cells.values()))),
            )
            for place, name in enumerate(names)
        ]
        yield _grid([["", *names]], first, widths)
        for split in dict.fromkeys(split for split, _ in table.rows):
            yield Text(title_of(split), style="bold")
            rows = [[labels[row], *cells[row]] for row in table.rows if row[0] == split]
            yield _grid(rows, first, widths)


def _grid(rows: Sequence[Sequence[str | Text]], first: int, widths: Sequence[int]) -> Table:
    grid = Table.grid(padding=(0, COLUMN_GAP, 0, 0))
    grid.add_column(width=first, no_wrap=True)
    for width in widths:
        grid.add_column(width=width, justify="right")
    for row in rows:
        grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return grid


def _texts(
    table: FigureTable,
) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], list[Text]]]:
    """Names and cells of the rows, as they are shown."""
    labels, cells = {}, {}
    for split, figure in table.rows:
        percent = table.percent(figure)
        labels[split, figure] = f"  {title_of(figure)}{' %' if percent else ''}"
        pairs = (
            format_cell(table.cells.get((model, split, figure)), percent=percent)
            for model in table.models
        )
        cells[split, figure] = [Text.assemble(v, " ", (interval, "dim")) for v, interval in pairs]
    return labels, cells
