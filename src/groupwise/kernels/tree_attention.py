"""Attention of packed groups on a CPU, forward and backward, in C++ (`cpp/tree_attention.cpp`).

PyTorch's attention takes rectangles: the keys and values of a prompt have to be copied to every
completion, and what a completion does not attend to is computed and masked. This kernel attends to
spans of tokens in place, and computes nothing else. Where the processor has the tiles of AMX, heads
in bfloat16 are multiplied in them (`cpp/tile_attention.cpp`); elsewhere they are converted to
float32.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.kernels import structures
from groupwise.kernels.cpu import multiplies_tiles, typed
from groupwise.kernels.structures import Heads


def tree_attention(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens key_heads dim"],
    value: Float[Tensor, "tokens key_heads dim"],
    spans: Int64[Tensor, "3 spans"],
    *,
    prompts: int,
    scaling: float,
    window: int | None,
) -> Float[Tensor, "tokens heads dim"]:
    """softmax(q · kᵀ · scaling) v, where a token attends to its span up to itself and, before that,
    to the span's prompt. Takes what `can_use_attention` accepts. Computed in float32;
    differentiable.

    Args:
        spans: as in `Tree`.
        prompts: how many of the spans are prompts.
        window: the last tokens that a token attends to, itself included; None for all.
    """
    apply: Any = _TreeAttention.apply
    return apply(query, key, value, spans, prompts, scaling, window)


TILE = 32
"""Tokens of a block of the kernel in bfloat16. Every span starts a new one."""
SHORTEST = 32
"""Tokens per completion from which on that kernel is used: of fewer, blocks are mostly empty."""


def _kernel(query: Tensor, spans: Tensor, *, prompts: int) -> torch.dtype:
    """The dtype of the kernel: bfloat16 where the processor has tiles for it."""
    short = SHORTEST * (spans.shape[1] - prompts) > len(query)
    tiles = query.dtype == torch.bfloat16 and not short and multiplies_tiles()
    return torch.bfloat16 if tiles else torch.float32


def _workspace(key: Tensor, spans: Tensor, *, parts: int) -> Tensor | None:
    """Memory of the kernel in bfloat16: two copies of all keys, or, for gradients, three, and two
    float32 sums for each of the parts."""
    if key.dtype != torch.bfloat16:
        return None
    _, heads, dim = key.shape
    blocks = len(key) // TILE + spans.shape[1]  # at most
    copies = 3 + 4 * parts if parts else 2
    return key.new_empty(copies * heads * blocks * TILE * -(-dim // TILE) * TILE)


class _TreeAttention(torch.autograd.Function):
    """Saves queries, keys and values as they come; of 16 bits it makes float32 copies twice, except
    where there are tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Tensor,
        prompts: int,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        dtype = _kernel(query, spans, prompts=prompts)
        out = query.new_empty(query.shape, dtype=dtype)
        norm = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, spans, norm)
        ctx.prompts, ctx.scaling, ctx.window = prompts, scaling, window
        heads = query.to(dtype), key.to(dtype), value.to(dtype)
        memory = _workspace(heads[1], spans, parts=0)
        _call("tree_forward", (*heads, spans, out, norm), scaling, window, memory=memory)
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Float[Tensor, "tokens heads dim"]
    ) -> tuple[Tensor | None, ...]:
        # Unpacked once: what checkpointing recomputes can be read a single time.
        *given, spans, norm = ctx.saved_tensors
        dtype = _kernel(given[0], spans, prompts=ctx.prompts)
        query, key, value = (x.to(dtype) for x in given)
        # Enough parts for all threads; the parts are added in order, so that the sum does not
        # depend on scheduling.
        parts = -(-torch.get_num_threads() // (ctx.prompts * key.shape[1]))
        d_query = query.new_empty(query.shape)
        # In float32, the kernel adds to every part; in bfloat16, it writes their sum.
        each = (parts, *key.shape) if dtype == torch.float32 else (1, *key.shape)
        d_key, d_value = (key.new_zeros(each) for _ in range(2))
        buffers = (grads[0].to(dtype).contiguous(), d_query, d_key, d_value)
        saved = (query, key, value, spans, None, norm)
        memory = _workspace(key, spans, parts=parts)
        _call("tree_backward", saved, ctx.scaling, ctx.window, buffers, memory=memory, parts=parts)
        if len(d_key) > 1:
            d_key, d_value = d_key.sum(0, keepdim=True), d_value.sum(0, keepdim=True)
        found = (d.to(given[0].dtype) for d in (d_query, d_key[0], d_value[0]))
        return *found, *(None,) * 4


def _call(
    name: str,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor],
    scaling: float,
    window: int | None,
    gradients: tuple[Tensor, ...] = (),
    *,
    memory: Tensor | None,
    parts: int = 1,
) -> None:
    query, key, value, spans, out, norm = saved
    pointers = [None if x is None else x.data_ptr() for x in (out, norm, *gradients)]
    call = structures.Tree(
        *(Heads.of(x) for x in (query, key, value)),
        *pointers, *[None] * (6 - len(pointers)), None if memory is None else memory.data_ptr(),
        *(x.data_ptr() for x in spans),
        spans.shape[1], *query.shape[:2], key.shape[1], query.shape[2],
        window or 0, parts, torch.get_num_threads(), scaling,
    )  # fmt: skip
    if typed(name, query, key, value)(ctypes.byref(call)):
        raise MemoryError(f"attention of {len(query)} tokens: out of memory")
