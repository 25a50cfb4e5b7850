"""pass@k, maj@k and best-of-k as exact expectations over subsets of the samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Numbers


def pass_at_k(samples: int, correct: int, *, k: int) -> float:
    """Chance that at least one of k samples is right, unbiased: 1 − C(n−c, k)/C(n, k).

    Args:
        samples: n, number of completions.
        correct: c, number of correct ones.
        k: number of draws.

    Returns:
        A share in [0, 1], exactly 1 where fewer than k samples are wrong.

    Raises:
        UsageError: k outside 1 … n, or c outside 0 … n.

    Example:
        >>> [round(pass_at_k(10, 3, k=k), 6) for k in (1, 2, 5, 8)]
        [0.3, 0.533333, 0.916667, 1.0]

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    Elsewhere: the common plug-in 1 − (1 − c/n)^k is biased low.
    """
    _check(samples, correct, k)
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(
    answers: Sequence[Hashable | None], correct: Sequence[float | int | bool], *, k: int
) -> float:
    """Chance that the most frequent answer of k out of n samples is right; ties share equally.

    Wins are counted over all C(n, k) subsets by multiplying one polynomial per answer, in which x
    counts the samples taken and y the answers that tie.

    Args:
        answers: the normalised answer of every sample; None (nothing extracted) takes a place but
            does not vote.
        correct: whether each sample is right; averaged over samples with the same answer.
        k: number of samples that vote.

    Returns:
        The exact share, in [0, 1]; subsets without a vote count as 0.

    Raises:
        UsageError: k outside 1 … n, or lengths that differ.

    Example:
        >>> majority_at_k(["7", "7", "8", None], [1, 1, 0, 0], k=4)
        1.0
        >>> majority_at_k(["7", "8", None, None], [1, 0, 0, 0], k=4)
        0.5

    Source: self-consistency, Wang et al. 2022 (arXiv 2203.11171).
    Elsewhere: often the first-seen answer wins ties, which depends on the order of the samples.
    """
    if len(answers) != len(correct):
        raise UsageError(f"correct: {len(correct)} entries for {len(answers)} answers; must match.")
    _check(len(answers), 0, k)
    counts = Counter(answer for answer in answers if answer is not None)
    unextracted = len(answers) - sum(counts.values())
    share = {
        answer: float(
            np.mean([bool(c) for a, c in zip(answers, correct, strict=True) if a == answer])
        )
        for answer in counts
    }
    wins = sum(
        share[a] * _winning_subsets(a, counts, unextracted, k) for a in counts if share[a] > 0
    )
    return wins / math.comb(len(answers), k)


def best_of_k(rewards: Numbers, correct: Sequence[float | int | bool], *, k: int) -> float:
    """Chance that the best-rewarded of k out of n samples is right; ties share equally.

    Args:
        rewards: the score that selects, one per sample.
        correct: whether each sample is right.
        k: number of samples to select from.

    Returns:
        The exact expectation over subsets and the order of ties, in [0, 1].

    Example:
        >>> best_of_k([.9, .5, .1], [0, 1, 1], k=2)
        0.3333333333333333

    Source: best-of-N selection; of the 3 pairs in the example, 1 lacks the first sample.
    Elsewhere: `argmax` takes the first of tied samples, which depends on their order.
    """
    scores, right = np.asarray(rewards, dtype=float), np.asarray(correct, dtype=float)
    if scores.shape != right.shape:
        raise UsageError(f"correct: {right.size} entries for {scores.size} rewards; must match.")
    _check(scores.size, 0, k)
    total = math.comb(scores.size, k)
    value, lower = 0.0, 0
    for score in np.unique(scores):
        tied = scores == score
        upper = lower + int(tied.sum())
        value += (math.comb(upper, k) - math.comb(lower, k)) / total * float(right[tied].mean())
        lower = upper
    return value


def _winning_subsets(
    answer: Hashable, counts: Counter[Hashable], unextracted: int, k: int
) -> float:
    """Number of k-subsets in which `answer` has the most votes; a tie of t answers counts 1/t."""
    total = 0.0
    for votes in range(1, min(counts[answer], k) + 1):
        # ways[taken][ties]: choices among the samples seen so far
        ways = {(votes, 0): math.comb(counts[answer], votes)}
        for other, count in counts.items():
            if other != answer:
                options = [
                    (j, int(j == votes), math.comb(count, j)) for j in range(min(count, votes) + 1)
                ]
                ways = _times(ways, options, k)
        ways = _times(ways, [(j, 0, math.comb(unextracted, j)) for j in range(unextracted + 1)], k)
        total += sum(number / (ties + 1) for (taken, ties), number in ways.items() if taken == k)
    return total


def _times(
    ways: dict[tuple[int, int], int], options: list[tuple[int, int, int]], limit: int
) -> dict[tuple[int, int], int]:
    """Product of two counting polynomials, truncated at `limit` samples."""
    product: Counter[tuple[int, int]] = Counter()
    for (taken, ties), number in ways.items():
        for more, tie, choices in options:
            if taken + more <= limit:
                product[taken + more, ties + tie] += number * choices
    return dict(product)


def _check(samples: int, correct: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise UsageError(f"k = {k}: must lie in 1 … {samples}, the number of samples.")
    if not 0 <= correct <= samples:
        raise UsageError(f"correct = {correct}: must lie in 0 … {samples}, the number of samples.")
