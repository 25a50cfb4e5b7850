"""Advantages from a teacher that scores the student's own tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import judged, mean
from groupwise.errors import UsageError


@ADVANTAGES.register
def distilled(
    rewards: Float[Tensor, "prompt group"],
    teacher_gap: Float[Tensor, "prompt group time"],
    mask: Bool[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    reward_weight: float = 0.0,
) -> Float[Tensor, "prompt group time"]:
    """On-policy distillation: how much likelier the teacher finds a token than the student.

        A_t = (log π_T − log π)_t + reward_weight · (r − mean(r))

    The expectation of the first term's gradient is −∇KL(π‖π_T) for the token alone, the tokens
    before it given: a sampled token counts for itself, not for what follows it. It needs no
    rewards; where a group's are all equal, only the second term is 0.

    Args:
        rewards: [prompt, group].
        teacher_gap: log-probability of each token under the teacher minus that under the policy.
        mask: True where the policy wrote the token.
        valid: judged; None: every reward that is not NaN.
        reward_weight: weight of the centred reward; at least 0.

    Returns:
        [prompt, group, time]; 0 on tokens outside `mask` and on samples not judged.

    Raises:
        UsageError: a negative reward_weight.

    Example:
        >>> gap = torch.tensor([[[-0.5, 0.25]]])
        >>> distilled(torch.zeros(1, 1), gap, torch.ones(1, 1, 2, dtype=torch.bool))
        tensor([[[-0.5000,  0.2500]]])

    Source: Agarwal et al. 2024 (2306.13649) for learning on the student's samples; Lu 2025,
    "On-policy distillation", for the policy-gradient form.
    Elsewhere: TRL's DistillationTrainer and verl compute the divergence over the vocabulary, or the
    teacher's top-k, instead of at the sampled token; so does `distillation.top_k`, with gaps of 0.
    """
    if not reward_weight >= 0:
        raise UsageError(f"reward_weight = {reward_weight!r}: must be at least 0.")
    r, v = judged(rewards, valid)
    counted = mask & v[..., None]
    centred = torch.where(v, r - mean(r, v), 0)
    return torch.where(counted, teacher_gap.to(r.dtype) + reward_weight * centred[..., None], 0)
