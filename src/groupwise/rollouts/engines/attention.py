"""Attention of a rollout to the grid of its cache: of new prompts, and of a decoding step.

    scores = [ q · promptᵀ | q · suffixᵀ ] · scaling      [S, K, G·heads/K, P + T]
    out    = softmax(scores + mask) [prompt values; suffix values]

The queries of all G completions of a prompt meet its keys in one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.kernels.cpu import attends
from groupwise.kernels.decoding import GroupCache, Rows, attend_rows
from groupwise.kernels.tree_attention import tree_attend
from groupwise.models import sees, within_window


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Attention of new prompts among themselves, padded on the right, filling their slots."""

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
        q, k, v = (x.unflatten(0, (-1, self.time)).transpose(1, 2) for x in (query, key, value))
        store = self.cache.layer(layer, key)
        store.prompt_key[self.slots, :, : self.time] = k
        store.prompt_value[self.slots, :, : self.time] = v
        if attends(query, key, value, softcap=softcap):
            first = torch.arange(0, len(query), self.time)
            alone = torch.full_like(first, -1)
            spans = torch.stack([first, torch.full_like(first, self.time), alone])
            return tree_attend(query, key, value, spans, scaling=scaling, window=window)
        mask = None
        if window is not None and window < self.time:
            place = torch.arange(self.time, device=query.device)
            mask = within_window(place[:, None], place, window)[None, None]
        # Padding stands after every real token, so the causal mask already hides it.
        return (
            sees(q, k, v, mask=mask, scaling=scaling, softcap=softcap).transpose(1, 2).flatten(0, 1)
        )


@dataclass(frozen=True, kw_only=True)
class Decode(Rows):
    """Attention of one new token per live completion to its prompt and its own suffix.

    Attributes:
        used: slots in use.
        rows: index slot · G + sample of every live completion, ascending.
        clock: the tick that this step is.
        prompt, suffix: longest prompt and longest completion in use, the new token included.
        aligned: all slots hold prompts of one length at one tick, so no mask is needed.
    """

    used: int
    rows: Int[Tensor, "rows"]
    clock: int
    prompt: int
    suffix: int
    aligned: bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    places: dict[int, Tensor] = field(default_factory=dict)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "slots 1 1 keys"]:
        """0 where a slot's rows may look, −inf elsewhere; made once per window width."""
        if window not in self.masks:
            cache, used = self.cache, self.used
            length, written = (
                cache.prompt_length[:used, None],
                self.clock - cache.start[:used, None],
            )
            prompt = torch.arange(self.prompt, device=length.device).expand(used, -1)
            suffix = torch.arange(self.suffix, device=length.device).expand(used, -1)
            position = torch.cat([prompt, length + suffix], 1)
            held = torch.cat([prompt < length, suffix <= written], 1)
            allowed = held & within_window(length + written, position, window)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=length.device)
            self.masks[window] = mask.masked_fill_(~allowed, float("-inf"))[:, None, None, :]
        return self.masks[window]

    def _place(self, key_heads: int) -> Int[Tensor, "cells"]:
        """Where the new keys go in a suffix store seen as [cells, dim]; the same in every layer."""
        if key_heads not in self.places:
            head = torch.arange(key_heads, device=self.rows.device)
            row = (self.slot[:, None] * key_heads + head) * self.cache.group + self.sample[:, None]
            place = row * self.cache.suffix_capacity + self.time[:, None]
            self.places[key_heads] = place.flatten()
        return self.places[key_heads]

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
        store, used, group = self.cache.layer(layer, key), self.used, self.cache.group
        if attends(query, key, value, softcap=softcap):
            return attend_rows(self, store, query, key, value, scaling=scaling, window=window)
        (rows, heads, dim), key_heads = query.shape, key.shape[1]
        repeats, keys = heads // key_heads, self.prompt + self.suffix
        place = self._place(key_heads)
        store.suffix_key.view(-1, dim).index_copy_(0, place, key.reshape(-1, dim))
        store.suffix_value.view(-1, dim).index_copy_(0, place, value.reshape(-1, dim))
        full = rows == used * group
        if not full:
            query = query.new_zeros(used * group, heads, dim).index_copy_(0, self.rows, query)
        grid = query.reshape(used, group, key_heads, repeats, dim).transpose(1, 2)
        q = grid.reshape(used * key_heads, group * repeats, dim)
        own = q.reshape(used * key_heads * group, repeats, dim)
        prompt_key = store.prompt_key[:used, :, : self.prompt].flatten(0, 1).transpose(1, 2)
        suffix_key = store.suffix_key[:used, :, :, : self.suffix].flatten(0, 2).transpose(1, 2)
        to_prompt = torch.baddbmm(q.new_zeros(()), q, prompt_key, beta=0, alpha=scaling)
        to_suffix = torch.baddbmm(q.new_zeros(()), own, suffix_key, beta=0, alpha=scaling)
        scores = torch.cat([to_prompt, to_suffix.view(len(q), -1, self.suffix)], -1)
        scores = scores.view(used, key_heads, group * repeats, keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None or not self.aligned:
            scores += self._mask(window, scores.dtype)
        weights = _softmax(scores)
        prompt_value = store.prompt_value[:used, :, : self.prompt].flatten(0, 1)
        suffix_value = store.suffix_value[:used, :, :, : self.suffix].flatten(0, 2)
        out = torch.bmm(weights.view(len(q), -1, keys)[..., : self.prompt], prompt_value)
        out = torch.baddbmm(
            out.view(len(own), repeats, dim),
            weights.view(len(own), repeats, keys)[..., self.prompt :],
            suffix_value,
        )
        out = out.view(used, key_heads, group, repeats, dim).transpose(1, 2)
        out = out.reshape(used * group, heads, dim)
        return out if full else out.index_select(0, self.rows)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys, in float32 where the model computes in less."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    return scores.softmax(-1)
