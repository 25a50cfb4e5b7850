"""Rewards after the KL penalty."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def penalised(
    rewards: Float[Tensor, "prompt group"],
    kl: Float[Tensor, "prompt group time"],
    mask: Bool[Tensor, "prompt group time"] | None = None,
    *,
    coefficient: float,
) -> Float[Tensor, "prompt group"]:
    """Rewards minus the KL penalty of the whole answer.

        r_i − β Σ_t k1_{i,t},   k1 = logp − ref_logp

    Used this way k1 gives the gradient of −β·KL(π‖π_ref); as a term of the loss its expected
    gradient would be 0.

    Args:
        rewards: [prompt, group]; NaN stays NaN.
        kl: k1 of every token, in nats; anything where `mask` is False.
        mask: True where the policy wrote the token; None counts every token.
        coefficient: β.

    Returns:
        Rewards of the same shape and dtype.

    Example:
        >>> logp, ref = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([-1.2, -0.4, -2.5])
        >>> penalised(torch.tensor([[1.0]]), (logp - ref)[None, None], coefficient=0.1)
        tensor([[0.9400]])

    Source: Ouyang et al. 2022 (2203.02155), equation 2.
    Elsewhere: verl and OpenRLHF spread the penalty over the tokens, which is the same for
    advantages that are sums over the answer; TRL's GRPO puts k3 into the loss instead.
    """
    counted = kl if mask is None else torch.where(mask, kl, 0)
    return rewards - coefficient * counted.sum(-1)
