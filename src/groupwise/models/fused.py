"""Llama-like models in a rollout: the decoder's layers computed by a kernel from their weights.

Llama, Mistral, Qwen2, Qwen3 and many others are built like this. There is no list of names: a model
that has these parts is tried, and fused only if the kernel reproduces the hidden states of its own
layers.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from groupwise.kernels import (
    COPY_LIMIT,
    Affine,
    DecoderLayer,
    FourBits,
    Norm,
    active,
    is_four_bit_linear,
    is_plain_linear,
)
from groupwise.models.attention import Attend
from groupwise.models.backbone import Backbone, TwoRows

Calls = dict[int, dict[str, Any]]
"""How every layer calls its attention: scaling, window, soft cap."""
LATE = 2**16
"""The highest position in the trial run."""
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far hidden states may be from those of the model's own layers, by dtype."""
SIMPLE = (bool, int, float, str, type(None))
"""Types of a module's settings."""


class FusedBackbone:
    """A `Backbone` for rollouts. Records no gradient.

    On a CPU, matrices are copied at construction; later changes of the weights are not seen.

    Args:
        backbone: of a model for which `can_use_fused` gave the `calls`.
        positions: the longest sequence.

    Raises:
        ValueError: there is no kernel, or the parts of the model do not fit together.
    """

    def __init__(self, backbone: Backbone, calls: Calls, *, positions: int) -> None:
        self.backbone = backbone
        norm, head = _norm(backbone.decoder.norm), backbone.head
        narrow = norm.weight.dtype != torch.float32
        fits = (
            is_plain_linear(head, backbone.device.type)
            and backbone.plain_head
            and head.weight.dtype == norm.weight.dtype
            and not (narrow and backbone.fp32_logits)
        )
        decoder = active().decoder(
            [_layer(each, calls[index]) for index, each in enumerate(backbone.decoder.layers)],
            norm=norm,
            rotation=_rotation(
                backbone.decoder.rotary_emb, like=norm.weight, places=torch.arange(positions)
            ),
            head=Affine(head.weight, head.bias) if fits else None,
        )
        if decoder is None:
            raise ValueError("no kernel computes a decoder")
        self.decoder, self.own_head = decoder, not fits
        self.embed = backbone.model.get_input_embeddings()

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of a decoding step has the same bits whatever else is in the step."""
        return self.decoder.batch_invariant and not self.own_head

    def hidden(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """As `Backbone.hidden`."""
        return self.decoder.hidden(self.embed(tokens), positions, attend)

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """As `Backbone.logits`."""
        if self.own_head:
            return self.backbone.logits(hidden)
        return self.backbone.finished(self.decoder.head(hidden))


def _layer(layer: Any, call: dict[str, Any]) -> DecoderLayer:
    """The weights of a decoder layer, and how it calls its attention."""
    before, between, *heads = (_norm(norm) for norm in _norms(layer))
    return DecoderLayer(
        **{name: _affine(linear) for name, linear in _linear(layer).items()},
        before=before,
        between=between,
        heads=(heads[0], heads[1]) if heads else None,
        dim=layer.self_attn.head_dim,
        **call,
    )


def _affine(linear: Any) -> Affine:
    """The weights of a linear layer, and what an adapter adds to it.

    Raises:
        ValueError: it has an adapter that the kernel does not compute.
    """
    base = getattr(linear, "base_layer", linear)
    weight = FourBits.of(base) if is_four_bit_linear(base) else base.weight
    if base is linear:
        return Affine(weight, base.bias)
    from groupwise.models.low_rank import added_in_rollouts  # PEFT is there, and slow to import

    return Affine(weight, base.bias, added_in_rollouts(linear))


def _norm(module: Any) -> Norm:
    return Norm(weight=module.weight, eps=module.variance_epsilon)


def _linear(layer: Any) -> dict[str, Any]:
    """The linear layers of a decoder layer, by their names in `DecoderLayer`."""
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


def _rotation(rotary: Any, *, like: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, [positions, dim]."""
    cos, sin = rotary(like, places[None].to(like.device))
    return cos[0], sin[0]


@torch.no_grad()
def can_use_fused(backbone: Backbone, *, tokens: int = 12) -> Calls | None:
    """How the layers of a model call their attention, where `FusedBackbone` can compute it; else
    None.

    Two short sequences run through the layers of an update and through fused ones, at the first
    positions and at late ones, where some models scale their queries. In 16 bits, rounding would
    hide what another rotation does to random weights, so there each kind of layer is also tried by
    itself in float32.
    """
    config = backbone.model.config.get_text_config()
    late = min(getattr(config, "max_position_embeddings", None) or tokens, LATE) - tokens
    ids = torch.arange(2 * tokens, device=backbone.device) % config.vocab_size
    training = backbone.model.training
    backbone.model.eval()
    try:
        if not only_known_parts(backbone):
            return None
        calls: Calls = {}
        for first in (0, max(0, late)):
            places = (first + torch.arange(tokens, device=backbone.device)).repeat(2)
            calls = _tried(backbone, ids, places)
    except Exception:  # a kernel that does not compile raises errors of its own
        return None
    finally:
        backbone.model.train(training)
    return calls


def _tried(backbone: Backbone, ids: Tensor, places: Tensor) -> Calls:
    """How the layers call their attention.

    Raises:
        ValueError: fused layers give other hidden states.
    """
    attend = TwoRows()
    with active().training_layers(backbone.model):  # what the rollout must agree with
        own = backbone.hidden(ids, places, attend)
    fused = FusedBackbone(backbone, attend.calls, positions=int(places.max()) + 1)
    _require_close(fused.hidden(ids, places, TwoRows()), own)
    if own.dtype != torch.float32:
        kinds = {_kind(layer): i for i, layer in enumerate(backbone.decoder.layers)}
        for index in kinds.values():
            _try_in_float32(backbone, index, attend.calls, ids, places)
    return attend.calls


