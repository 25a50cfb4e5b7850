"""Attention of a decoding step to the grid of a rollout's cache, in C++ (`cpp/decoding.cpp`)."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.kernels import structures
from groupwise.kernels.cpu import typed
from groupwise.kernels.interface import DecodeRows, LayerCache
from groupwise.kernels.structures import Heads, require


def cache_structure(layer: LayerCache) -> structures.Cache:
    """The cache of one layer as the structure that kernels take."""
    _, key_heads, group, suffix, dim = layer.suffix_key.shape
    pointers = (x.data_ptr() for x in layer.tensors())
    return structures.Cache(*pointers, key_heads, dim, group, layer.prompt_key.shape[2], suffix)


def places_structure(rows: DecodeRows) -> structures.Places:
    """The places of rows in the cache as the structure that kernels take."""
    places = (rows.slot, rows.sample, rows.time, rows.cache.prompt_length)
    require(
        all(x.is_contiguous() and x.dtype == torch.int64 for x in places)
        and len(rows.slot) == len(rows.sample) == len(rows.time),
        "slot, sample and time of rows must be contiguous int64 of one length",
    )
    return structures.Places(*(x.data_ptr() for x in places), len(rows.slot))


def decode_attention(
    rows: DecodeRows,
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

    Writes the new keys and values into the suffix first, at `time`. Records no gradient. The
    cost depends on the tokens that are present, not on the capacity or on other slots.

    Args:
        layer: of the cache of the rows.
        window: the last tokens that a row attends to, its own included; None for all.
    """
    out = query.new_empty(query.shape)
    call = structures.Attention(
        *(Heads.of(x) for x in (query, key, value)), out.data_ptr(), cache_structure(layer),
        places_structure(rows), query.shape[1], window or 0, torch.get_num_threads(), scaling,
    )  # fmt: skip
    require(call.places.rows == len(query), "queries must be as many as rows")
    if typed("attend", query, key, value, *layer.tensors())(ctypes.byref(call)):
        raise MemoryError(f"attention of {len(query)} rows: out of memory")
    return out
