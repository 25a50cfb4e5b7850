"""Attention during rollouts: within new prompts, and from a decoding step to the cache."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from groupwise.kernels import DecodeRows, GroupCache, active


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Attention within new prompts, which are padded on the right and fill their slots."""

    cache: GroupCache
    slots: Int[Tensor, "prompt"]
    time: int

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
        store = self.cache.layer(layer, key)
        store.prompt_key[self.slots, :, : self.time] = _by_sequence(key, self.time)
        store.prompt_value[self.slots, :, : self.time] = _by_sequence(value, self.time)
        # Padding stands after every real token, so a causal mask already hides it.
        return active().causal_attention(
            query, key, value, length=self.time, scaling=scaling, window=window, softcap=softcap
        )


def _by_sequence(values: Float[Tensor, "tokens heads dim"], length: int) -> Tensor:
    """[sequences, heads, length, dim]"""
    return values.unflatten(0, (-1, length)).transpose(1, 2)


class Decode(DecodeRows):
    """Attention of new tokens of live completions to their prompts and their own suffixes."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "rows heads dim"],
        key: Float[Tensor, "rows key_heads dim"],
        value: Float[Tensor, "rows key_heads dim"],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Float[Tensor, "rows heads dim"]:
        store = self.cache.layer(layer, key)
        return active().decode_attention(
            self, store, query, key, value, scaling=scaling, window=window, softcap=softcap
        )