def _kind(layer: nn.Module) -> Hashable:
    """What layers that compute alike have in common: their modules, and the modules' settings."""
    found = []
    for name, module in layer.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, SIMPLE)}
        settings.pop("layer_idx", None)
        found.append((name, type(module), tuple(settings.items())))
    return tuple(found)


def _try_in_float32(
    backbone: Backbone, index: int, calls: Calls, ids: Tensor, places: Tensor
) -> None:
    """Try a layer by itself, with all others left out."""
    decoder, embed = backbone.decoder, backbone.model.get_input_embeddings()
    shared = {id(decoder.config): decoder.config}  # where attention is chosen
    copies = (copy.deepcopy(x, shared) for x in (decoder.layers[index], decoder.norm))
    layer, norm = (_in_float32(each) for each in copies)
    alone = copy.copy(decoder)
    layers = [layer if i == index else _left_out(x) for i, x in enumerate(decoder.layers)]
    alone._modules = {**decoder._modules, "layers": nn.ModuleList(layers), "norm": norm}
    alone.set_input_embeddings(nn.Embedding.from_pretrained(embed.weight[: len(ids)].float()))
    own = replace(backbone, decoder=alone).hidden(ids, places, TwoRows())
    made = active().decoder(
        [_layer(layer, calls[index])],
        norm=_norm(norm),
        rotation=_rotation(decoder.rotary_emb, like=norm.weight, places=places),
        head=None,
    )
    if made is None:
        raise ValueError("no kernel computes float32")
    embedded, row = alone.get_input_embeddings()(ids), torch.arange(len(ids), device=ids.device)
    _require_close(made.hidden(embedded, row, TwoRows()), own)


def _in_float32(module: Any) -> Any:
    """The module converted in place, with whole weights instead of those in 4 bits."""
    small = [(name, each) for name, each in module.named_modules() if is_four_bit_linear(each)]
    for name, each in small:
        whole = nn.Linear(each.in_features, each.out_features, bias=False, device="meta")
        whole.weight, whole.bias = nn.Parameter(FourBits.of(each).whole()), each.bias
        module.set_submodule(name, whole)
    return module.float()


def _left_out(layer: nn.Module) -> nn.Module:
    """A layer in the place of another that returns the states it is given."""
    made = copy.copy(layer)
    made.forward = lambda hidden_states, *_, **__: hidden_states
    return made


def _require_close(found: Tensor, own: Tensor) -> None:
    if not (found - own).norm() <= LIMITS[own.dtype] * own.norm():
        raise ValueError("fused layers give other hidden states")


def only_known_parts(backbone: Backbone) -> bool:
    """Whether a decoder has only the parts that fused layers compute with: not so where a gate, or
    an adapter of another kind than LoRA, stands beside the weights, which may start at zero and
    show in no trial."""
    try:
        return _only_known_parts(backbone.decoder, backbone)
    except (AttributeError, ValueError):
        return False


def _only_known_parts(decoder: Any, backbone: Backbone) -> bool:
    layers = [each for layer in decoder.layers for each in _linear(layer).values()]
    adapters: set[int] = set().union(*(_of_adapter(each) for each in layers))
    linear = [getattr(each, "base_layer", each) for each in layers]
    norms = [decoder.norm, *(norm for layer in decoder.layers for norm in _norms(layer))]
    embeddings = backbone.model.get_input_embeddings()
    used = {id(each.weight) for each in [embeddings, *norms, *linear]}
    used |= {id(each.bias) for each in linear}
    small = {id(each.weight) for each in linear if is_four_bit_linear(each)}
    # The module of the embeddings itself is called, and checkpointing puts a hook there.
    inside = [module for module in decoder.modules() if module is not embeddings]
    some, rotation = torch.linspace(-8, 8, 33), decoder.rotary_emb.rope_type
    device = backbone.device.type
    return (
        all(id(each.weight) in small or is_plain_linear(each, device) for each in linear)
        and all(
            id(parameter) in used and parameter.dtype == decoder.norm.weight.dtype
            for parameter in decoder.parameters()
            if id(parameter) not in adapters | small
        )
        and not any(module._forward_hooks or module._forward_pre_hooks for module in inside)
        and all(torch.allclose(layer.mlp.act_fn(some), F.silu(some)) for layer in decoder.layers)
        # These rotations depend on the length of the sequence.
        and "dynamic" not in rotation
        and rotation != "longrope"
        and (
            device != "cpu"  # where nothing is copied
            or sum(map(_copied_bytes, [*linear, backbone.head])) <= COPY_LIMIT
        )
    )


def _copied_bytes(linear: nn.Linear) -> float:
    """The size of the copy of a weight."""
    if is_four_bit_linear(linear):
        return linear.in_features * linear.out_features * FourBits.COPY_BYTES
    return linear.weight.nbytes


def _of_adapter(linear: nn.Module) -> set[int]:
    """The ids of the parameters of an adapter, active or not.

    Raises:
        ValueError: the kernel does not compute the adapter.
    """
    if not hasattr(linear, "base_layer"):
        return set()
    _affine(linear)
    base = linear.get_submodule("base_layer")
    return {id(p) for p in linear.parameters()} - {id(p) for p in base.parameters()}
