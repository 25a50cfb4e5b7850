"""The most common kind of model for rollouts on a CPU, in less than half of the operations.

A decoding step of a small model is a thousand operations of a few microseconds, and most of its
time passes between them. `transformers` writes a layer for the reader; here the same layer is
written for the machine: query, key and value are one product, the activation and the residual are
computed by the products that they follow, and weights are laid out for oneDNN (`products.py`).

    [q k v] = norm(x) Wqkvᵀ + b,    x ← x + attend(rotate(q), rotate(k), v) Woᵀ
    h = norm(x),                    x ← x + (silu(h Wgateᵀ) · h Wupᵀ) Wdownᵀ

So Llama, Mistral, Qwen2 and Qwen3 are made, and many after them. No list of names says which: a
model that has these parts is tried, and is computed in this way only where that gives the hidden
states that its own layers give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from groupwise.models.attention import Attend
from groupwise.models.backbone import Backbone, TwoRows
from groupwise.models.products import ROOM, LaidOut, padded, plain

Calls = dict[int, dict[str, Any]]
"""How every layer calls its attention: scaling, window, soft cap."""
LATE = 2**16
"""The latest position of a trial."""


class FusedBackbone:
    """A `Backbone` for rollouts on a CPU. Records no gradient.

    Matrices are copied when it is made, and not followed.

    Args:
        backbone: of a model of which `fusible` gave the `calls`.
        rows: the tokens of a decoding step, about.
        positions: the longest sequence.

    """

    def __init__(self, backbone: Backbone, calls: Calls, *, rows: int, positions: int) -> None:
        self.backbone, decoder = backbone, backbone.decoder
        self.layers = [
            _Layer.of(layer, calls[index], rows=rows) for index, layer in enumerate(decoder.layers)
        ]
        self.norm = _Norm.of(decoder.norm)
        self.embed = backbone.model.get_input_embeddings()
        head = backbone.head
        fits = plain(head) and backbone.plain_head
        self.head = LaidOut(head.weight, head.bias, rows=rows) if fits else None
        self.rotation = _rotation(decoder.rotary_emb, like=self.norm.weight, positions=positions)

    def hidden(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """As `Backbone.hidden`."""
        cos, sin = (table.index_select(0, positions) for table in self.rotation)
        x = self.embed(padded(tokens))
        for index, layer in enumerate(self.layers):
            x = layer(x, index, cos, sin, attend)
        return self.norm(x[: len(tokens)])

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
        return cls(weight=module.weight.detach(), eps=module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One decoder layer, for hidden states in whole numbers of rows (`padded`).

    Attributes:
        dim: of a head.
        turned: query and key heads, the first ones that `qkv` gives.
        heads: query heads among them.
        head_norms: of queries and of keys (Qwen3), or none.
        call: what its attention is called with.
    """

    dim: int
    heads: int
    turned: int
    before: _Norm
    qkv: LaidOut
    head_norms: tuple[_Norm, ...]
    out: LaidOut
    between: _Norm
    gate: LaidOut
    up: LaidOut
    down: LaidOut
    call: dict[str, Any]

    @classmethod
    def of(cls, layer: Any, call: dict[str, Any], *, rows: int) -> _Layer:
        linear, dim = _linear(layer), layer.self_attn.head_dim
        joined = [linear.pop(name) for name in ("query", "key", "value")]
        biases = [
            each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach()
            for each in joined
        ]
        qkv = LaidOut(
            torch.cat([each.weight.detach() for each in joined]),
            torch.cat(biases),
            rows=rows,
        )
        before, between, *of_heads = (_Norm.of(norm) for norm in _norms(layer))
        return cls(
            dim=dim,
            heads=len(joined[0].weight) // dim,
            turned=sum(len(each.weight) for each in joined[:2]) // dim,
            before=before,
            qkv=qkv,
            head_norms=tuple(of_heads),
            between=between,
            call=call,
            **{name: LaidOut(each.weight, each.bias, rows=rows) for name, each in linear.items()},
        )

    def __call__(self, x: Tensor, index: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.before(x))[: len(cos)].unflatten(1, (-1, self.dim))
        qk, value = qkv[:, : self.turned], qkv[:, self.turned :]
        if self.head_norms:
            of_query, of_key = self.head_norms
            qk = torch.cat([of_query(qk[:, : self.heads]), of_key(qk[:, self.heads :])], 1)
        qk = torch.addcmul(qk * cos, qk.roll(self.dim // 2, -1), sin)
        seen = attend(index, qk[:, : self.heads], qk[:, self.heads :], value, **self.call)
        x = self.out.combined(padded(seen.flatten(1)), x, "add")
        h = self.between(x)
        return self.down.combined(self.up.combined(h, self.gate(h, then="swish"), "mul"), x, "add")


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
    """Cosines and sines of every position, [positions, 1, dim], so that x is turned as
    x · cos + (x with its halves changed) · sin."""
    cos, sin = rotary(like, torch.arange(positions, device=like.device)[None])
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], 1)
    return cos[0].unsqueeze(1), signed.unsqueeze(1)


@torch.no_grad()
def fusible(backbone: Backbone, *, tokens: int = 12) -> Calls | None:
    """How the layers of a model call their attention, where `FusedBackbone` can compute it.

    Two short sequences run through the model's own layers and through fused ones, at the first
    positions and at late ones, where some models scale their queries. Only float32 models are
    fused: in 16 bits, rounding would hide what another rotation does to weights that are random
    still, and there is little to win.
    """
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
            fused = FusedBackbone(backbone, attend.calls, rows=2 * tokens, positions=first + tokens)
            found = fused.hidden(ids, places, TwoRows())
            if not (found - own).norm() <= 1e-4 * own.norm():
                return None
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
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
        all(plain(each) and each.weight.dtype == torch.float32 for each in linear)
        and all(id(parameter) in used for parameter in decoder.parameters())
        and not any(module._forward_hooks or module._forward_pre_hooks for module in inside)
        and all(torch.allclose(layer.mlp.act_fn(some), F.silu(some)) for layer in decoder.layers)
        # These depend on the length of the sequence.
        and "dynamic" not in rotation
        and rotation != "longrope"
        and sum(each.weight.nbytes for each in [*linear, backbone.head]) <= ROOM
    )
