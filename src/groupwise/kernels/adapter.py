"""The products of a low-rank adapter, added to those of the layer that it adapts."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.kernels.interface import active


def add_low_rank(
    base: Float[Tensor, "*rows outputs"],
    x: Float[Tensor, "*rows inputs"],
    a: Float[Tensor, "rank inputs"],
    b: Float[Tensor, "outputs rank"],
    *,
    scaling: float,
) -> Float[Tensor, "*rows outputs"]:
    """base + scaling · (x · aᵀ) · bᵀ, computed in the dtype of a and b and returned in that of
    base; differentiable.

    As layers of their own, the products of a float32 adapter take four copies of each 16-bit input
    and output, of which autograd keeps one. Here a few rows are converted as they are needed, and
    only x is kept.
    """
    apply: Any = _AddLowRank.apply
    return apply(base, x, a, b, scaling)


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        rows, onto = x.flatten(0, -2), base.flatten(0, -2)
        out, inner = active().low_rank(rows, a, b, onto=onto, scaling=scaling)
        ctx.save_for_backward(x, inner, a, b)
        ctx.scaling = scaling
        return out.view(base.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (x, inner, a, b), scaling = grads, ctx.saved_tensors, ctx.scaling
        rows, flat, kernels = grad.flatten(0, -2), x.flatten(0, -2), active()
        dx, between = kernels.low_rank(rows, b.t(), a.t(), onto=None, scaling=scaling)
        da = kernels.low_rank_gradient(between, flat, scaling=scaling)
        db = kernels.low_rank_gradient(inner, rows, scaling=scaling).t()
        dx = dx.view(x.shape).to(x.dtype) if ctx.needs_input_grad[1] else None
        return grad, dx, da, db, None
