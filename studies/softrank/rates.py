"""Arms over a grid of learning rates: at equal rate, at each arm's best, at equal update norm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from corrections import at
from measured import RESULTS, Task

from groupwise.evaluation import seed_mean

NORMS = RESULTS / "fourth-norms.json"
"""Norms of the updates by arm and rate; `moved.py` measures them."""
DEGREE = 3
"""Of the polynomial in the logarithm of the rate that smooths the areas of a half."""
POINTS = 11
"""Norms at which arms are compared, equally spaced in the logarithm."""

Grid = Mapping[str, np.ndarray]
"""By arm, areas of [seed, rate]."""
Sides = tuple[list[float], list[float]]


def grid(task: Task, arms: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> Grid:
    """The areas of every arm at every rate, for the same seeds."""
    found = {}
    for arm in arms:
        by_rate = [task.values(at(arm, rate), "area") for rate in rates]
        found[arm] = np.array([[values[seed] for values in by_rate] for seed in seeds])
    return found


def smoothed(means: np.ndarray, rates: Sequence[float], places: Sequence[float],
             *, degree: int = DEGREE) -> np.ndarray:  # fmt: skip
    """The least-squares polynomial of the areas in the logarithm of the rate, at some rates.

    Example:
        >>> smoothed(np.array([1.0, 2.0, 5.0]), [1, 2, 4], [8], degree=2).round(6)
        array([10.])
    """
    fit = np.polynomial.Polynomial.fit(np.log2(rates), means, degree)
    return fit(np.log2(places))


def best(areas: np.ndarray, rates: Sequence[float], *, degree: int | None = DEGREE) -> int:
    """Which rate of the grid has the highest mean area, after smoothing.

    Args:
        areas: [seed, rate].
        degree: of the smoothing polynomial; None takes the means as they are.
    """
    means = areas.mean(0)
    if degree is not None:
        means = smoothed(means, rates, rates, degree=degree)
    return int(means.argmax())


@dataclass(frozen=True, kw_only=True)
class AtBest:
    """Two arms, each at the rate that is best on the seeds that do not judge it.

    Attributes:
        sides: per seed, the areas of both arms.
        rates: for each half of the seeds, the rates chosen on it.
    """

    sides: Sides
    rates: tuple[tuple[float, float], ...]


def at_best(
    areas: Grid, pair: tuple[str, str], rates: Sequence[float], *, degree: int | None = DEGREE
) -> AtBest:
    """Rates chosen on every other seed and judged on the rest, and the other way round."""
    seeds = np.arange(len(areas[pair[0]]))
    sides = np.zeros((2, seeds.size))
    chosen = []
    for half in (0, 1):
        choosing, judging = seeds % 2 == half, seeds % 2 != half
        picked = [best(areas[arm][choosing], rates, degree=degree) for arm in pair]
        for row, (arm, place) in enumerate(zip(pair, picked, strict=True)):
            sides[row, judging] = areas[arm][judging, place]
        chosen.append((rates[picked[0]], rates[picked[1]]))
    return AtBest(sides=(list(sides[0]), list(sides[1])), rates=tuple(chosen))


def curves(areas: Grid, rates: Sequence[float]) -> dict[str, list[dict[str, float]]]:
    """By arm, for every rate the mean area with its interval, and the smoothed one."""
    found = {}
    for arm, values in areas.items():
        fitted = smoothed(values.mean(0), rates, rates)
        found[arm] = [
            {"rate": rate, **vars(seed_mean(list(column))), "smoothed": float(smooth)}
            for rate, column, smooth in zip(rates, values.T, fitted, strict=True)
        ]
    return found


def read_norms(path: Path = NORMS) -> dict[str, dict[float, float]]:
    """By arm and rate, the mean norm of an update over steps and the seeds measured."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))["norms"]
    return {
        arm: {float(rate): float(np.mean([*by_seed.values()])) for rate, by_seed in each.items()}
        for arm, each in stored.items()
    }


def common_norms(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    """Norms that both arms reach within the grid; none where their ranges do not overlap."""
    low, high = max(min(first), min(second)), min(max(first), max(second))
    return np.geomspace(low, high, POINTS) if low < high else np.zeros(0)


def at_norms(areas: np.ndarray, norms: Sequence[float], places: np.ndarray) -> np.ndarray:
    """Areas at some norms, [seed, norm]: linear in the logarithm between the rates of the grid."""
    order = np.argsort(norms)
    known = np.log(np.asarray(norms)[order])
    return np.stack([np.interp(np.log(places), known, row[order]) for row in areas])


def at_equal_norm(areas: Grid, pair: tuple[str, str], norms: Mapping[str, Mapping[float, float]],
                  rates: Sequence[float]) -> Sides | None:  # fmt: skip
    """Per seed, the mean area of both arms over the norms that both reach; None without any."""
    of = [[norms[arm][rate] for rate in rates] for arm in pair]
    places = common_norms(*of)
    if not places.size:
        return None
    first, second = (
        at_norms(areas[arm], each, places).mean(1) for arm, each in zip(pair, of, strict=True)
    )
    return list(first), list(second)
