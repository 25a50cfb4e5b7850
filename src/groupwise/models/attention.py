"""The attention function that `transformers` calls in every layer while groupwise computes.

It is registered once under the name "groupwise" and does nothing itself: each forward pass hands in
an `Attend`, an object that knows how the tokens of that pass are laid out (a packed group in the
update, one token per live completion in the rollout) and what each of them may see. Queries and
keys arrive with their rotary positions already applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

NAME = "groupwise"


@runtime_checkable
class Attend(Protocol):
    """What a layout has to offer.

    Returns the attention output of one layer, for tokens in the order in which they were given to
    the model.
    """

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
    ) -> Float[Tensor, "tokens heads dim"]: ...


def _dispatch(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads tokens dim"],
    key: Float[Tensor, "1 key_heads tokens dim"],
    value: Float[Tensor, "1 key_heads tokens dim"],
    attention_mask: None,
    *,
    attend: Attend,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Adapt transformers' call to `Attend`. Extra keyword arguments of other backends are of no
    concern here."""
    out = attend(
        module.layer_idx,  # pyright: ignore[reportArgumentType]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def groupwise_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` attend through an `Attend` inside the block, and as before after it."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def within_window(
    query_position: Int[Tensor, "*query"], key_position: Int[Tensor, "*key"], window: int | None
) -> Bool[Tensor, "*pair"]:
    """Whether a key lies in the sliding window of a query (its own position counts as the first of
    `window`)."""
    distance = query_position - key_position
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def sees(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows key_heads keys dim"],
    value: Float[Tensor, "rows key_heads keys dim"],
    *,
    mask: Bool[Tensor, "#rows 1 queries keys"] | None,
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "rows heads queries dim"]:
    """Attention with grouped-query heads, causal where no mask is given.

    `softmax(cap(q·kᵀ · scaling)) v`, where cap(s) = softcap · tanh(s / softcap) as in Gemma 2 and
    the identity where `softcap` is None. Fused (`scaled_dot_product_attention`) unless a soft cap
    forbids it.
    """
    narrow = query.dtype
    if query.device.type == "cpu" and narrow in (torch.bfloat16, torch.float16):
        # The backward pass of a CPU's fused attention takes half again as long in 16 bits.
        query, key, value = query.float(), key.float(), value.float()
    return _sees(query, key, value, mask=mask, scaling=scaling, softcap=softcap).to(narrow)


def _sees(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """`sees` in the type of its arguments."""
    gqa = query.shape[1] != key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    if gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value
