"""Figures of a reward model on held-out rankings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from groupwise.evaluation import Estimate, prompt_mean
from groupwise.training.offline.encoding import Encoded

BINS = 10
"""Bins of confidence for the calibration error."""


def ranking_figures(
    items: Sequence[Encoded], scores: Sequence[Sequence[float]]
) -> dict[str, Estimate]:
    """How scores agree with what is known of the answers.

    pair_accuracy      share of pairs whose better answer scores higher, ties one half; a mean over
                       prompts, whose interval resamples prompts
    calibration_error  mean over bins of |share of right pairs − mean σ(|s_i − s_j|)|, weighted by
                       pairs; 0 where σ of a difference is the probability to be right
    score_length       correlation of score and length within prompts
    better_length      the same for the order that the data states, to compare with
    score_target       correlation with given scores, and squared_error, where there are such

    Args:
        items: prompts with answers and rankings.
        scores: of every answer.
    """
    accuracies, chances, rights = [], [], []
    for item, own in zip(items, scores, strict=True):
        leads = [
            own[better] - own[worse]
            for ranking in item.comparison.rankings
            for better, worse in ranking.pairs
        ]
        if leads:
            right = [1.0 if lead > 0 else 0.5 if lead == 0 else 0.0 for lead in leads]
            accuracies.append(float(np.mean(right)))
            rights += right
            chances += [1 / (1 + np.exp(-min(abs(lead), 50.0))) for lead in leads]
    found: dict[str, Estimate] = {}
    if accuracies:
        found["pair_accuracy"] = prompt_mean(np.array(accuracies))
        error = calibration_error(np.array(chances), np.array(rights))
        found["calibration_error"] = _bare(error)
    found |= _correlations(items, scores)
    return found


def calibration_error(chances: np.ndarray, rights: np.ndarray) -> float:
    """Expected calibration error of probabilities from .5 to 1.

    Example:
        >>> calibration_error(np.array([.9, .9, .6, .6]), np.array([1., 1., 1., 0.]))
        0.1
    """
    bins = np.clip(((chances - 0.5) * 2 * BINS).astype(int), 0, BINS - 1)
    gaps = [
        (bins == b).mean() * abs(rights[bins == b].mean() - chances[bins == b].mean())
        for b in np.unique(bins)
    ]
    return round(float(np.sum(gaps)), 12)


def _correlations(
    items: Sequence[Encoded], scores: Sequence[Sequence[float]]
) -> dict[str, Estimate]:
    lengths, scored, ranked, ranks = [], [], [], []
    for item, own in zip(items, scores, strict=True):
        size = np.array([len(answer) for answer in item.answers], dtype=float)
        lengths.append(size - size.mean())
        scored.append(np.array(own) - np.mean(own))
        for ranking in item.comparison.rankings:
            place = list(ranking.answers)
            ranked.append(size[place] - size[place].mean())
            ranks.append(np.mean(ranking.ranks) - np.array(ranking.ranks))
    found = {"score_length": _correlation(scored, lengths)}
    if ranked:
        found["better_length"] = _correlation(ranks, ranked)
    targets = np.concatenate([np.array(item.comparison.scores) for item in items])
    known = ~np.isnan(targets)
    if known.any():
        values = np.concatenate([np.array(own) for own in scores])
        found["score_target"] = _correlation([values[known]], [targets[known]])
        found["squared_error"] = _bare(float(np.mean((values - targets)[known] ** 2)))
    return {name: value for name, value in found.items() if np.isfinite(value.value)}


def _correlation(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Estimate:
    """Pearson's correlation of pooled values; NaN where one side is constant."""
    a, b = np.concatenate(list(first)), np.concatenate(list(second))
    spread = a.std() * b.std()
    if spread < 1e-12:
        return _bare(float("nan"))
    return _bare(float(((a - a.mean()) * (b - b.mean())).mean() / spread))


def _bare(value: float) -> Estimate:
    """A figure without an interval."""
    return Estimate(value=value, low=float("nan"), high=float("nan"))
