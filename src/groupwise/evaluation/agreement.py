"""Agreement of a score, such as a judge's or a learned verifier's, with the verdict of a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.errors import UsageError, suggest
from groupwise.evaluation.intervals import Estimate

Row = Mapping[str, Any]

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Thresholds of scores between 0 and 1; of other scores, the quantiles at these levels."""


def agreement_figures(
    rows: Iterable[Row], score: str, *, resamples: int = 500
) -> dict[str, dict[str, Estimate]]:
    """Agreement of a score with a verdict, by threshold of the score.

        accuracy = (TP + TN) / n        κ = (accuracy - e) / (1 - e)

    e is the accuracy of two independent raters with the same shares of "right".

    Args:
        rows: sampled answers with `id`, `correct` (the verdict, right from 1 on) and the score, in
            a column of that name or in `parts`. Rows that lack one of the two are left out.
        score: name of the score, such as "judge" or "reward_model".
        resamples: bootstrap draws.

    Returns:
        By threshold as "judge ≥ 0.5": `accuracy`, `kappa` (Cohen's κ), `precision` and `recall` of
        the answers that the score accepts, and `accepted`, their share. Under "all answers": `auc`,
        the probability that a right answer has a higher score than a wrong one, with ties as one
        half; `right`, the share of right answers; `compared`, the share of rows with both values. A
        figure that is undefined, such as the precision of no accepted answer, is left out.
        Intervals are a percentile bootstrap over prompts.

    Raises:
        UsageError: no row has that score and a verdict.

    Example:
        >>> rows = [{"id": n, "correct": c, "judge": s}
        ...         for n, (c, s) in enumerate([(1, 0.9), (1, 0.4), (0, 0.2), (0, 0.6)])]
        >>> found = agreement_figures(rows, "judge")
        >>> [found["judge ≥ 0.5"][name].value for name in ("accuracy", "kappa", "precision")]
        [0.5, 0.0, 0.5]
        >>> found["all answers"]["auc"].value
        0.75

    Source: Cohen 1960, "A coefficient of agreement for nominal scales"; Hanley and McNeil 1982 for
    the area under the curve.
    """
    given = list(rows)
    known = [
        (row["id"], float(row["correct"]) >= 1, float(value))
        for row in given
        if row.get("correct") is not None and (value := _score(row, score)) is not None
    ]
    if not known:
        names = {name for row in given for name in (*row, *row.get("parts", {}))}
        raise UsageError(
            f"agreement = {score!r}: no row has that score and a verdict in `correct`; "
            + suggest(score, sorted(names))
        )
    scores = np.array([value for *_, value in known])
    right = np.array([verdict for _, verdict, _ in known])
    numbers: dict[Any, list[int]] = {}
    for place, (prompt, *_) in enumerate(known):
        numbers.setdefault(prompt, []).append(place)
    draws = _draws([np.array(each) for each in numbers.values()], resamples)
    found = {}
    for threshold in _thresholds(scores):
        said = scores >= threshold
        figures = {name: _estimate(f, (said, right), draws) for name, f in _FIGURES.items()}
        found[f"{score} ≥ {threshold:.3g}"] = figures
    found["all answers"] = {
        "auc": _estimate(_auc, (scores, right), draws),
        "right": _estimate(lambda _, verdicts: float(verdicts.mean()), (scores, right), draws),
        "compared": Estimate(value=len(known) / len(given), low=math.nan, high=math.nan),
    }
    return {
        section: {name: each for name, each in figures.items() if math.isfinite(each.value)}
        for section, figures in found.items()
    }


def kappa(said: np.ndarray, right: np.ndarray) -> float:
    """Cohen's κ of two verdicts; NaN where both are the same constant.

    Example:
        >>> round(kappa(np.array([1, 1, 0, 0, 1]) > 0, np.array([1, 1, 0, 1, 0]) > 0), 4)
        0.1667
    """
    both = float((said == right).mean())
    one, other = float(said.mean()), float(right.mean())
    chance = one * other + (1 - one) * (1 - other)
    return (both - chance) / (1 - chance) if chance < 1 else math.nan


def _auc(scores: np.ndarray, right: np.ndarray) -> float:
    from scipy import stats  # slow to import

    positive, count = int(right.sum()), len(right)
    if positive in (0, count):
        return math.nan
    ranks = stats.rankdata(scores)[right].sum()
    return float(ranks - positive * (positive + 1) / 2) / (positive * (count - positive))


def _share(chosen: np.ndarray) -> float:
    return float(chosen.mean()) if chosen.size else math.nan


_FIGURES: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda said, right: float((said == right).mean()),
    "kappa": kappa,
    "precision": lambda said, right: _share(right[said]),
    "recall": lambda said, right: _share(said[right]),
    "accepted": lambda said, right: float(said.mean()),
}


def _score(row: Row, name: str) -> Any:
    value = row.get(name)
    return row.get("parts", {}).get(name) if value is None else value


def _thresholds(scores: np.ndarray) -> list[float]:
    shares = scores.min() >= 0 and scores.max() <= 1
    levels = LEVELS if shares else np.quantile(scores, LEVELS)
    return sorted({float(level) for level in levels})


def _draws(groups: Sequence[np.ndarray], resamples: int) -> list[np.ndarray]:
    """Rows of resampled prompts."""
    random = np.random.default_rng(0)
    return [
        np.concatenate([groups[place] for place in random.integers(len(groups), size=len(groups))])
        for _ in range(resamples)
    ]


def _estimate(
    figure: Callable[[np.ndarray, np.ndarray], float],
    data: tuple[np.ndarray, np.ndarray],
    draws: Sequence[np.ndarray],
) -> Estimate:
    """The figure with its interval over resampled prompts; of those where it is defined."""
    first, second = data
    drawn = np.array([figure(first[rows], second[rows]) for rows in draws])
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, (0.025, 0.975)) if drawn.size > 1 else (math.nan, math.nan)
    return Estimate(value=figure(first, second), low=float(low), high=float(high))
