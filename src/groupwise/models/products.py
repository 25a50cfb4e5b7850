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

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


class laid_out_weights:
    """Inside the block, which may be entered again and again, linear layers on a CPU compute with
    copies of their weights that are laid out for oneDNN, wherever no gradient is recorded.

    The copies are made at once, and do not follow the weights. After a block, layers are as before.
    Layers that are not plain (quantised, an adapter's own wrapper) and small ones stay what they
    are, and so do those beyond the first 2 GiB of weights.

    Args:
        rows: that a product will have, about; decides the layout, not the result.
    """

    def __init__(self, model: nn.Module, *, rows: int) -> None:
        self._forwards = {layer: _laid_out(layer, rows=rows) for layer in laid_out_layers(model)}
        self._block: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._block = _computing(self._forwards)
        self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


def _laid_out(layer: nn.Linear, *, rows: int) -> Forward:
    plain, bias = layer.forward, layer.bias
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != weight.dtype:
            return plain(x)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward


def laid_out_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers of whose weights `laid_out_weights` makes copies, as large as they are."""
    room, found = ROOM, []
    for layer in _large_layers(model, types=_types()):
        if layer.weight.nbytes <= room:
            room -= layer.weight.nbytes
            found.append(layer)
    return found


@contextmanager
def differentiable_products(model: nn.Module) -> Iterator[None]:
    """Inside the block, float32 linear layers on a CPU compute by oneDNN, gradients included.

    In 16 bits PyTorch does so by itself.
    """

    def forward(layer: nn.Linear) -> Forward:
        plain = layer.forward

        def forward(x: Tensor) -> Tensor:
            if x.dtype != layer.weight.dtype:
                return plain(x)
            return _Linear.apply(x, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]

        return forward

    layers = _large_layers(model, types=_types() & {torch.float32})
    with _computing({layer: forward(layer) for layer in layers}):
        yield


class _Linear(torch.autograd.Function):
    """x · Wᵀ + b. The gradient of the weight is PyTorch's product: oneDNN's is no faster there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        want_x, want_weight, _ = ctx.needs_input_grad
        # Under an adapter the weights are frozen: what only their gradient needs is not held.
        ctx.save_for_backward(x if want_weight else None, weight if want_x else None)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        return (
            None
            if weight is None
            else product(grad, weight.t()).view(*grads[0].shape[:-1], weight.shape[1]),
            None if x is None else grad.t() @ x.reshape(-1, x.shape[-1]),
            grad.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _large_layers(model: nn.Module, *, types: frozenset[torch.dtype]) -> Iterator[nn.Linear]:
    """Plain linear layers on a CPU that are worth it."""
    for layer in model.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            weight = layer.weight
            plain = not is_traceable_wrapper_subclass(weight)  # as those of torchao are
            known = weight.device.type == "cpu" and weight.dtype in types
            if plain and known and weight.numel() >= SMALLEST:
                yield layer


@contextmanager
def _computing(forwards: Mapping[nn.Linear, Forward]) -> Iterator[None]:
    """Inside the block, layers have another forward pass."""
    try:
        for layer, forward in forwards.items():
            layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        for layer in forwards:
            vars(layer).pop("forward", None)
