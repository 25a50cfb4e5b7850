"""The most common kind of model for rollouts on a CPU: a decoding step is one call, and other
layers are three, of which the one in the middle is attention; of `transformers` a layer is some 65
operations.

`transformers` writes a layer for the reader; here the same layer is written for the machine
(`cpp/layer.cpp`): query, key and value are one product, gate and up are one, and the activation and
the residual are computed by the products that they follow.

    [q k v] = norm(x) Wqkvᵀ + b,    x ← x + attend(rotate(q), rotate(k), v) Woᵀ
    h = norm(x),                    x ← x + (silu(h Wgateᵀ) · h Wupᵀ) Wdownᵀ

So Llama, Mistral, Qwen2 and Qwen3 are made, and many after them. No list of names says which: a
model that has these parts is tried, and is computed in this way only where that gives the hidden
states that its own layers give.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from groupwise.kernels.cpu import (
    LANES,
    GivenLinear,
    Linear,
    compiled,
    library,
    require,
    rms_norm,
)
from groupwise.kernels.decoding import GivenCache, LayerCache, Rows
from groupwise.kernels.onednn import ROOM, plain
from groupwise.models.attention import Attend
from groupwise.models.backbone import Backbone, TwoRows

Calls = dict[int, dict[str, Any]]
"""How every layer calls its attention: scaling, window, soft cap."""
LATE = 2**16
"""The latest position of a trial."""


class FusedBackbone:
    """A `Backbone` for rollouts on a CPU. Records no gradient.

    Matrices are copied when it is made, and not followed.

    Args:
        backbone: of a model of which `fusible` gave the `calls`.
        positions: the longest sequence.

    """

    def __init__(self, backbone: Backbone, calls: Calls, *, positions: int) -> None:
        self.backbone, self.positions, decoder = backbone, positions, backbone.decoder
        self.norm = _Norm.of(decoder.norm)
        rotation = _rotation(decoder.rotary_emb, like=self.norm.weight, positions=positions)
        self.layers = [
            _Layer(layer, calls[index], rotation) for index, layer in enumerate(decoder.layers)
        ]
        self.given = (_GivenLayer * len(self.layers))(*(layer.given for layer in self.layers))
        self.attends = all(layer.attends for layer in self.layers)
        self.caches: dict[int, LayerCache] | None = None
        self.embed = backbone.model.get_input_embeddings()
        head = backbone.head
        fits = plain(head) and backbone.plain_head and head.weight.dtype == torch.float32
        self.head = Linear(head.weight, head.bias) if fits else None

    def hidden(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """As `Backbone.hidden`."""
        x, positions = self.embed(tokens).contiguous(), positions.contiguous()
        # A model may have been moved since, and its embeddings may have a hook.
        require((x.dtype, x.device.type) == (torch.float32, "cpu"), "other states than float32")
        require(x.shape == (len(positions), self.layers[0].hidden), "states of another size")
        require(positions.dtype == torch.int64, "positions that are not int64")
        first, last = torch.aminmax(positions)
        require(0 <= int(first) and int(last) < self.positions, "positions beyond the longest")
        if isinstance(attend, Rows) and self.attends:
            return self.norm(self._decoded(x, positions, attend))
        for index, layer in enumerate(self.layers):
            x = layer(x, index, positions, attend)
        return self.norm(x)

    def _decoded(self, x: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """States after all layers."""
        if self.caches is not rows.cache.layers:
            self._attend_to(rows.cache.layers)
        x, places = x.clone(), rows.given()
        require(places.rows == len(x), "another number of rows than of states")
        if library().decode(
            ctypes.addressof(self.given), len(self.layers), ctypes.addressof(places),
            positions.data_ptr(), x.data_ptr(), torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError(f"a decoding step of {len(x)} rows: no memory for its states")
        return x

    def _attend_to(self, caches: dict[int, LayerCache]) -> None:
        self.caches = None  # if these are refused, what kernels were told of is of no cache
        for index, (layer, given) in enumerate(zip(self.layers, self.given, strict=True)):
            given.cache = cache = caches[index].given()
            require(
                (cache.key_heads, cache.dim) == (layer.key_heads, layer.dim)
                and all(x.dtype == torch.float32 for x in caches[index].tensors()),
                "keys and values of another kind than the layer's",
            )
        self.caches = caches

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """As `Backbone.logits`."""
        if self.head is None:
            return self.backbone.logits(hidden)
        return self.backbone.finished(self.head(hidden))


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """x · weight / √(mean(x²) + ε) over the last dimension."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(weight=module.weight.detach().clone(), eps=module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def given(self) -> _GivenNorm:
        """What a kernel is told of it."""
        return _GivenNorm(self.weight.data_ptr(), self.eps)


