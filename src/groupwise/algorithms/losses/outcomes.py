"""The loss of a token reward model, which learns from the outcomes of completions alone."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def outcome_cross_entropy(
    scores: Float[Tensor, "batch time"],
    outcome: Float[Tensor, "batch"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch"]:
    """Binary cross-entropy of the mean token score of a completion and its outcome.

        L = −y log σ(s̄) − (1 − y) log(1 − σ(s̄)),   s̄ = mean of s_t

    Args:
        scores: s_t, with gradient.
        outcome: y, 1 for a right completion and 0 for a wrong one.
        mask: True where the policy wrote the token; a completion without such tokens has s̄ = 0.

    Returns:
        [batch] ≥ 0.

    Example:
        >>> mask = torch.tensor([[True, True]])
        >>> outcome_cross_entropy(torch.tensor([[1.0, -1.0]]), torch.tensor([1.0]), mask)
        tensor([0.6931])

    Source: OREAL (2502.06781), token reward model.
    """
    found = token_mean(scores, mask)
    return binary_cross_entropy_with_logits(found, outcome.to(found), reduction="none")


def token_mean(
    scores: Float[Tensor, "*batch time"], mask: Bool[Tensor, "*batch time"]
) -> Float[Tensor, "*batch"]:
    """The mean of the scores under the mask, 0 where it is empty.

    Example:
        >>> token_mean(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([1.5000])
    """
    return torch.where(mask, scores, 0).sum(-1) / mask.sum(-1).clamp(min=1)
