"""Matrix products on a CPU by oneDNN.

PyTorch gives float32 products to MKL, which is slow where one factor has few rows, as in a decoding
step, and slower still on processors that are not Intel's. oneDNN comes with PyTorch as well. On two
cores of an AMD EPYC (GFLOP/s, float32; rows × inputs → outputs):

    rows x weight         MKL   oneDNN   oneDNN, weight reordered beforehand
    8 x 896 → 4864         59      103      207
    64 x 512 → 1536       138      183      219
    64 x 512 → 32000       94      162      207

Reordering takes a copy of the weight, which pays in a rollout, where every weight is used
hundreds of times before it changes.

oneDNN compiles a kernel for every number of rows that it meets: half a millisecond and half a
megabyte, of which it keeps 1,024. So it is only used for numbers of rows that recur, and not for
the layers of an update, where no two microbatches have the same number of tokens. Where there is a
compiler, float32 layers use the products of `cpu.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from groupwise.kernels.interface import COPY_LIMIT
from groupwise.kernels.reference import is_plain_linear

SMALLEST = 2**16
"""Smaller weights gain nothing from oneDNN."""
ROWS = 16
"""oneDNN gets only products whose number of rows is a multiple of this."""

Forward = Callable[[Tensor], Tensor]


@cache
def dtypes() -> frozenset[torch.dtype]:
    """The dtypes that oneDNN multiplies on this machine."""
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return frozenset()
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if bf16 else {torch.float32})


class ReorderedLinear:
    """A matrix reordered for oneDNN. Records no gradient.

    Args:
        rows: approximate number of rows of a product.
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
        whole = pad_rows(x)
        out = torch.ops.mkldnn._linear_pointwise(whole, self.weight, self.bias, "none", [], "")
        return out[: len(x)]


class reordered_layers:
    """Re-entrant context manager in which linear layers on a CPU compute with reordered copies of
    their weights, wherever no gradient is recorded.

    The copies are made at once and do not follow the weights. Layers that are not plain (quantised,
    wrapped by an adapter), small ones, and those beyond the first 2 GiB of weights are left alone.

    Args:
        rows: the most that a product has; more, as those of a prompt, are left to PyTorch.
    """

    def __init__(self, model: nn.Module, *, rows: int) -> None:
        self._forwards = {layer: _forward(layer, rows=rows) for layer in copied_layers(model)}

    def __enter__(self) -> None:
        for layer, forward in self._forwards.items():
            layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *error: object) -> None:
        for layer in self._forwards:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, *, rows: int) -> Forward:
    own, reordered = layer.forward, ReorderedLinear(layer.weight, layer.bias, rows=rows)

    def forward(x: Tensor) -> Tensor:
        given = x.shape[:-1].numel()
        if torch.is_grad_enabled() or x.dtype != reordered.weight.dtype or given > rows:
            return own(x)
        out = reordered(x.reshape(given, x.shape[-1]))
        return out.view(*x.shape[:-1], layer.out_features)

    return forward


def pad_rows(values: Shaped[Tensor, "rows *rest"]) -> Shaped[Tensor, "padded *rest"]:
    """Rows of zeros appended up to the next number that is worth a kernel: a multiple of 16, and
    beyond 128 rows one of eight numbers between a power of two and the next."""
    rows = len(values)
    step = max(ROWS, 1 << max(0, (rows - 1).bit_length() - 4))
    missing = -rows % step
    if not missing:  # `pad` would copy even where nothing is appended.
        return values
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))


def copied_layers(
    model: nn.Module, *, without: Collection[nn.Module] = frozenset()
) -> list[nn.Linear]:
    """The layers of whose weights `reordered_layers` makes copies."""
    room, found = COPY_LIMIT, []
    for layer in large_layers(model, dtypes()):
        if layer not in without and layer.weight.nbytes <= room:
            room -= layer.weight.nbytes
            found.append(layer)
    return found


def large_layers(model: nn.Module, dtypes: Collection[torch.dtype]) -> list[nn.Linear]:
    """Linear layers that are worth a copy."""
    return [
        layer
        for layer in model.modules()
        if is_plain_linear(layer)
        and layer.weight.dtype in dtypes
        and layer.weight.numel() >= SMALLEST
    ]