class _GivenNorm(ctypes.Structure):
    """`Norm` of layer.cpp."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_double))


class _GivenLayer(ctypes.Structure):
    """`Layer` of layer.cpp."""

    _fields_ = (
        *((name, GivenLinear) for name in ("qkv", "out", "gated", "down")),
        *((name, _GivenNorm) for name in ("before", "between", "of_query", "of_key")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "dim", "window")),
        ("scaling", ctypes.c_double),
        ("cache", GivenCache),
    )


class _Layer:
    """One decoder layer.

    Args:
        layer: of the model.
        call: what its attention is called with.
        rotation: cosines and sines of every position, [positions, dim].

    Raises:
        ValueError: its parts have sizes that do not belong together.
    """

    def __init__(self, layer: Any, call: dict[str, Any], rotation: tuple[Tensor, Tensor]) -> None:
        linear, self.call = _linear(layer), call
        joined = [linear[name] for name in ("query", "key", "value")]
        biases = [
            each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach()
            for each in joined
        ]
        out, gate, up, down = (linear[name] for name in ("out", "gate", "up", "down"))
        self.products = (
            Linear(torch.cat([each.weight.detach() for each in joined]), torch.cat(biases)),
            Linear(out.weight, out.bias),
            Linear(up.weight, up.bias, gate=(gate.weight, gate.bias)),
            Linear(down.weight, down.bias),
        )
        self.hidden = self.products[0].depth
        self.norms = [_Norm.of(norm) for norm in _norms(layer)]
        self.rotation, self.dim = rotation, layer.self_attn.head_dim
        self.heads, self.key_heads = (len(each.weight) // self.dim for each in joined[:2])
        self._require_sizes()
        self.given = _GivenLayer(
            *(product.given() for product in self.products),
            *(norm.given() for norm in self.norms),
            heads=self.heads,
            key_heads=self.key_heads,
            dim=self.dim,
            window=call["window"] or 0,
            scaling=call["scaling"],
        )
        self.attends = call["softcap"] is None and self.dim % LANES == 0
        self.given.cos, self.given.sin = (x.data_ptr() for x in rotation)

    def _require_sizes(self) -> None:
        """The kernels look at none of them."""
        qkv, out, gated, down = self.products
        hidden, (before, between, *of_heads) = self.hidden, self.norms
        numbers = [*self.rotation, *(norm.weight for norm in self.norms)]
        require(all(x.dtype == torch.float32 for x in numbers), "other types than float32")
        require(
            all(len(norm.weight) == hidden for norm in (before, between))
            and all(len(norm.weight) == self.dim for norm in of_heads)
            and all(x.shape == (len(self.rotation[0]), self.dim) for x in self.rotation)
            and qkv.depth == gated.depth == out.columns == down.columns
            and qkv.columns == (self.heads + 2 * self.key_heads) * self.dim
            and out.depth == self.heads * self.dim
            and gated.columns == down.depth,
            "parts of a layer whose sizes do not belong together",
        )

    def __call__(self, x: Tensor, index: int, positions: Tensor, attend: Attend) -> Tensor:
        qkv = x.new_empty(len(x), self.heads + 2 * self.key_heads, self.dim)
        self._compute("before_attention", x, len(x), positions, qkv)
        query, key, value = qkv.split((self.heads, self.key_heads, self.key_heads), 1)
        seen = attend(index, query, key, value, **self.call).contiguous()
        require(seen.shape == query.shape and seen.dtype == x.dtype, "attention of another kind")
        out = torch.empty_like(x)
        self._compute("after_attention", seen, x, len(x), out)
        return out

    def _compute(self, name: str, *given: Tensor | int) -> None:
        values = (x if isinstance(x, int) else x.data_ptr() for x in given)
        threads = torch.get_num_threads()
        if getattr(library(), name)(ctypes.addressof(self.given), *values, threads):
            raise MemoryError(f"a layer of {self.heads} heads: no memory for what it computes")


def _linear(layer: Any) -> dict[str, Any]:
    """The products of a layer, by the names that they have here."""
    attention, feed = layer.self_attn, layer.mlp
    return {
        "query": attention.q_proj,
        "key": attention.k_proj,
        "value": attention.v_proj,
        "out": attention.o_proj,
        "gate": feed.gate_proj,
        "up": feed.up_proj,
        "down": feed.down_proj,
    }


def _norms(layer: Any) -> list[Any]:
    """The norms of a layer: before attention, before the feed-forward, of queries and of keys."""
    attention = layer.self_attn
    of_heads = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *of_heads]


def _rotation(rotary: Any, *, like: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [positions, dim], with the sign of each half in the
    sines; elsewhere it is given to the halves themselves."""
    cos, sin = rotary(like, torch.arange(positions, device=like.device)[None])
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], 1)
    return cos[0].contiguous(), signed


