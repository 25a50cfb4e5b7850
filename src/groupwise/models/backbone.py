"""A causal language model split into its decoder, which gives hidden states, and its head, which
gives logits.

The two are separate so that the head is computed in chunks, and only where a token is predicted.
Whether a model can be split and attended this way is not looked up in a list of names:
`unsupported` tries it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.kernels import active, attention, within_window
from groupwise.models.attention import Attend, groupwise_attention


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A model's decoder and head.

    Attributes:
        model: the `transformers` model itself (inside any adapter wrapper).
        decoder: everything below the head.
        softcap: logits become softcap · tanh(logits / softcap) where it is set (Gemma 2).
        fp32_logits: the head's product is computed in float32 whatever the model's type, because
            its configuration says `head_dtype = "float32"`.
    """

    model: Any
    decoder: Any
    softcap: float | None
    fp32_logits: bool

    @classmethod
    def of(cls, model: Any) -> Backbone:
        """Split a causal language model, looking through a PEFT wrapper."""
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        softcap = getattr(base.config, "final_logit_softcapping", None)
        wide = getattr(base.config, "head_dtype", None) == "float32"
        return cls(model=base, decoder=base.get_decoder(), softcap=softcap, fp32_logits=wide)

    @property
    def device(self) -> torch.device:
        """The device that the tokens must be on."""
        return self.model.get_input_embeddings().weight.device

    @property
    def head(self) -> Any:
        """The output projection, read at every use: adapters and merges may replace it. None in a
        classifier."""
        return self.model.get_output_embeddings()

    def hidden(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], attend: Attend
    ) -> Float[Tensor, "tokens hidden"]:
        """Hidden states of a flat row of tokens whose layout `attend` knows."""
        with groupwise_attention(self.model):
            out = self.decoder(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                attend=attend,
            )
        return out.last_hidden_state[0]

    @property
    def plain_head(self) -> bool:
        """Whether the head is a matrix product and nothing else: no adapter, no hooks."""
        head = self.head
        hooks = getattr(head, "_forward_hooks", None) or getattr(head, "_forward_pre_hooks", None)
        return type(head) is torch.nn.Linear and not hooks

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """Logits in float32 at least, soft cap included."""
        if self.fp32_logits and self.plain_head:
            logits = head_product(hidden, self.head.weight, wide=True)
            logits = logits if self.head.bias is None else logits + self.head.bias
        else:
            logits = self.head(hidden)
        return self.finished(logits)

    def finished(self, logits: Float[Tensor, "tokens vocab"]) -> Float[Tensor, "tokens vocab"]:
        """Apply the soft cap to the head's product, in float32 at least."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def head_product(
    hidden: Float[Tensor, "tokens hidden"], weight: Float[Tensor, "vocab hidden"], *, wide: bool
) -> Float[Tensor, "tokens vocab"]:
    """hidden · Wᵀ, in the type of both, or `wide`: in float32, where products of 16-bit numbers are
    exact, and without rounding the sum to 16 bits."""
    if not wide or hidden.dtype not in (torch.float16, torch.bfloat16):
        return active().linear(hidden, weight)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return active().linear(hidden.float(), weight.float())


@dataclass(frozen=True, kw_only=True)
class TwoRows:
    """Two sequences of one length, one after the other. Used to test a model: a layer that mixes
    tokens outside of attention changes the second sequence.

    Attributes:
        calls: how every layer called: scaling, window, soft cap; filled as they do.
    """

    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "tokens heads dim"],
        key: Float[Tensor, "tokens key_heads dim"],
        value: Float[Tensor, "tokens key_heads dim"],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Float[Tensor, "tokens heads dim"]:
        self.calls[layer] = {"scaling": scaling, "window": window, "softcap": softcap}
        place = torch.arange(len(query) // 2, device=query.device)
        mask = None if window is None else within_window(place[:, None], place, window)[None, None]
        q, k, v = (x.unflatten(0, (2, -1)).transpose(1, 2) for x in (query, key, value))
        out = attention(q, k, v, mask=mask, scaling=scaling, softcap=softcap)
        return out.transpose(1, 2).flatten(0, 1)


def rounding_limit(model: Any) -> float:
    """How much log-probabilities may differ through rounding alone when computed in another way. On
    an H100, those of a random Gemma 2 in float32 differed by 6.5e-4."""
    if model.dtype not in (torch.float32, torch.float64):
        return 0.25
    return 1e-4 if model.device.type == "cpu" else 5e-3


@torch.no_grad()
def unsupported(model: Any, *, tokens: int = 12) -> str | None:
    """Why a model does not support grouped attention, or None if it does.

    Runs two short sequences through the model as it is, and through its parts in one row, and
    compares the logits; of a classifier, the hidden states. That finds, without a list of names:
    encoder-decoder models, layers that mix tokens without attention, learned or relative position
    schemes that need the mask, heads with a scale of their own, attention sinks. Windows wider than
    the sequences would not show, so layers that the configuration calls windowed must pass on their
    window.
    """
    try:
        backbone = Backbone.of(model)
        base = backbone.model
        device = backbone.device
        ids = torch.arange(2 * tokens, device=device) % base.config.get_text_config().vocab_size
        places = torch.arange(tokens, device=device).repeat(2)
        attend = TwoRows()
        training = base.training
        base.eval()
        try:
            given = {"input_ids": ids.unflatten(0, (2, -1)), "use_cache": False}
            if backbone.head is None:
                plain = backbone.decoder(**given).last_hidden_state
                apart = backbone.hidden(ids, places, attend)
            else:
                plain = base(**given).logits
                apart = backbone.logits(backbone.hidden(ids, places, attend))
        finally:
            base.train(training)
    except (
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
        KeyError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"its layers cannot be run through the attention interface ({reason})"
    plain, apart = plain.flatten(0, 1).float(), apart.float()
    if backbone.head is None:
        what, gap = "hidden states", ((plain - apart).norm() / plain.norm()).item()
    else:
        what = "log-probabilities"
        gap = (plain.log_softmax(-1) - apart.log_softmax(-1)).abs().max().item()
    limit = rounding_limit(base)
    if not gap <= limit:
        return f"its {what} change by {gap:.2g} when attention is replaced (limit {limit})"
    kinds = getattr(base.config.get_text_config(), "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if kind != "full_attention" and attend.calls.get(layer, {}).get("window") is None:
            return f"layer {layer} is of type {kind!r} and says nothing of a window"
    return None
