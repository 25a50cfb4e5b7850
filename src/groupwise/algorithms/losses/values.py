"""Losses of a critic: one value per token, from predicted values and returns."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.statistics import require_positive
from groupwise.registry import Registry

VALUE_LOSSES = Registry("value_loss", ("values", "old_values", "returns", "mask"))


@VALUE_LOSSES.register
def squared(
    values: Float[Tensor, "batch time"],
    returns: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Half the squared error.

        L_t = (V_t − R_t)² / 2

    Args:
        values: V_t, with gradient.
        returns: R_t.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time] ≥ 0; 0 outside the mask.

    Example:
        >>> squared(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.tensor([[True]]))
        tensor([[0.1250]])

    Source: PPO (1707.06347), equation 9.
    """
    return torch.where(mask, values - returns, 0) ** 2 / 2


@VALUE_LOSSES.register
def clipped(
    values: Float[Tensor, "batch time"],
    old_values: Float[Tensor, "batch time"],
    returns: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    clip: float = 0.2,
) -> Float[Tensor, "batch time"]:
    """The larger of the squared error and that of the value held near its old one.

        L_t = max( (V_t − R_t)², (clamp(V_t, V_old ± clip) − R_t)² ) / 2

    Args:
        values: V_t, with gradient.
        old_values: V_old, predicted before the first update on this batch.
        returns: R_t.
        mask: True where the policy wrote the token.
        clip: how far V may move before its gradient ends; greater than 0.

    Returns:
        [batch, time] ≥ 0; 0 outside the mask.

    Raises:
        UsageError: clip not greater than 0.

    Example:
        >>> v, old = torch.tensor([[0.5, 0.55, 0.6]]), torch.tensor([[0.2, 0.5, 0.7]])
        >>> clipped(v, old, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
        tensor([[0.1800, 0.1012, 0.0800]])

    Source: the PPO implementation of OpenAI Baselines.
    Elsewhere: verl's default range is 0.5; Open-Reasoner-Zero takes the squared error.
    """
    require_positive("clip", clip)
    free = torch.where(mask, values - returns, 0)
    moved = torch.where(mask, values - old_values, 0).clamp(-clip, clip)
    held = torch.where(mask, old_values + moved - returns, 0)
    return torch.maximum(free**2, held**2) / 2


def explained_variance(
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> float:
    """How much of the variance of the returns the values explain.

        EV = 1 − Var(R − V) / Var(R)

    Returns:
        At most 1; 0 for a constant, below 0 for worse than that, NaN where the returns are all
        equal up to rounding.

    Example:
        >>> returns = torch.tensor([0.0, 1.0])
        >>> explained_variance(torch.tensor([0.25, 0.75]), returns, torch.ones(2) > 0)
        0.75
    """
    r, error = returns[mask].double(), (returns - values)[mask].double()
    spread = float(r.var(correction=0)) if r.numel() else 0.0
    if not differ(spread, float(r.square().mean())):
        return float("nan")
    return 1 - float(error.var(correction=0)) / spread


def differ(variance: float, mean_square: float) -> bool:
    """Whether float32 returns with this variance and mean square differ by more than rounding.

    Returns are sums of rewards and values, so those of answers with one reward are equal only up to
    the last bits.

    Example:
        >>> differ(1e-15, 1.0), differ(1e-6, 1.0)
        (False, True)
    """
    return variance > (8 * torch.finfo(torch.float32).eps) ** 2 * mean_square
