"""The linear layer of a float32 adapter, which keeps its 16-bit input instead of a float32 copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class AdapterLinear(nn.Linear):
    """x · Wᵀ in the dtype of W, whatever the dtype of x; for weights without bias.

    The gradient of W needs x. A copy of x in the dtype of W, which autograd would keep for that, is
    twice the size of a 16-bit x; here the backward pass recomputes it.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        apply: Any = _Product.apply
        return apply(input, self.weight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad
        rows, wide = grad.flatten(0, -2), x.flatten(0, -2).to(weight.dtype)
        return (
            (rows @ weight).view_as(x).to(x.dtype) if want_x else None,
            rows.t() @ wide if want_weight else None,
        )
