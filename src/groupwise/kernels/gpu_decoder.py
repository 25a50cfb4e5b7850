"""A Llama-like decoder on a GPU: PyTorch's products with the model's own weights, and kernels in
Triton between them. A layer is 12 launches; in `transformers` it is some 45. States are
rounded where `transformers` rounds them.

    x ← x + attend(rotate(q), rotate(k), v) Woᵀ      q, k, v = norm(x) Wᵀ + b
    x ← x + (silu(h Wgateᵀ) · h Wupᵀ) Wdownᵀ         h = norm(x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.kernels.gpu import add_norm, rms_norm, rotate, swiglu
from groupwise.kernels.interface import Affine, DecoderLayer, Norm
from groupwise.kernels.reference import Reference


class GpuDecoder:
    """Implements `Decoder`. Weights are not copied, so later changes in place are followed.

    Args:
        layers, norm, head: the weights, on a GPU and of one dtype.
        rotation: cosines and sines of every position, [positions, dim].

    Raises:
        ValueError: the rotation is of another size than the heads.
    """

    batch_invariant = False
    """Libraries choose another product for another number of rows."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        norm: Norm,
        rotation: tuple[Tensor, Tensor],
        head: Affine | None,
    ) -> None:
        self.layers, self.norm, self.of_head = layers, norm, head
        cos, sin = rotation
        if any(layer.dim != cos.shape[1] for layer in layers):
            raise ValueError("the rotation must have the size of the heads")
        self.rotation = cos.contiguous(), sin.contiguous()

    @torch.no_grad()
    def hidden(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        first = self.layers[0].before
        normed = rms_norm(x, first.weight, first.eps)
        after = [*(layer.before for layer in self.layers[1:]), self.norm]
        for index, (layer, norm) in enumerate(zip(self.layers, after, strict=True)):
            attended = self._attended(layer, index, normed, positions, attend)
            x, normed = add_norm(x, _product(attended, layer.out), layer.between)
            gated = swiglu(_product(normed, layer.gate), _product(normed, layer.up))
            x, normed = add_norm(x, _product(gated, layer.down), norm)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        assert self.of_head is not None, "made without a head"
        return _product(hidden, self.of_head)

    def _attended(
        self,
        layer: DecoderLayer,
        index: int,
        normed: Tensor,
        positions: Tensor,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        """[tokens, heads · dim]"""
        query, key, value = (
            _product(normed, each).unflatten(1, (-1, layer.dim))
            for each in (layer.query, layer.key, layer.value)
        )
        if layer.heads is not None:
            query, key = (
                rms_norm(each, norm.weight, norm.eps)
                for each, norm in zip((query, key), layer.heads, strict=True)
            )
        rotate(query, key, positions, self.rotation)
        return attend(
            index, query, key, value,
            scaling=layer.scaling, window=layer.window, softcap=layer.softcap,
        ).flatten(1)  # fmt: skip


def _product(x: Tensor, affine: Affine) -> Tensor:
    """x Wᵀ + bias, and what an adapter adds."""
    weight, bias, added = affine
    assert isinstance(weight, Tensor), "weights in 4 bits are read on a CPU only"
    out = F.linear(x, weight, bias)
    if added is not None:
        out, _ = Reference().low_rank(x, added.a, added.b, onto=out, scaling=added.scaling)
    return out
