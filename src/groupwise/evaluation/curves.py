"""Learning curves summarised: area, steps to threshold, final value, oscillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Numbers


@dataclass(frozen=True, kw_only=True)
class CurveSummary:
    """Summary of a learning curve.

    Attributes:
        area: mean value over the run (trapezoidal rule over steps, divided by their span).
        steps_to_threshold: first step at which the smoothed curve is at or above the threshold;
            the last step where it never is.
        reached: False where the threshold was never reached and `steps_to_threshold` is censored.
        final: mean of the last tenth of the points.
        oscillation: standard deviation of the first differences of the smoothed curve around the
            mean curve of its arm (`summarise_arm`); NaN for a curve on its own, whose rise cannot
            be told from its noise.
        spacing: largest distance between two points, the resolution of `steps_to_threshold`.
    """

    area: float
    steps_to_threshold: float
    reached: bool
    final: float
    oscillation: float
    spacing: float = 1.0


def smooth(values: Numbers, *, window: int = 5) -> np.ndarray:
    """Centred moving average; the window shrinks at both ends, which keeps straight lines straight.

    Args:
        values: one value per step.
        window: odd number of points.

    Example:
        >>> smooth([0, 1, 2, 9, 4], window=3).tolist()
        [0.0, 1.0, 4.0, 5.0, 4.0]

    Source: none needed; a one-sided window would bend a rising curve at its ends.
    """
    curve = np.asarray(values, dtype=float)
    if window < 1 or window % 2 == 0:
        raise UsageError(f"window = {window}: must be odd and positive.")
    total = np.concatenate([[0.0], np.cumsum(curve)])
    index = np.arange(curve.size)
    half = np.minimum(window // 2, np.minimum(index, curve.size - 1 - index))
    return (total[index + half + 1] - total[index - half]) / (2 * half + 1)


def summarise(
    steps: Numbers, values: Numbers, *, threshold: float, window: int = 5
) -> CurveSummary:
    """Summarise one learning curve; `summarise_arm` adds the oscillation, which takes several.

    Args:
        steps: ascending.
        values: one per step.
        threshold: value that counts as learned.
        window: of the centred moving average, which all but area and final value use.

    Returns:
        The summary; every number but the oscillation finite.

    Raises:
        UsageError: no points, steps that do not ascend, unequal lengths, or values not finite.

    Example:
        >>> s = summarise([1, 2, 3, 4, 5], [.1, .3, .5, .7, .6], threshold=.5, window=1)
        >>> s.steps_to_threshold, s.reached
        (3.0, True)
        >>> round(s.area, 4), round(s.final, 4)
        (0.4625, 0.6)

    Source: trapezoids .2 + .4 + .6 + .65 = 1.85 over a span of 4 give .4625.
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if x.shape != y.shape or x.size == 0 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise UsageError(
            f"curve: must have one finite value per step; got {y.size} for {x.size} steps."
        )
    if (np.diff(x) <= 0).any():
        raise UsageError("curve: steps must be in ascending order.")
    smoothed = smooth(y, window=window)
    above = np.flatnonzero(smoothed >= threshold)
    return CurveSummary(
        area=float(np.trapezoid(y, x) / (x[-1] - x[0])) if x.size > 1 else float(y[0]),
        steps_to_threshold=float(x[above[0]] if above.size else x[-1]),
        reached=bool(above.size),
        final=float(y[-max(1, y.size // 10) :].mean()),
        oscillation=float("nan"),
        spacing=float(np.diff(x).max(initial=0.0)),
    )


def summarise_arm(
    curves: Mapping[int, tuple[Numbers, Numbers]], *, threshold: float, window: int = 5
) -> dict[int, CurveSummary]:
    """Summarise the learning curves of one arm, with their oscillation around their mean.

    The first differences of a rising curve vary whether or not it oscillates. The mean curve of the
    arm's runs is what they have in common; the oscillation of run s is that of the rest:
    √(n/(n−1)) · sd_t[Δ(y_s − ȳ)(t)], with Δ the first difference and ȳ the mean over all n runs.
    The factor makes up for the run's own part in the mean.

    Args:
        curves: steps and values of every run, by seed.
        threshold, window: see `summarise`.

    Returns:
        The summaries by seed. Oscillations compare the steps that all runs have; they are NaN for
        one run and 0 for fewer than three shared steps.

    Raises:
        UsageError: see `summarise`.

    Example:
        >>> rise = [0.0, 0.1, 0.4, 0.9]
        >>> two = {0: ([1, 2, 3, 4], rise), 1: ([1, 2, 3, 4], rise)}
        >>> summarise_arm(two, threshold=.5, window=1)[0].oscillation
        0.0

    Source: none; the spread of first differences alone is mostly the slope of the curve.
    """
    found = {
        seed: summarise(x, y, threshold=threshold, window=window) for seed, (x, y) in curves.items()
    }
    if len(curves) < 2:
        return found
    grids = [{*np.asarray(x, dtype=float).tolist()} for x, _ in curves.values()]
    steps = sorted(set.intersection(*grids))
    shared = {
        seed: smooth(y, window=window)[np.isin(np.asarray(x, dtype=float), steps)]
        for seed, (x, y) in curves.items()
    }
    mean = np.mean([*shared.values()], axis=0)
    own_part = np.sqrt(len(curves) / (len(curves) - 1))
    return {
        seed: replace(summary, oscillation=_roughness(shared[seed] - mean) * float(own_part))
        for seed, summary in found.items()
    }


def _roughness(values: np.ndarray) -> float:
    """Standard deviation of the first differences."""
    return float(np.diff(values).std(ddof=1)) if values.size > 2 else 0.0
