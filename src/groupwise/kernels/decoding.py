"""Keys and values of a rollout: each prompt's once, and a suffix for every completion; and the
kernel that attends to them.

The cache is a grid of slots × G: a slot holds one prompt, its G completions grow in step. Slots in
use are always the first ones, so a decoding step works on a view of the grid and nothing is
gathered. With S slots, K key heads, P prompt tokens, T completion tokens and dimension D, a layer
holds prompt keys [S, K, P, D] and suffix keys [S, K, G, T, D].
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.kernels.cpu import Heads, require, typed


class GivenCache(ctypes.Structure):
    """`Cache` of decoding.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("prompt_key", "prompt_value", "suffix_key", "suffix_value")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("key_heads", "dim", "group", "prompt_capacity", "suffix_capacity")
        ),
    )


class GivenPlaces(ctypes.Structure):
    """`Places` of decoding.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slot", "sample", "time", "prompt_length")),
        ("rows", ctypes.c_int64),
    )


class _Attention(ctypes.Structure):
    """`Attention` of decoding.h."""

    _fields_ = (
        *((name, Heads) for name in ("query", "key", "value")),
        ("out", ctypes.c_void_p),
        ("cache", GivenCache),
        ("places", GivenPlaces),
        *((name, ctypes.c_int64) for name in ("heads", "window", "threads")),
        ("scaling", ctypes.c_double),
    )


@dataclass(kw_only=True)
class LayerCache:
    """Keys and values of one layer."""

    prompt_key: Float[Tensor, "slots key_heads prompt dim"]
    prompt_value: Float[Tensor, "slots key_heads prompt dim"]
    suffix_key: Float[Tensor, "slots key_heads group suffix dim"]
    suffix_value: Float[Tensor, "slots key_heads group suffix dim"]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.prompt_key, self.prompt_value, self.suffix_key, self.suffix_value)

    def given(self) -> GivenCache:
        """What a kernel is told of it."""
        _, key_heads, group, suffix, dim = self.suffix_key.shape
        pointers = (x.data_ptr() for x in self.tensors())
        return GivenCache(*pointers, key_heads, dim, group, self.prompt_key.shape[2], suffix)


@dataclass(kw_only=True)
class GroupCache:
    """The grid. Capacities in tokens; `prompt_length[s]` and `start[s]` say what slot s holds:
    a prompt of that length, and completions that began at that tick of the clock."""

    slots: int
    group: int
    prompt_capacity: int
    suffix_capacity: int
    device: torch.device
    layers: dict[int, LayerCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_length = torch.zeros(self.slots, dtype=torch.long, device=self.device)
        self.start = torch.zeros(self.slots, dtype=torch.long, device=self.device)

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

    def move(self, sources: list[int], targets: list[int], *, prompt: int, suffix: int) -> None:
        """Copy what some slots hold over others; keeps the used slots the first ones.

        Args:
            prompt, suffix: tokens of the longest prompt and of the longest completion among them.
        """
        self.prompt_length[targets] = self.prompt_length[sources]
        self.start[targets] = self.start[sources]
        # One at a time: an index would copy what it finds first, and take several times as long.
        for layer in self.layers.values():
            for source, target in zip(sources, targets, strict=True):
                for tensor in layer.tensors()[:2]:
                    tensor[target, :, :prompt] = tensor[source, :, :prompt]
                for tensor in layer.tensors()[2:]:
                    tensor[target, :, :, :suffix] = tensor[source, :, :, :suffix]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a decoding step, one new token each: they see the prompt of their slot and what
    was written before them.

    Attributes:
        cache: the grid.
        slot, sample, time: of each row, in the order of slots; `time` is where its new key is
            written, the same for all rows of a slot.
    """

    cache: GroupCache
    slot: Int[Tensor, "rows"]
    sample: Int[Tensor, "rows"]
    time: Int[Tensor, "rows"]

    def given(self) -> GivenPlaces:
        """What a kernel is told of them."""
        places = (self.slot, self.sample, self.time, self.cache.prompt_length)
        require(
            all(x.is_contiguous() and x.dtype == torch.int64 for x in places)
            and len(self.slot) == len(self.sample) == len(self.time),
            "rows whose places are not int64, one after the other",
        )
        return GivenPlaces(*(x.data_ptr() for x in places), len(self.slot))


def attend_rows(
    rows: Rows,
    layer: LayerCache,
    query: Float[Tensor, "rows heads dim"],
    key: Float[Tensor, "rows key_heads dim"],
    value: Float[Tensor, "rows key_heads dim"],
    *,
    scaling: float,
    window: int | None,
) -> Float[Tensor, "rows heads dim"]:
    """Attention of one new token per row to the prompt of its slot and to its own suffix.

        softmax(q · [prompt keys; suffix keys]ᵀ · scaling) [prompt values; suffix values]

    Writes the new keys and values into the suffix first, at `time`. Records no gradient. Cost is
    that of the tokens that are there, whatever the capacity and whatever the other slots hold.

    Args:
        layer: of the cache of the rows.
        window: the last tokens that a row sees, its own included; None for all.
    """
    out = query.new_empty(query.shape)
    given = _Attention(
        *(Heads.of(x) for x in (query, key, value)), out.data_ptr(), layer.given(), rows.given(),
        query.shape[1], window or 0, torch.get_num_threads(), scaling,
    )  # fmt: skip
    require(given.places.rows == len(query), "another number of rows than of queries")
    if typed("attend", query, key, value, *layer.tensors())(ctypes.byref(given)):
        raise MemoryError(f"attention of {len(query)} rows: no memory for their scores")
    return out
