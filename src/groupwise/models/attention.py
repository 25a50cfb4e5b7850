"""The attention function that `transformers` calls in every layer while groupwise computes.

It is registered once under the name "groupwise" and only dispatches: each forward pass hands in an
`Attend`, an object that knows how the tokens of that pass are laid out (a packed group in the
update, one token per live completion in the rollout) and what each of them attends to. Queries and
keys arrive with their rotary positions already applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "groupwise"


@runtime_checkable
class Attend(Protocol):
    """The attention of one layer, for tokens in the order in which the model received them."""

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
    """Adapt transformers' call to `Attend`. Keyword arguments of other backends are ignored."""
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
    """A context in which `model` attends through an `Attend`."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
