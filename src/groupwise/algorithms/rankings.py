"""Losses of reward models: from the scores of a prompt's answers and what people (or rules) said of
them, to one loss per prompt.

Scores are [prompt, answer]; `ranks` of the same shape gives the place of every answer, smaller is
better, equal places are ties. `valid` is False where a prompt has fewer answers than others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.registry import Registry

RANKINGS = Registry("ranking", ("scores", "ranks", "valid", "margins", "targets"))


@RANKINGS.register
def bradley_terry(
    scores: Float[Tensor, "prompt answer"],
    ranks: Float[Tensor, "prompt answer"],
    valid: Bool[Tensor, "prompt answer"] | None = None,
    margins: Float[Tensor, "prompt answer answer"] | None = None,
    *,
    center: float = 0.0,
) -> Float[Tensor, "prompt"]:
    """Every pair of a prompt's answers, the better one to score higher.

        L = mean over pairs (i better than j) of −log σ(s_i − s_j − m_ij) + center · (s_i + s_j)²

    All pairs of a prompt count once and share its answers' forward pass; ties give no pair.

    Args:
        scores: s, with gradient.
        ranks: places; smaller is better, equal places are ties.
        valid: answers that are there; None: all.
        margins: m_ij ≥ 0 by which i should lead j; None for 0.
        center: weight of the term that keeps the scores around 0.

    Returns:
        [prompt]; 0 for a prompt without a pair.

    Example:
        >>> bradley_terry(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[1.0, 2, 3, 4]]))
        tensor([0.2070])

    Source: Ouyang et al. 2022 (2203.02155), equation 1; margins: Llama 2 (2307.09288); centring:
    2312.09244.
    Elsewhere: TRL's RewardTrainer takes one pair a row and recomputes shared prompts.
    """
    there = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    better = (ranks[:, :, None] < ranks[:, None, :]) & there[:, :, None] & there[:, None, :]
    first, second = scores[:, :, None], scores[:, None, :]
    lead = first - second - (0 if margins is None else margins)
    pairs = torch.where(better, -F.logsigmoid(lead) + center * (first + second) ** 2, 0)
    return pairs.sum((1, 2)) / better.sum((1, 2)).clamp(min=1)


@RANKINGS.register
def plackett_luce(
    scores: Float[Tensor, "prompt answer"],
    ranks: Float[Tensor, "prompt answer"],
    valid: Bool[Tensor, "prompt answer"] | None = None,
) -> Float[Tensor, "prompt"]:
    """The likelihood of the whole order: the best is chosen first, then the best of the rest.

        L = mean over places i but the last of  log Σ_{j: rank_j ≥ rank_i} exp(s_j) − s_i

    Tied answers stay in each other's sums (Breslow's approximation). With two answers it is
    `bradley_terry`.

    Args:
        scores: s, with gradient.
        ranks: places; smaller is better, equal places are ties.
        valid: answers that are there; None: all.

    Returns:
        [prompt]; 0 for a prompt whose answers are all tied.

    Example:
        >>> plackett_luce(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0]]))
        tensor([0.3133])

    Source: Plackett 1975; Luce 1959; for preferences: 2306.17492.
    Elsewhere: allRank's listMLE is the sum over the places and breaks ties at random.
    """
    there = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    rest = (ranks[:, :, None] <= ranks[:, None, :]) & there[:, None, :]
    beaten = (ranks[:, :, None] < ranks[:, None, :]) & there[:, None, :]
    chosen = there & beaten.any(-1)
    total = torch.where(rest, scores[:, None, :], -torch.inf)
    total = torch.where(chosen[:, :, None], total, 0).logsumexp(-1)
    terms = torch.where(chosen, total - scores, 0)
    return terms.sum(-1) / chosen.sum(-1).clamp(min=1)


@RANKINGS.register
def regression(
    scores: Float[Tensor, "prompt answer"],
    targets: Float[Tensor, "prompt answer"],
    valid: Bool[Tensor, "prompt answer"] | None = None,
) -> Float[Tensor, "prompt"]:
    """Scores that should equal given numbers.

        L = mean over answers of (s − target)²

    Args:
        scores: s, with gradient.
        targets: the numbers, for example human ratings; NaN where one is missing.
        valid: answers that are there; None: all.

    Returns:
        [prompt]; 0 for a prompt without targets.

    Example:
        >>> regression(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, float("nan")]]))
        tensor([0.2500])

    Source: HelpSteer (2311.09528).
    """
    there = ~torch.isnan(targets) if valid is None else valid & ~torch.isnan(targets)
    errors = torch.where(there, (scores - torch.where(there, targets, 0)) ** 2, 0)
    return errors.sum(-1) / there.sum(-1).clamp(min=1)
