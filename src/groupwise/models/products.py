"""Matrix products of a CPU, computed by oneDNN.

PyTorch gives float32 products to MKL, which is slow where one factor has few rows, as in a decoding
step, and slower still on processors that are not Intel's. oneDNN comes with PyTorch as well. On two
cores of an AMD EPYC (GFLOP/s, float32; rows × inputs → outputs):

    rows x weight         MKL   oneDNN   oneDNN, weight laid out beforehand
    8 x 896 → 4864         59      103      207
    64 x 512 → 1536       138      183      219
    64 x 512 → 32000       94      162      207
    2048 x 512 → 1536     200      216      216

Laying a weight out takes a copy of it, which pays in a rollout, where every weight is used
hundreds of times before it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SMALLEST = 2**16
"""Weights of fewer entries are as fast without."""
ROOM = 2 * 2**30
"""Bytes of weights that are laid out at most; a fixed number, so that a run computes the same on
every machine with the same processor."""

Forward = Callable[[Tensor], Tensor]


@cache
def _types() -> frozenset[torch.dtype]:
    """What oneDNN multiplies on this machine."""
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return frozenset()
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if bf16 else {torch.float32})


def product(
    left: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "rows outputs"]:
    """left · weightᵀ; by oneDNN where no gradient is recorded, as inside an `autograd.Function`."""
    recorded = torch.is_grad_enabled() and (left.requires_grad or weight.requires_grad)
    fast = (
        not recorded
        and left.device.type == "cpu"
        and left.dtype == weight.dtype
        and left.dtype in _types()
        and weight.numel() >= SMALLEST
    )
    if not fast:
        return left @ weight.t()
    return torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")


@contextmanager
def laid_out_weights(model: torch.nn.Module, *, rows: int) -> Iterator[None]:
    """Inside the block, linear layers on a CPU compute with copies of their weights that are laid
    out for oneDNN, wherever no gradient is recorded.

    The weights must not change inside the block; layers are as before after it. Layers that are
    not plain (quantised, an adapter's own wrapper) and small ones stay what they are, and so do
    those beyond the first 2 GiB of weights.

    Args:
        rows: that a product will have, about; decides the layout, not the result.
    """
    room = ROOM

    def forward(layer: torch.nn.Linear) -> Forward | None:
        nonlocal room
        weight, plain = layer.weight.detach(), layer.forward
        size = weight.numel() * weight.element_size()
        if size > room:
            return None
        room -= size
        bias = None if layer.bias is None else layer.bias.detach()
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

        def forward(x: Tensor) -> Tensor:
            if torch.is_grad_enabled() or x.dtype != laid_out.dtype:
                return plain(x)
            return torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")

        return forward

    with _computing(model, forward, types=_types()):
        yield


@contextmanager
def differentiable_products(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, float32 linear layers on a CPU compute by oneDNN, gradients included.

    In 16 bits PyTorch does so by itself.
    """

    def forward(layer: torch.nn.Linear) -> Forward:
        return lambda x: _Linear.apply(x, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]

    with _computing(model, forward, types=_types() & {torch.float32}):
        yield


class _Linear(torch.autograd.Function):
    """x · Wᵀ + b. The gradient of the weight is PyTorch's product: oneDNN's is no faster there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        want_x, want_weight, want_bias = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)
        return (
            product(grad, weight.t()).view_as(x) if want_x else None,
            grad.t() @ x.flatten(0, -2) if want_weight else None,
            grad.sum(0) if want_bias else None,
        )


@contextmanager
def _computing(
    model: torch.nn.Module,
    forward: Callable[[torch.nn.Linear], Forward | None],
    *,
    types: frozenset[torch.dtype],
) -> Iterator[None]:
    """Inside the block, plain linear layers on a CPU that are large enough have another forward
    pass."""
    changed: list[torch.nn.Linear] = []
    try:
        for layer in model.modules():
            if type(layer) is not torch.nn.Linear or "forward" in vars(layer):
                continue
            weight = layer.weight
            known = weight.device.type == "cpu" and weight.dtype in types
            if known and weight.numel() >= SMALLEST:
                other = forward(layer)
                if other is not None:
                    changed.append(layer)
                    layer.forward = other  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        for layer in changed:
            del layer.forward
