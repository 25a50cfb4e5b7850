"""How many paired seeds a comparison needs."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

MOST = 10_000


def power(seeds: int, *, difference: float, deviation: float, alpha: float = 0.05) -> float:
    """Probability that a two-sided paired t test over seeds sees a true difference.

    P(|T| > t(1 − α/2, n − 1)), T noncentral t with n − 1 degrees of freedom and δ·√n/s.

    Example:
        >>> round(power(10, difference=1.0, deviation=1.0), 3)
        0.803

    Source: the noncentral t distribution; 10 pairs at d_z = 1 have the power .803 of every table.
    """
    critical = float(stats.t.ppf(1 - alpha / 2, seeds - 1))
    shift = difference / deviation * math.sqrt(seeds)
    above, below = (stats.nct.cdf(t, seeds - 1, shift) for t in (critical, -critical))
    # Far in the other tail the distribution function is not a number.
    return float(1 - above + np.nan_to_num(below))


def seeds_needed(
    *, difference: float, deviation: float, alpha: float = 0.05, wanted: float = 0.8
) -> int:
    """The fewest paired seeds with which a true difference is seen with the wanted power."""
    counts = range(3, MOST)
    sees = (
        n
        for n in counts
        if power(n, difference=difference, deviation=deviation, alpha=alpha) >= wanted
    )
    return next(sees)
