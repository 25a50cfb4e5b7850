"""Estimators that the library lacks, for `--import`: candidates, and cells of a factorial.

    groupwise compare --import studies/softrank/candidates.py --plan …

`estimators.md` says why each candidate should beat GRPO and SoftRank; the last four advantages are
cells of the fourth part's factorial. Rows share clip and normaliser with `softrank`, so that only
the advantage differs. Advantages are [prompt, group] and 0 where not judged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise import ADVANTAGES, ALGORITHMS
from groupwise.algorithms import Algorithm
from groupwise.algorithms.advantages.statistics import (
    count,
    has_signal,
    judged,
    mean,
    softmax,
    standard_score,
    std,
)
from groupwise.algorithms.properties import breaks
from groupwise.registry import spec


@ADVANTAGES.register
@breaks("zero_without_signal")
def softrank_adaptive(rewards: Tensor, valid: Tensor | None = None, *, tau: float = 0.5) -> Tensor:
    """SoftRank's weights, flatter the higher the mean reward, and no answer pushed down.

        A_i = (K w_i)^(1 − r̄) · (r_i − floor),   w = softmax(z / tau)

    The floor is the lowest reward of a group whose rewards differ, and 0 elsewhere. Rewards in
    [0, 1]; for 0/1 rewards the advantage of a right answer is about r̄^(r̄ − 1).
    """
    r, v = judged(rewards, valid)
    weights = count(v, r) * softmax(standard_score(r, v, ddof=0) / tau, v)
    lowest = torch.where(v, r, torch.inf).amin(-1, keepdim=True)
    floor = torch.where(has_signal(r, v), lowest, 0)
    return torch.where(v, weights ** (1 - mean(r, v)).clamp(min=0) * (r - floor), 0)


@ADVANTAGES.register
@breaks("zero_without_signal")
def softrank_shrunk(
    rewards: Tensor, valid: Tensor | None = None, *, share: float = 0.25, tau: float = 0.5
) -> Tensor:
    """SoftRank with a share of its baseline: A_i = K w_i r_i − share · Σ_j w_j r_j.

    share 0 is K times SoftRank, 1 is `softrank_centered`.
    """
    r, v = judged(rewards, valid)
    part = softmax(standard_score(r, v, ddof=0) / tau, v) * r
    return torch.where(v, count(v, r) * part - share * part.sum(-1, keepdim=True), 0)


@ADVANTAGES.register
@breaks("zero_without_signal", "prompts_independent")
def james_stein(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """The reward minus the mean of its group, shrunk towards the mean of the batch.

        A_i = r_i − (1 − s) r̄ − s r̄_batch,   s = v / (v + t)

    v is the mean sampling variance of a group's mean; t is what the variance between the groups'
    means has above v, at least 0.
    """
    r, v = judged(rewards, valid, least=2, name="james_stein")
    means, size = mean(r, v), count(v, r).clamp(min=1)
    live = v.any(-1, keepdim=True)
    noise = mean((std(r, v, ddof=1) ** 2 / size).T, live.T)
    between = (std(means.T, live.T, ddof=1) ** 2 - noise).clamp(min=0)
    share = torch.where(noise > 0, noise / (noise + between).clamp(min=1e-12), 0)
    return torch.where(v, r - (1 - share) * means - share * mean(means.T, live.T), 0)


@ADVANTAGES.register
@breaks("zero_without_signal")
def anchored_zscore(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """GRPO's z-score where the rewards of a group differ, the reward itself elsewhere.

    A group that is right throughout is imitated rather than left out.
    """
    r, v = judged(rewards, valid, least=2, name="anchored_zscore")
    return torch.where(has_signal(r, v), standard_score(r, v, ddof=0), torch.where(v, r, 0))


@ADVANTAGES.register
@breaks("zero_without_signal")
def floored(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """The reward above the lowest of the group; the reward itself where all are equal.

        A_i = r_i − floor

    For 0/1 rewards it is the reward, REINFORCE without a baseline; graded rewards keep their
    contrast, and nothing is pushed down.
    """
    r, v = judged(rewards, valid)
    lowest = torch.where(v, r, torch.inf).amin(-1, keepdim=True)
    return torch.where(v, r - torch.where(has_signal(r, v), lowest, 0), 0)


@ADVANTAGES.register
@breaks("zero_without_signal")
def right_by_sd(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """0/1 rewards over the deviation of their group: A_i = r_i / √(p(1 − p)), 0 where p is 0 or 1.

    `zscore` without its baseline.
    """
    r, v = judged(rewards, valid)
    return _over(r, std(r, v, ddof=0), v & has_signal(r, v))


@ADVANTAGES.register
@breaks("zero_without_signal", "prompts_independent")
def right_by_batch_rate(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """0/1 rewards over the pass rate of the batch: A_i = r_i / p."""
    r, v = judged(rewards, valid)
    return _over(r, mean(r.flatten(), v.flatten()), v)


@ADVANTAGES.register
@breaks("zero_without_signal", "prompts_independent")
def right_by_batch_sd(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """0/1 rewards over the deviation of the batch: A_i = r_i / √(p(1 − p)), p of the batch.

    `batch_zscore` without its baseline.
    """
    r, v = judged(rewards, valid)
    return _over(r, std(r.flatten(), v.flatten(), ddof=0), v)


@ADVANTAGES.register
@breaks("prompts_independent")
def centered_by_batch_rate(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """The reward minus the mean of its group, over that of the batch: `maxrl` with its p."""
    r, v = judged(rewards, valid, least=2, name="centered_by_batch_rate")
    return _over(r - mean(r, v), mean(r.flatten(), v.flatten()), v & has_signal(r, v))


def _over(values: Tensor, below: Tensor, where: Tensor) -> Tensor:
    """Values over something where both are to be used, and 0 elsewhere."""
    used = where & (below > 0)
    return torch.where(used, values / torch.where(used, below, 1), 0)


for name in ("softrank_adaptive", "softrank_shrunk", "james_stein", "anchored_zscore", "floored"):
    ALGORITHMS.register(
        Algorithm(
            name=name,
            paper="docs/studies/estimators.md",
            advantage=spec(name),
            weighting=spec("group_token_mean"),
        )
    )
