"""Matrix products of a CPU, computed by oneDNN.

PyTorch gives float32 products to MKL, which is slow where one factor has few rows, as in a decoding
step, and slower still on processors that are not Intel's. oneDNN comes with PyTorch as well. On two
cores of an AMD EPYC (GFLOP/s, float32; rows × inputs → outputs):

    rows x weight         MKL   oneDNN   oneDNN, weight laid out beforehand
    8 x 896 → 4864         59      103      207
    64 x 512 → 1536       138      183      219
    64 x 512 → 32000       94      162      207

Laying a weight out takes a copy of it, which pays in a rollout, where every weight is used
hundreds of times before it changes.

oneDNN compiles a kernel for every number of rows that it meets: half a millisecond and half a
megabyte, each kept until 1,024 of them are. So it is only given numbers of rows that come back,
and not the layers of an update, where no two microbatches have the same number of tokens. Where
there is a compiler, float32 layers have products of our own instead (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeGuard

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SMALLEST = 2**16
"""Weights of fewer entries are as fast without."""
ROWS = 16
"""Only multiples of so many rows are given to oneDNN."""
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
    """left · weightᵀ; by oneDNN where no gradient is recorded, as in an `autograd.Function`, and
    the rows are a multiple of 16."""
    recorded = torch.is_grad_enabled() and (left.requires_grad or weight.requires_grad)
    fast = (
        not recorded
        and len(left) % ROWS == 0
        and left.device.type == "cpu"
        and left.dtype == weight.dtype
        and left.dtype in _types()
        and weight.numel() >= SMALLEST
    )
    if not fast:
        return left @ weight.t()
    return torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")


class LaidOut:
    """A matrix laid out for oneDNN. Records no gradient.

    Args:
        rows: how many a product has, about.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs inputs"],
        bias: Float[Tensor, "outputs"] | None,
        *,
        rows: int,
    ) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """x · Wᵀ + bias."""
        whole = padded(x)
        out = torch.ops.mkldnn._linear_pointwise(whole, self.weight, self.bias, "none", [], "")
        return out[: len(x)]


class laid_out_weights:
    """Inside the block, which may be entered again and again, linear layers on a CPU compute with
    copies of their weights that are laid out for oneDNN, wherever no gradient is recorded.

    The copies are made at once, and do not follow the weights. After a block, layers are as before.
    Layers that are not plain (quantised, an adapter's own wrapper) and small ones stay what they
    are, and so do those beyond the first 2 GiB of weights.

    Args:
        rows: the most that a product has; more, as those of a prompt, are left to PyTorch.
    """

    def __init__(self, model: nn.Module, *, rows: int) -> None:
        self._forwards = {layer: _forward(layer, rows=rows) for layer in laid_out_layers(model)}

    def __enter__(self) -> None:
        for layer, forward in self._forwards.items():
            layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *error: object) -> None:
        for layer in self._forwards:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, *, rows: int) -> Forward:
    own, laid_out = layer.forward, LaidOut(layer.weight, layer.bias, rows=rows)

    def forward(x: Tensor) -> Tensor:
        given = x.shape[:-1].numel()
        if torch.is_grad_enabled() or x.dtype != laid_out.weight.dtype or given > rows:
            return own(x)
        out = laid_out(x.reshape(given, x.shape[-1]))
        return out.view(*x.shape[:-1], layer.out_features)

    return forward


def padded(values: Shaped[Tensor, "rows *rest"]) -> Shaped[Tensor, "padded *rest"]:
    """Rows of zeros added up to the next number that is worth a kernel: a multiple of 16, and
    beyond 128 rows eight numbers between a power of two and the next."""
    rows = len(values)
    step = max(ROWS, 1 << max(0, (rows - 1).bit_length() - 4))
    missing = -rows % step
    if not missing:  # `pad` would make a copy all the same.
        return values
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))


def laid_out_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers of whose weights `laid_out_weights` makes copies, as large as they are."""
    room, found = ROOM, []
    for layer in model.modules():
        if plain(layer) and layer.weight.numel() >= SMALLEST and layer.weight.nbytes <= room:
            room -= layer.weight.nbytes
            found.append(layer)
    return found


def plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is x · Wᵀ + bias and nothing else, with weights that oneDNN can lay out."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not is_traceable_wrapper_subclass(layer.weight)  # as those of torchao are
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in _types()
    )
