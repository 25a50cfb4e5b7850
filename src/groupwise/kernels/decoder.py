"""A Llama-like decoder on a CPU in C++ (`cpp/layer.cpp`), in float32 or bfloat16, with weights of
that dtype or of 4 bits: a decoding step is one call, and other layers are two with attention in
between; in `transformers` a layer is some 65 operations.

Query, key and value are one product, gate and up are one, and the activation and the residual are
computed by the products that they follow.

    [q k v] = norm(x) Wqkvᵀ + b,    x ← x + attend(rotate(q), rotate(k), v) Woᵀ
    h = norm(x),                    x ← x + (silu(h Wgateᵀ) · h Wupᵀ) Wdownᵀ
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.kernels import structures
from groupwise.kernels.cpu import LANES, rms_norm, typed
from groupwise.kernels.decoding import cache_structure, places_structure
from groupwise.kernels.four_bits import FourBits
from groupwise.kernels.interface import (
    Affine,
    DecoderLayer,
    DecodeRows,
    LayerCache,
    LowRank,
    Norm,
)
from groupwise.kernels.packed import PackedLinear
from groupwise.kernels.structures import require


class CpuDecoder:
    """Implements `Decoder` with copies of the weights, which do not follow later changes.

    Args:
        layers, norm, head: the weights, on a CPU, in a dtype that kernels multiply.
        rotation: cosines and sines of every position, [positions, dim].

    Raises:
        ValueError: sizes or dtypes do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        norm: Norm,
        rotation: tuple[Tensor, Tensor],
        head: Affine | None,
    ) -> None:
        self.norm, self.positions = _copied(norm), len(rotation[0])
        self.dtype = norm.weight.dtype
        signed = _signed(rotation)
        self.layers = [_Layer(layer, signed) for layer in layers]
        structs = (layer.structure for layer in self.layers)
        self.structure = (structures.Layer * len(self.layers))(*structs)
        self.attends = all(layer.attends for layer in self.layers)
        self.caches: dict[int, LayerCache] | None = None
        self.packed_head = None if head is None else PackedLinear(*head)

    def hidden(self, x: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x, positions = x.contiguous(), positions.contiguous()
        # A model may have been moved since, and its embeddings may have a hook.
        require((x.dtype, x.device.type) == (self.dtype, "cpu"), f"states must be {self.dtype}")
        require(
            x.shape == (len(positions), self.layers[0].hidden),
            "there must be a state of the model's size per position",
        )
        require(positions.dtype == torch.int64, "positions must be int64")
        first, last = torch.aminmax(positions)
        require(0 <= int(first) and int(last) < self.positions, "positions exceed the rotation")
        rows = _decode_rows(attend)
        if rows is not None and self.attends:
            x = self._decoded(x, positions, rows)
        else:
            for index, layer in enumerate(self.layers):
                x = layer(x, index, positions, attend)
        return rms_norm(x, self.norm.weight, self.norm.eps)

    @property
    def batch_invariant(self) -> bool:
        return self.attends

    def head(self, hidden: Tensor) -> Tensor:
        assert self.packed_head is not None, "made without a head"
        return self.packed_head(hidden)

    def _decoded(self, x: Tensor, positions: Tensor, rows: DecodeRows) -> Tensor:
        """States after all layers."""
        if self.caches is not rows.cache.layers:
            self._attend_to(rows.cache.layers)
        x, places = x.clone(), places_structure(rows)
        require(places.rows == len(x), "states must be as many as rows")
        if typed("decode", x)(
            ctypes.addressof(self.structure), len(self.layers), ctypes.addressof(places),
            positions.data_ptr(), x.data_ptr(), torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError(f"a decoding step of {len(x)} rows: out of memory")
        return x

    def _attend_to(self, caches: dict[int, LayerCache]) -> None:
        self.caches = None  # if these are refused, the structures point to no cache
        for index, (layer, structure) in enumerate(zip(self.layers, self.structure, strict=True)):
            structure.cache = cache = cache_structure(caches[index])
            require(
                (cache.key_heads, cache.dim) == (layer.key_heads, layer.dim)
                and all(x.dtype == self.dtype for x in caches[index].tensors()),
                "keys and values must have the heads and the dtype of the layer",
            )
        self.caches = caches


class _Layer:
    """One layer: packed weights, and the structure that points to them."""

    def __init__(self, layer: DecoderLayer, rotation: tuple[Tensor, Tensor]) -> None:
        self.call = {name: getattr(layer, name) for name in ("scaling", "window", "softcap")}
        joined = (layer.query, layer.key, layer.value)
        self.products = (
            PackedLinear(*_joined(joined)),
            PackedLinear(*layer.out),
            PackedLinear(*layer.up, gate=layer.gate),
            PackedLinear(*layer.down),
        )
        self.hidden = self.products[0].depth
        self.norms = [_copied(norm) for norm in (layer.before, layer.between, *(layer.heads or ()))]
        self.rotation, self.dim = rotation, layer.dim
        self.heads, self.key_heads = (each.weight.shape[0] // self.dim for each in joined[:2])
        self._require_sizes()
        self.structure = structures.Layer(
            *(product.structure() for product in self.products),
            *(structures.Norm(norm.weight.data_ptr(), norm.eps) for norm in self.norms),
            heads=self.heads,
            key_heads=self.key_heads,
            dim=self.dim,
            window=layer.window or 0,
            scaling=layer.scaling,
        )
        self.attends = layer.softcap is None and self.dim % LANES == 0
        self.structure.cos, self.structure.sin = (x.data_ptr() for x in rotation)

    def _require_sizes(self) -> None:
        """Check the sizes, because the kernels do not."""
        qkv, out, gated, down = self.products
        hidden, (before, between, *of_heads) = self.hidden, self.norms
        numbers = [*self.rotation, *(norm.weight for norm in self.norms)]
        require(
            {each.dtype for each in [*numbers, *self.products]} == {self.products[0].dtype},
            "products, norms and rotation must have one dtype",
        )
        require(
            all(len(norm.weight) == hidden for norm in (before, between))
            and all(len(norm.weight) == self.dim for norm in of_heads)
            and all(x.shape == (len(self.rotation[0]), self.dim) for x in self.rotation)
            and qkv.depth == gated.depth == out.columns == down.columns
            and qkv.columns == (self.heads + 2 * self.key_heads) * self.dim
            and out.depth == self.heads * self.dim
            and gated.columns == down.depth,
            "the sizes of a layer's parts do not fit together",
        )

    def __call__(
        self, x: Tensor, index: int, positions: Tensor, attend: Callable[..., Tensor]
    ) -> Tensor:
        qkv = x.new_empty(len(x), self.heads + 2 * self.key_heads, self.dim)
        self._compute(typed("before_attention", x), x, len(x), positions, qkv)
        query, key, value = qkv.split((self.heads, self.key_heads, self.key_heads), 1)
        attended = attend(index, query, key, value, **self.call).contiguous()
        require(
            attended.shape == query.shape and attended.dtype == x.dtype,
            "attention must keep shape and dtype of its queries",
        )
        out = torch.empty_like(x)
        self._compute(typed("after_attention", x), attended, x, len(x), out)
        return out

    def _compute(self, kernel: Any, *inputs: Tensor | int) -> None:
        values = (x if isinstance(x, int) else x.data_ptr() for x in inputs)
        threads = torch.get_num_threads()
        if kernel(ctypes.addressof(self.structure), *values, threads):
            raise MemoryError(f"a layer of {self.heads} heads: out of memory")


def _joined(layers: Sequence[Affine]) -> Affine:
    """Layers with the same inputs as one layer."""
    biases, adapters = [], []
    for weight, bias, added in layers:
        outputs, inputs = weight.shape
        biases.append(_zeros(outputs, dtype=weight.dtype) if bias is None else bias.detach())
        none = [_zeros(*size) for size in ((0, inputs), (outputs, 0))]
        adapters.append(none if added is None else (added.a, added.b * added.scaling))
    a, b = torch.cat([a for a, _ in adapters]), torch.block_diag(*(b for _, b in adapters))
    weight = _one_above_the_other([each.weight for each in layers])
    return Affine(weight, torch.cat(biases), LowRank(a=a, b=b, scaling=1.0))


def _one_above_the_other(parts: Sequence[Tensor | FourBits]) -> Tensor | FourBits:
    small = [x for x in parts if isinstance(x, FourBits)]
    whole = [x.detach() for x in parts if isinstance(x, Tensor)]
    require(not small or not whole, "query, key and value must have as many bits")
    return FourBits.joined(small) if small else torch.cat(whole)


def _zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype, device="cpu")


def _copied(norm: Norm) -> Norm:
    return Norm(weight=norm.weight.detach().clone(), eps=norm.eps)


def _signed(rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines with the sign that rotation gives each half of a head in the sines."""
    cos, sin = rotation
    half = sin.shape[-1] // 2
    return cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], 1)


def _decode_rows(attend: object) -> DecodeRows | None:
    """The rows of a decoding step; None for any other attention."""
    return attend if isinstance(attend, DecodeRows) else None
