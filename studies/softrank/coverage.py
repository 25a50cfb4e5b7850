"""How often the study's intervals cover, and how often an algorithm differs from itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

DRAWS = 20_000


def rejected(differences: np.ndarray, *, level: float = 0.95) -> float:
    """Share of rows whose Student t interval leaves out 0.

    Args:
        differences: [draws, seeds].
    """
    seeds = differences.shape[1]
    mean, deviation = differences.mean(1), differences.std(1, ddof=1)
    reach = stats.t.ppf((1 + level) / 2, seeds - 1) * deviation / np.sqrt(seeds)
    return float((np.abs(mean) > reach).mean())


def coverage(differences: Sequence[float], seeds: int, *, draws: int = DRAWS) -> float:
    """Share of t intervals over `seeds` pairs that cover the true mean.

    The pairs are drawn with replacement from measured differences, whose mean is the true one.
    """
    measured = np.asarray(differences) - np.mean(differences)
    drawn = np.random.default_rng(0).choice(measured, (draws, seeds))
    return 1 - rejected(drawn)


def against_itself(values: Sequence[float], seeds: int, *, draws: int = DRAWS) -> float:
    """Share of comparisons of an arm with itself that find a difference.

    Each draws twice `seeds` of the arm's runs without replacement and pairs one half with the
    other; the true difference is 0.
    """
    random = np.random.default_rng(0)
    order = random.permuted(np.tile(np.asarray(values, dtype=float), (draws, 1)), axis=1)
    return rejected(order[:, :seeds] - order[:, seeds : 2 * seeds])
