"""The most common kind of model for rollouts on a CPU, in a sixth of the operations (43 for 264 in
a pass through four layers).

`transformers` writes a layer for the reader; here the same layer is written for the machine, with
the products of `kernels.py`: query, key and value are one, gate and up are one, and the activation
and the residual are computed by the products that they follow.

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
from groupwise.models.kernels import Linear, compiled, rms_norm, turn_
from groupwise.models.products import ROOM, plain

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
        self.backbone, decoder = backbone, backbone.decoder
        self.layers = [_Layer.of(layer, calls[index]) for index, layer in enumerate(decoder.layers)]
        self.norm = _Norm.of(decoder.norm)
        self.embed = backbone.model.get_input_embeddings()
        head = backbone.head
        fits = plain(head) and backbone.plain_head and head.weight.dtype == torch.float32
        self.head = Linear(head.weight, head.bias) if fits else None
        self.rotation = _rotation(decoder.rotary_emb, like=self.norm.weight, positions=positions)

    def hidden(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """As `Backbone.hidden`."""
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, positions, self.rotation, attend)
        return self.norm(x)

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
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One decoder layer.

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
    qkv: Linear
    head_norms: tuple[_Norm, ...]
    out: Linear
    between: _Norm
    gated: Linear
    down: Linear
    call: dict[str, Any]

    @classmethod
    def of(cls, layer: Any, call: dict[str, Any]) -> _Layer:
        linear, dim = _linear(layer), layer.self_attn.head_dim
        joined = [linear[name] for name in ("query", "key", "value")]
        biases = [
            each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach()
            for each in joined
        ]
        before, between, *of_heads = (_Norm.of(norm) for norm in _norms(layer))
        out, gate, up, down = (linear[name] for name in ("out", "gate", "up", "down"))
        return cls(
            dim=dim,
            heads=len(joined[0].weight) // dim,
            turned=sum(len(each.weight) for each in joined[:2]) // dim,
            before=before,
            qkv=Linear(torch.cat([each.weight.detach() for each in joined]), torch.cat(biases)),
            head_norms=tuple(of_heads),
            out=Linear(out.weight, out.bias),
            between=between,
            gated=Linear(up.weight, up.bias, gate=(gate.weight, gate.bias)),
            down=Linear(down.weight, down.bias),
            call=call,
        )

    def __call__(
        self,
        x: Tensor,
        index: int,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        qkv = self.qkv(self.before(x)).unflatten(1, (-1, self.dim))
        qk, value = qkv[:, : self.turned], qkv[:, self.turned :]
        if self.head_norms:
            of_query, of_key = self.head_norms
            qk = torch.cat([of_query(qk[:, : self.heads]), of_key(qk[:, self.heads :])], 1)
        turn_(qk, *rotation, positions)
        seen = attend(index, qk[:, : self.heads], qk[:, self.heads :], value, **self.call)
        x = self.out(seen.flatten(1), onto=x)
        return self.down(self.gated(self.between(x)), onto=x)


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
    """Cosines and sines of every position, [positions, dim], as `turn_` takes them."""
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
