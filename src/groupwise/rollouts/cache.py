"""Keys and values of a rollout: each prompt's once, and a suffix for every completion.

The cache is a grid of slots × G: a slot holds one prompt, its G completions grow in step. Slots in
use are always the first ones, so a decoding step works on a view of the grid and nothing is
gathered. With S slots, K key heads, P prompt tokens, T completion tokens and dimension D, a layer
holds prompt keys [S, K, P, D] and suffix keys [S, K, G, T, D].

    scores = [ q · promptᵀ | q · suffixᵀ ] · scaling      [S, K, G·heads/K, P + T]
    out    = softmax(scores + mask) [prompt values; suffix values]

The queries of all G completions of a prompt meet its keys in one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.models import sees, within_window


@dataclass(kw_only=True)
class LayerCache:
    """Keys and values of one layer."""

    prompt_key: Tensor
    prompt_value: Tensor
    suffix_key: Tensor
    suffix_value: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.prompt_key, self.prompt_value, self.suffix_key, self.suffix_value)


@dataclass(kw_only=True)
class GroupCache:
    """The grid. Capacities in tokens; `prompt_length[s]` and `written[s]` say what slot s holds."""

    slots: int
    group: int
    prompt_capacity: int
    suffix_capacity: int
    device: torch.device
    layers: dict[int, LayerCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_length = torch.zeros(self.slots, dtype=torch.long, device=self.device)
        self.written = torch.zeros(self.slots, dtype=torch.long, device=self.device)

    def layer(self, index: int, like: Float[Tensor, "tokens key_heads dim"]) -> LayerCache:
        """A layer's storage, made when its first keys arrive."""
        if index not in self.layers:
            heads, dim = like.shape[1:]
            prompt = (self.slots, heads, self.prompt_capacity, dim)
            suffix = (self.slots, heads, self.group, self.suffix_capacity, dim)
            self.layers[index] = LayerCache(
                prompt_key=like.new_zeros(prompt),
                prompt_value=like.new_zeros(prompt),
                suffix_key=like.new_zeros(suffix),
                suffix_value=like.new_zeros(suffix),
            )
        return self.layers[index]

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another; keeps the used slots the first ones."""
        self.prompt_length[target] = self.prompt_length[source]
        self.written[target] = self.written[source]
        prompt, suffix = int(self.prompt_length[source]), int(self.written[source])
        for layer in self.layers.values():
            for tensor in layer.tensors()[:2]:
                tensor[target, :, :prompt] = tensor[source, :, :prompt]
            for tensor in layer.tensors()[2:]:
                tensor[target, :, :, :suffix] = tensor[source, :, :, :suffix]


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
        mask = None
        if window is not None and window < self.time:
            place = torch.arange(self.time, device=query.device)
            mask = within_window(place[:, None], place, window)[None, None]
        # Padding stands after every real token, so the causal mask already hides it.
        return (
            sees(q, k, v, mask=mask, scaling=scaling, softcap=softcap).transpose(1, 2).flatten(0, 1)
        )


class Decode:
    """Attention of one new token per live completion to its prompt and its own suffix.

    Args:
        cache: the grid.
        used: slots in use.
        live: index slot · G + sample of every live row, ascending.
        uniform: all slots in use hold prompts of one length at one position, so no mask is needed.
    """

    def __init__(
        self, cache: GroupCache, *, used: int, live: Int[Tensor, "rows"], uniform: bool
    ) -> None:
        self.cache, self.used, self.live, self.uniform = cache, used, live, uniform
        self.slot = torch.div(live, cache.group, rounding_mode="floor")
        self.sample = live - self.slot * cache.group
        self.time = cache.written[self.slot]
        self.prompt = int(cache.prompt_length[:used].max())
        self.suffix = int(cache.written[:used].max()) + 1
        self.full = len(live) == used * cache.group
        self.masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "slots 1 1 keys"]:
        """0 where a slot's rows may look, −inf elsewhere; one per window width, shared by the
        layers."""
        if window not in self.masks:
            cache, used = self.cache, self.used
            length = cache.prompt_length[:used, None]
            prompt = torch.arange(self.prompt, device=length.device).expand(used, -1)
            suffix = torch.arange(self.suffix, device=length.device).expand(used, -1)
            position = torch.cat([prompt, length + suffix], 1)
            held = torch.cat([prompt < length, suffix <= cache.written[:used, None]], 1)
            allowed = held & within_window(length + cache.written[:used, None], position, window)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=length.device)
            self.masks[window] = mask.masked_fill_(~allowed, float("-inf"))[:, None, None, :]
        return self.masks[window]

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
        store.suffix_key[self.slot, :, self.sample, self.time] = key
        store.suffix_value[self.slot, :, self.sample, self.time] = value
        heads, key_heads, dim = query.shape[1], key.shape[1], query.shape[2]
        repeats, keys = heads // key_heads, self.prompt + self.suffix
        grid = query * scaling
        if not self.full:
            grid = query.new_zeros(used * group, heads, dim).index_copy_(0, self.live, grid)
        q = (
            grid.reshape(used, group, key_heads, repeats, dim)
            .transpose(1, 2)
            .reshape(used * key_heads, -1, dim)
        )
        q_own = q.reshape(-1, repeats, dim)
        prompt_key, prompt_value, suffix_key, suffix_value = self._views(store)
        scores = torch.cat(
            [
                torch.bmm(q, prompt_key.transpose(1, 2)),
                torch.bmm(q_own, suffix_key.transpose(1, 2)).view(len(q), -1, self.suffix),
            ],
            -1,
        ).view(used, key_heads, group * repeats, keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None or not self.uniform:
            scores += self._mask(window, scores.dtype)
        weights = _softmax(scores)
        over_prompt = weights.view(len(q), -1, keys)[..., : self.prompt]
        over_suffix = weights.view(-1, repeats, keys)[..., self.prompt :]
        out = torch.bmm(over_prompt, prompt_value).view(-1, repeats, dim) + torch.bmm(
            over_suffix, suffix_value
        )
        out = (
            out.view(used, key_heads, group, repeats, dim)
            .transpose(1, 2)
            .reshape(used * group, heads, dim)
        )
        return out if self.full else out.index_select(0, self.live)

    def _views(self, store: LayerCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Storage cut to what is in use, one matrix per (slot, head) and per (slot, head,
        sample)."""
        used = self.used
        return (
            store.prompt_key[:used, :, : self.prompt].flatten(0, 1),
            store.prompt_value[:used, :, : self.prompt].flatten(0, 1),
            store.suffix_key[:used, :, :, : self.suffix].flatten(0, 2),
            store.suffix_value[:used, :, :, : self.suffix].flatten(0, 2),
        )


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys, in float32 where the model computes in less."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    return scores.softmax(-1)
