"""Paired comparisons on the same items or the same seeds, and Holm's correction for several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Estimate, Numbers, bootstrap, seed_mean, wilson


@dataclass(frozen=True, kw_only=True)
class SeedDifference:
    """First minus second over paired seeds.

    Attributes:
        difference: mean difference with Student's t interval; NaN ends for one seed or equal
            differences.
        p: two-sided p of the paired t test; 1 where there is no interval.
        deviation: standard deviation of the differences; NaN where there is no interval.
        seeds: number of pairs.
    """

    difference: Estimate
    p: float
    deviation: float
    seeds: int

    @property
    def effect(self) -> float:
        """Mean difference over its standard deviation (Cohen's d_z)."""
        return self.difference.value / self.deviation


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Whether a paired difference over seeds is smaller than a margin.

    Attributes:
        margin: largest difference that counts as none, fixed before the data are seen.
        difference: mean difference with the 1 − 2α interval of the test (90 % for α = .05).
        p: the larger of the two one-sided p; 1 where there is no interval.
        equivalent: whether p ≤ α, that is, whether the interval lies within ± margin.
    """

    margin: float
    difference: Estimate
    p: float
    equivalent: bool


@dataclass(frozen=True, kw_only=True)
class ItemDifference:
    """First minus second on the same items.

    Attributes:
        difference: mean difference with a bootstrap interval over items.
        first_only, second_only: items that only one of the two solved (at least half of the
            samples right).
        p: exact McNemar p of those.
        items: number of items.
    """

    difference: Estimate
    first_only: int
    second_only: int
    p: float
    items: int


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """Shares of all items; accuracy = accurate_explicit + accurate_implicit."""

    accuracy: float
    explicit: float
    accurate_explicit: float
    accurate_implicit: float


def paired_seeds(first: Numbers, second: Numbers, *, level: float = 0.95) -> SeedDifference:
    """Paired difference over seeds: mean of d = first − second, Student's t interval and test.

    Args:
        first, second: one value per seed; entry s of both comes from the same seed (prompts,
            order, random numbers).
        level: nominal coverage.

    Returns:
        The difference; for one seed or equal differences there is no interval and p is 1.

    Raises:
        UsageError: lengths that differ, or values that are not finite.

    Example:
        >>> d = paired_seeds([.71, .74, .70, .73, .72], [.68, .73, .69, .70, .70])
        >>> print(d.difference, round(d.p, 5))
        0.02 [0.007583, 0.03242] 0.01106

    Source: Student 1908. Here d = (.03, .01, .01, .03, .02), s = .01, t = .02/(.01/√5) = 4.4721.
    Elsewhere: unpaired tests ignore the common random numbers and need far more seeds.
    """
    from scipy import stats  # slow to import

    a, b = _aligned(first, second)
    differences = a - b
    estimate = seed_mean(differences, level=level)
    if not estimate.known:
        return SeedDifference(difference=estimate, p=1.0, deviation=math.nan, seeds=a.size)
    deviation = float(differences.std(ddof=1))
    t = estimate.value / deviation * math.sqrt(a.size)
    p = 2 * float(stats.t.sf(abs(t), a.size - 1))
    return SeedDifference(difference=estimate, p=p, deviation=deviation, seeds=a.size)


def equivalence(
    first: Numbers, second: Numbers, *, margin: float, alpha: float = 0.05
) -> Equivalence:
    """Two one-sided paired t tests: whether two arms differ by less than a margin.

    That a difference is not significant does not make two arms equal; this test can. It rejects
    "the arms differ by the margin or more" where both mean + margin > 0 and mean − margin < 0 are
    significant.

    Args:
        first, second: one value per seed, paired as in `paired_seeds`.
        margin: largest difference that counts as none; it must be fixed beforehand.
        alpha: level of both tests, and of their combination.

    Raises:
        UsageError: a margin that is not positive, lengths that differ, or values not finite.

    Example:
        >>> d = equivalence([.71, .74, .70, .73, .72], [.70, .74, .71, .72, .72], margin=.02)
        >>> d.equivalent, round(d.p, 4)
        (True, 0.0043)

    Source: Schuirmann 1987, "A comparison of the two one-sided tests procedure and the power
    approach". Here d = (.01, 0, −.01, .01, 0), s = .0083666, t = (.02 − .002)/(.0083666/√5) =
    4.8107 with 4 degrees of freedom.
    """
    from scipy import stats  # slow to import

    if not margin > 0:
        raise UsageError(f"margin = {margin}: must be positive.")
    found = paired_seeds(first, second, level=1 - 2 * alpha)
    if not found.difference.known:
        return Equivalence(margin=margin, difference=found.difference, p=1.0, equivalent=False)
    t = (margin - abs(found.difference.value)) / found.deviation * math.sqrt(found.seeds)
    p = float(stats.t.sf(t, found.seeds - 1))
    return Equivalence(margin=margin, difference=found.difference, p=p, equivalent=p <= alpha)


def paired_items(
    first: Numbers, second: Numbers, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> ItemDifference:
    """Paired difference on the same items: bootstrap for the mean, exact McNemar for the flips.

    Args:
        first, second: one value per item (1 right, 0 wrong, or the share of samples right), in the
            same order.
        level: nominal coverage.
        resamples, seed: settings of the bootstrap.

    Returns:
        The difference. Where no item differs, the interval extends either way as far as Wilson's
        for 0 of n flips.

    Raises:
        UsageError: lengths that differ, or values that are not finite.

    Example:
        >>> d = paired_items([1] * 40 + [0] * 25 + [1] * 35, [0] * 40 + [1] * 25 + [1] * 35)
        >>> d.first_only, d.second_only, round(d.p, 6), round(d.difference.value, 2)
        (40, 25, 0.081682, 0.15)

    Source: McNemar 1947 in its exact form; Efron 1987 for the interval.
    Elsewhere: whether two separate intervals overlap says little about a paired difference.
    """
    a, b = _aligned(first, second)
    differences = a - b
    only_a, only_b = int(np.sum((a >= 0.5) & (b < 0.5))), int(np.sum((b >= 0.5) & (a < 0.5)))
    if np.ptp(differences) > 0:
        estimate = bootstrap(differences, level=level, resamples=resamples, seed=seed)
    else:
        reach = wilson(0, a.size, level=level).high
        middle = float(differences[0])
        estimate = Estimate(
            value=middle, low=max(-1.0, middle - reach), high=min(1.0, middle + reach)
        )
    return ItemDifference(
        difference=estimate,
        first_only=only_a,
        second_only=only_b,
        p=mcnemar(only_a, only_b),
        items=a.size,
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """Exact two-sided McNemar p: the split of b + c flips against a fair coin.

    Args:
        first_only: b, items that only the first solved.
        second_only: c, items that only the second solved.

    Returns:
        p = min(1, 2·P(Binomial(b + c, ½) ≤ min(b, c))); 1 without flips.

    Example:
        >>> round(mcnemar(40, 25), 6)
        0.081682

    Source: McNemar 1947.
    Elsewhere: the χ² approximation with continuity correction fails for few flips.
    """
    from scipy import stats  # slow to import

    if first_only < 0 or second_only < 0:
        raise UsageError(f"flips = ({first_only}, {second_only}): must not be negative.")
    flips = first_only + second_only
    return float(stats.binomtest(first_only, flips, 0.5).pvalue) if flips else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: family-wise p of several tests under any dependence.

    Sorted ascending, p̃_(i) = max_{j ≤ i} min(1, (m − j + 1) p_(j)).

    Args:
        p_values: p of all m tests, in any order.

    Returns:
        Corrected values in the given order.

    Example:
        >>> [round(p, 4) for p in holm([.01, .04, .03, .005])]
        [0.03, 0.06, 0.06, 0.02]

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    values = np.asarray(p_values, dtype=float)
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(values.size, 0, -1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(p) for p in corrected]


def reflection_rates(correct: Sequence[bool | int], explicit: Sequence[bool | int]) -> Reflection:
    """Rates of recovery from a wrong chain of thought, explicit and implicit.

    Args:
        correct: whether each answer after the adversarial chain of thought is right.
        explicit: whether it names the error in words ("wait, that is wrong").

    Returns:
        Shares of all items: accuracy, explicit, accurate and explicit, accurate and not explicit.

    Raises:
        UsageError: no items, or lengths that differ.

    Example:
        >>> r = reflection_rates([1, 1, 1, 0, 0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
        >>> r.accuracy, r.explicit, r.accurate_explicit, r.accurate_implicit
        (0.4, 0.6, 0.3, 0.1)

    Source: "Rethinking reflection in pre-training" (arXiv 2504.04022).
    """
    right, said = _aligned(np.asarray(correct, dtype=bool), np.asarray(explicit, dtype=bool))
    return Reflection(
        accuracy=float(right.mean()),
        explicit=float(said.mean()),
        accurate_explicit=float((right * said).mean()),
        accurate_implicit=float((right * (1 - said)).mean()),
    )


def _aligned(first: Numbers, second: Numbers) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise UsageError(f"pairs: both sides must match in length; got {a.shape} and {b.shape}.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UsageError("pairs: every value must be finite; drop pairs that lack one side.")
    return a, b
