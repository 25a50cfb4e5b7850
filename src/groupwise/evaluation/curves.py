"""A learning curve in five numbers: area, steps to threshold, end, oscillation, draw-down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Numbers


@dataclass(frozen=True, kw_only=True)
class CurveSummary:
    """What a learning curve came to.

    Attributes:
        area: mean height over the run (trapezoids over steps, divided by their span), in the
            curve's own unit.
        steps_to_threshold: first step at which the smoothed curve is at the threshold; the last
            step where it never is.
        reached: False where it never got there, so that `steps_to_threshold` is only a lower bound
            (censored).
        final: mean of the last tenth of the points.
        oscillation: standard deviation of the first differences of the smoothed curve.
        draw_down: deepest fall of the smoothed curve below its highest value so far.
    """

    area: float
    steps_to_threshold: float
    reached: bool
    final: float
    oscillation: float
    draw_down: float


def smooth(values: Numbers, *, window: int = 5) -> np.ndarray:
    """Centred moving average whose window shrinks at both ends, so a straight line stays itself.

    Args:
        values: the curve, one value per step.
        window: odd number of points averaged.

    Example:
        >>> smooth([0, 1, 2, 9, 4], window=3).tolist()
        [0.0, 1.0, 4.0, 5.0, 4.0]

    Source: none needed; shrinking the window by one side only would bend a rising curve at its
    ends.
    """
    curve = np.asarray(values, dtype=float)
    if window < 1 or window % 2 == 0:
        raise UsageError(f"window = {window}: must be odd and positive.")
    total = np.concatenate([[0.0], np.cumsum(curve)])
    index = np.arange(curve.size)
    reach = np.minimum(window // 2, np.minimum(index, curve.size - 1 - index))
    return (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)


def summarise(
    steps: Numbers, values: Numbers, *, threshold: float, window: int = 5
) -> CurveSummary:
    """Area, steps to threshold, final value, oscillation and draw-down of one learning curve.

    Args:
        steps: of the points, ascending.
        values: the curve.
        threshold: level that counts as "has learned", in the curve's unit.
        window: of the centred moving average that all but area and final value use.

    Returns:
        The summary; every number finite.

    Raises:
        UsageError: no points, steps not ascending, lengths that differ, values that are not finite.

    Example:
        >>> s = summarise([1, 2, 3, 4, 5], [.1, .3, .5, .7, .6], threshold=.5, window=1)
        >>> s.steps_to_threshold, s.reached
        (3.0, True)
        >>> round(s.area, 4), round(s.final, 4), round(s.draw_down, 4)
        (0.4625, 0.6, 0.1)

    Source: trapezoids .2 + .4 + .6 + .65 = 1.85 over a span of 4 give .4625.
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if x.shape != y.shape or x.size == 0 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise UsageError(
            f"curve: must have one finite value per step; got {y.size} for {x.size} steps."
        )
    if (np.diff(x) <= 0).any():
        raise UsageError("curve: steps must ascend.")
    even = smooth(y, window=window)
    there = np.flatnonzero(even >= threshold)
    return CurveSummary(
        area=_area(x, y),
        steps_to_threshold=float(x[there[0]] if there.size else x[-1]),
        reached=bool(there.size),
        final=float(y[-max(1, y.size // 10) :].mean()),
        oscillation=float(np.diff(even).std(ddof=1)) if y.size > 2 else 0.0,
        draw_down=float((np.maximum.accumulate(even) - even).max()),
    )


def _area(x: np.ndarray, y: np.ndarray) -> float:
    """Trapezoids over the span; the only value of a single point."""
    if x.size == 1:
        return float(y[0])
    return float(np.sum((y[1:] + y[:-1]) / 2 * np.diff(x)) / (x[-1] - x[0]))