@torch.no_grad()
def fusible(backbone: Backbone, *, tokens: int = 12) -> Calls | None:
    """How the layers of a model call their attention, where `FusedBackbone` can compute it.

    Two short sequences run through the model's own layers and through fused ones, at the first
    positions and at late ones, where some models scale their queries. Only float32 models are
    fused: in 16 bits, rounding would hide what another rotation does to weights that are random
    still, and there is little to win.
    """
    if compiled() is None:
        return None
    config = backbone.model.config.get_text_config()
    late = min(getattr(config, "max_position_embeddings", None) or tokens, LATE) - tokens
    ids = torch.arange(2 * tokens) % config.vocab_size
    training = backbone.model.training
    backbone.model.eval()
    try:
        if not only_known_parts(backbone):
            return None
        for first in (0, max(0, late)):
            places = (first + torch.arange(tokens)).repeat(2)
            attend = TwoRows()
            own = backbone.hidden(ids, places, attend)
            fused = FusedBackbone(backbone, attend.calls, positions=first + tokens)
            found = fused.hidden(ids, places, TwoRows())
            if not (found - own).norm() <= 1e-4 * own.norm():
                return None
    except (AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError):
        return None
    finally:
        backbone.model.train(training)
    return attend.calls


def only_known_parts(backbone: Backbone) -> bool:
    """Whether a decoder has nothing but what fused layers compute with: not so where an adapter or
    a gate stands beside the weights, which may begin as nothing and show in no trial."""
    try:
        return _only_known_parts(backbone.decoder, backbone)
    except AttributeError:
        return False


def _only_known_parts(decoder: Any, backbone: Backbone) -> bool:
    linear = [each for layer in decoder.layers for each in _linear(layer).values()]
    norms = [decoder.norm, *(norm for layer in decoder.layers for norm in _norms(layer))]
    embeddings = backbone.model.get_input_embeddings()
    used = {id(each.weight) for each in [embeddings, *norms, *linear]}
    used |= {id(each.bias) for each in linear}
    # That of the embeddings is called as it is, and checkpointing puts a hook there.
    inside = [module for module in decoder.modules() if module is not embeddings]
    some, rotation = torch.linspace(-8, 8, 33), decoder.rotary_emb.rope_type
    return (
        all(plain(each) for each in linear)
        and all(
            id(parameter) in used and parameter.dtype == torch.float32
            for parameter in decoder.parameters()
        )
        and not any(module._forward_hooks or module._forward_pre_hooks for module in inside)
        and all(torch.allclose(layer.mlp.act_fn(some), F.silu(some)) for layer in decoder.layers)
        # These depend on the length of the sequence.
        and "dynamic" not in rotation
        and rotation != "longrope"
        and sum(each.weight.nbytes for each in [*linear, backbone.head]) <= ROOM
    )
