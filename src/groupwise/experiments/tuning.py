"""Learning-rate tuning: the best of a grid, extended where the best is at an edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.experiments.results import Result
from groupwise.report.comparison import curve_summary


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate of an arm.

    Attributes:
        learning_rate: the one with the largest mean area under the curve.
        areas: by rate, ascending; None where a run failed.
        at_edge: whether the best rate is the lowest or highest of the grid.
    """

    learning_rate: float
    areas: Mapping[float, float | None]
    at_edge: bool

    def extended(self) -> float:
        """The next rate beyond the edge, by the ratio of the last two."""
        rates = list(self.areas)
        if self.learning_rate == rates[0]:
            return _rounded(rates[0] ** 2 / rates[1])
        return _rounded(rates[-1] ** 2 / rates[-2])


def choose(results: Sequence[Result], *, metric: str) -> Choice | None:
    """The learning rate whose runs have the largest mean area under the learning curve.

    Args:
        results: tuning runs of one arm, the same seeds at every rate.
        metric: of the curve.

    Returns:
        The choice (of equal rates, the lower one); None where every rate failed.

    Example:
        >>> def run(rate, *accuracy):
        ...     curve = {"step": [1, 2, 3], "accuracy": accuracy}
        ...     return Result(experiment="", arm="a", algorithm="a", seed=0, learning_rate=rate,
        ...                   tuning=True, curve=curve)
        >>> found = choose([run(1e-4, 0, .2, .4), run(2e-4, 0, .4, .6)], metric="accuracy")
        >>> found.learning_rate, found.at_edge, found.extended()
        (0.0002, True, 0.0004)

    Source: methods sections of comparative studies; the mean area is the least noisy figure of a
        curve.
    """
    rates = sorted({result.learning_rate for result in results})
    areas = {rate: _area([r for r in results if r.learning_rate == rate], metric) for rate in rates}
    known = {rate: area for rate, area in areas.items() if area is not None}
    if not known:
        return None
    best = max(known, key=lambda rate: (known[rate], -rate))
    return Choice(learning_rate=best, areas=areas, at_edge=best in (rates[0], rates[-1]))


def at_rate(label: str, rate: float) -> str:
    """Name of an arm's runs at a learning rate that is not its own.

    Example:
        >>> at_rate("grpo", 1e-4)
        'grpo@0.0001'
    """
    return f"{label}@{rate:g}"


def equal_rate_runs(rates: Mapping[str, float], *, against: str) -> list[tuple[str, float]]:
    """The arms and rates that it takes to compare every arm with the reference at equal rates.

    Args:
        rates: by arm.
        against: the reference arm.

    Returns:
        Arms whose rate differs, at the reference's rate; the reference at theirs.

    Example:
        >>> equal_rate_runs({"a": 2e-4, "b": 1e-4, "c": 1e-4}, against="c")
        [('a', 0.0001), ('c', 0.0002)]
    """
    if against not in rates:
        return []
    own = rates[against]
    differ = {label: rate for label, rate in rates.items() if rate != own}
    return [
        *((label, own) for label in differ),
        *((against, rate) for rate in sorted({*differ.values()})),
    ]


def _area(results: Sequence[Result], metric: str) -> float | None:
    """Mean area under the learning curves; None where a run failed."""
    curves = [
        curve_summary(result.run_data(), metric=metric, threshold=0.0)
        for result in results
        if result.status == "finished"
    ]
    areas = [curve.area for curve in curves if curve is not None]
    return sum(areas) / len(areas) if len(areas) == len(results) else None


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")
