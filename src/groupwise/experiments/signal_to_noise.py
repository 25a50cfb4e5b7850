"""Signal and noise of gradients, from their inner products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from groupwise.evaluation import Estimate


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Statistics of an estimator over some groups.

    Attributes:
        groups: how many they are, n.
        squared_norm: of the expected gradient g of a group, unbiased: mean over pairs p ≠ q of
            g_p·g_q. It can be negative where the noise is larger than the signal.
        trace: of the covariance of g_p, unbiased.
        signal_to_noise: of the mean over a step of P groups: P · squared_norm / trace.
        cosine: of the mean over all n groups with the reference gradient.
        step_cosine: of a step of P groups: mean of g_p·u / √(squared_norm + trace / P), where u is
            the direction of the reference.
        pull: share that these groups have in what all groups do in the direction of the reference.
        positive, negative, nonzero: shares of the judged completions, by what multiplies them.
        effective_samples: completions of a group that carry its gradient, (Σ|c|)² / Σc².
    """

    groups: int
    squared_norm: float
    trace: float
    signal_to_noise: Estimate
    cosine: Estimate
    step_cosine: Estimate
    pull: float
    positive: float
    negative: float
    nonzero: float
    effective_samples: float

    @property
    def noise(self) -> float:
        """trace / squared_norm; NaN where the signal is not distinguishable from noise."""
        return self.trace / self.squared_norm if self.squared_norm > 0 else math.nan

    def as_dict(self) -> dict[str, Any]:
        """JSON values; None for unknown ones."""
        values = {
            key: value.as_dict() if isinstance(value, Estimate) else finite(value)
            for key, value in vars(self).items()
        }
        return values | {"noise": finite(self.noise)}


def signal(
    gram: Float[np.ndarray, "group group"], pull: Float[np.ndarray, "group"], *, step: int
) -> tuple[float, float, Estimate, Estimate, Estimate]:
    """Signal and noise of vectors, from their inner products.

        squared_norm = Σ_{p≠q} g_p·g_q / n(n − 1)
        trace        = (Σ_p ‖g_p‖² − ‖Σ_p g_p‖² / n) / (n − 1)

    Args:
        gram: inner products of the n vectors.
        pull: inner product of each with the unit vector u that cosines are taken with.
        step: P, how many of them are averaged in use.

    Returns:
        squared_norm, trace, signal_to_noise, cosine, step_cosine, as `Signal` explains them; the
        last three with 95 % jackknife intervals over the vectors. NaN for fewer than two vectors.

    Example:
        >>> g = np.array([[2.0, 1.0], [2.0, -1.0], [4.0, 0.0], [4.0, 0.0]])
        >>> found = signal(g @ g.T, g @ np.array([1.0, 0.0]), step=1)
        >>> [round(value, 4) for value in found[:2]], round(found[3].value, 4)
        ([8.5, 2.0], 1.0)

    Source: U-statistics (Hoeffding 1948), unbiased here: the squares (5, 5, 16, 16) add up to 42,
    the sum (12, 0) has the square 144, so (144 − 42) / 12 and (42 − 144 / 4) / 3.
    """
    n = len(gram)
    unknown = Estimate(value=math.nan, low=math.nan, high=math.nan)
    squares, total = float(np.trace(gram)), float(gram.sum())
    if n < 2 or squares <= 0:
        return math.nan, math.nan, unknown, unknown, unknown
    whole = _ratios(n, total, squares, float(pull.sum()), step)
    without = _ratios(
        n - 1,
        total - 2 * gram.sum(1) + np.diag(gram),
        squares - np.diag(gram),
        pull.sum() - pull,
        step,
    )
    ratios = [_jackknife(one, many) for one, many in zip(whole[2:], without[2:], strict=True)]
    return (float(whole[0]), float(whole[1]), *ratios)  # pyright: ignore[reportReturnType]


def _ratios(n: int, total: Any, squares: Any, pull: Any, step: int) -> tuple[Any, ...]:
    """The five figures from sums over n vectors, of one sample or of many."""
    with np.errstate(divide="ignore", invalid="ignore"):
        squared_norm = (total - squares) / (n * (n - 1)) if n > 1 else total * math.nan
        trace = (squares - total / n) / (n - 1) if n > 1 else total * math.nan
        cosine = pull / np.sqrt(total)
        step_cosine = pull / n / np.sqrt(squared_norm + trace / step)
        return squared_norm, trace, step * squared_norm / trace, cosine, step_cosine


def _jackknife(value: Any, without: Any) -> Estimate:
    """A figure with its jackknife interval."""
    n = len(without)
    spread = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    reach = float(stats.t.ppf(0.975, n - 1)) * spread
    return Estimate(value=float(value), low=float(value) - reach, high=float(value) + reach)


def finite(value: Any) -> Any:
    """The value; None for numbers that JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
