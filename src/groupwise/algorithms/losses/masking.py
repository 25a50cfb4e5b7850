"""Values on the tokens of the policy alone."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LARGEST_EXPONENT = 20.0


def apply_mask(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """The values where `mask` is True, 0 elsewhere, with no gradient from elsewhere."""
    return torch.where(mask, values, 0)


def bounded_exp(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp of values held within ±20, so that neither it nor its gradient overflows."""
    return values.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()


def row_sum(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch 1"]:
    """Sum over the tokens of each row."""
    return apply_mask(values, mask).sum(-1, keepdim=True)


def row_mean(
    values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch 1"]:
    """Mean over the tokens of each row; 0 for a row of none."""
    return row_sum(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1)
