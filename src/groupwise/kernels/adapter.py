"""The products of a low-rank adapter, added to those of the layer that it adapts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.kernels.interface import active

BLOCK = 256
"""Rows that are computed at once on a CPU, whose caches hold their float32 copies."""


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
    and output, of which autograd keeps one. Here blocks of rows are converted as they are needed,
    and only x is kept.
    """
    apply: Any = _AddLowRank.apply
    return apply(base, x, a, b, scaling)


def _blocks(x: Tensor) -> Iterator[slice]:
    """The rows of a matrix in blocks."""
    size = BLOCK if x.device.type == "cpu" else max(1, len(x))
    return (slice(first, first + size) for first in range(0, len(x), size))


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        out = torch.empty_like(base, memory_format=torch.contiguous_format)
        rows, flat, summed = base.flatten(0, -2), x.flatten(0, -2), out.view(-1, out.shape[-1])
        inner = a.new_empty(len(flat), len(a))
        for part in _blocks(flat):
            inner[part] = active().matmul(flat[part].to(a.dtype), a.t())
            summed[part] = active().matmul(inner[part], b.t()).mul_(scaling).add_(rows[part])
        ctx.save_for_backward(x, inner, a, b)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (x, inner, a, b) = grads, ctx.saved_tensors
        rows, flat = grad.flatten(0, -2), x.flatten(0, -2)
        dx = torch.empty_like(flat) if ctx.needs_input_grad[1] else None
        da: Tensor | None = None
        db: Tensor | None = None
        for part in _blocks(flat):
            own = rows[part].to(b.dtype) * ctx.scaling
            between = active().matmul(own, b)
            db = active().add_matmul(db, own.t(), inner[part])
            da = active().add_matmul(da, between.t(), flat[part].to(a.dtype))
            if dx is not None:
                dx[part] = active().matmul(between, a)
        return grad, None if dx is None else dx.view_as(x), da, db, None
