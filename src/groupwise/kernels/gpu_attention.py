"""Attention of packed groups on a GPU, forward and backward, in Triton (`triton_attention.py`).

As on a CPU, spans of tokens are attended to in place: prompts are not copied, and steps of which
the mask leaves nothing are not computed. PyTorch's FlexAttention, which takes any mask, needs seven
times as long, and most of a minute to compile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.errors import warn
from groupwise.kernels.build import real_tensors, takes, takes_fake_tensors
from groupwise.kernels.gpu import LONGEST, TYPES, Nothing, fault, power
from groupwise.kernels.reference import attention


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a program takes: tokens of its block and of a step, warps, and steps loaded ahead."""

    block: int
    step: int
    warps: int
    stages: int


def _sizes(kind: torch.dtype, dim: int) -> tuple[Sizes, Sizes]:
    """Sizes of the forward and of the backward pass. Those for heads of up to 64 numbers in 16 bits
    were the fastest of several on an H200; the others are chosen so that few registers spill. Heads
    of up to 256 need less than 99 KiB of shared memory, which is what a consumer's card has."""
    if kind == torch.float32:
        forward = Sizes(block=32, step=32 if dim <= 64 else 16, warps=4, stages=1)
        return forward, replace(forward, block=forward.step)
    if dim <= 64:
        forward = Sizes(block=64, step=64, warps=4, stages=3)
        return forward, replace(forward, stages=2)
    if dim <= 128:
        forward = Sizes(block=128, step=64, warps=8, stages=2)
        return forward, replace(forward, step=32)
    forward = Sizes(block=64, step=32, warps=4, stages=2)
    return forward, replace(forward, block=32)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the spans of a packed row are divided among programs.

    Attributes:
        spans: begin, length and owner of every span.
        of_block: span of every block, and its first token inside the span. Behind the last block
            are some whose span does not exist: their number is not known without waiting for the
            GPU.
        branches: the spans, ordered by owner; and where in this list the branches of every span
            begin and end.
    """

    spans: Int32[Tensor, "3 spans"]
    of_block: Int32[Tensor, "2 blocks"]
    branches: Int32[Tensor, "3 spans"]


def blocks_of(spans: Int[Tensor, "3 spans"], *, tokens: int, size: int) -> Blocks:
    """The blocks of spans, each of up to `size` tokens.

    Args:
        spans: as in `Tree`.
        tokens: of all spans together.
    """
    _, length, owner = spans
    each = torch.arange(spans.shape[1], device=spans.device)
    counts = (length + size - 1) // size
    ends = counts.cumsum(0)
    place = torch.arange(tokens // size + len(each), device=spans.device)  # at most
    span = torch.searchsorted(ends, place, right=True)
    first = (place - (ends - counts)[span.clamp(max=len(each) - 1)]) * size
    by_owner, order = owner.sort(stable=True)
    ranges = [torch.searchsorted(by_owner, each, right=right) for right in (False, True)]
    return Blocks(
        spans=spans.int().contiguous(),
        of_block=torch.stack([span, first]).int(),
        branches=torch.stack([order, *ranges]).int(),
    )


def can_use_gpu_attention(
    query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None, window: int | None
) -> bool:
    """Whether `gpu_tree_attention` takes these heads: on the current GPU, after a trial with heads
    of their size."""
    return (
        takes(query)
        and query.is_cuda
        and all(len(x) * x.stride(0) < 2**31 for x in (query, key, value))  # offsets in 32 bits
        and query.device.index == torch.cuda.current_device()
        and query.dtype == key.dtype == value.dtype
        and query.dtype in TYPES
        and query.shape[-1] == value.shape[-1]
        and _works(
            query.device,
            query.dtype,
            query.shape[-1],
            alone=query.shape[1] == key.shape[1],
            windowed=window is not None,
            capped=softcap is not None,
        )
    )


def gpu_tree_attention(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens key_heads dim"],
    value: Float[Tensor, "tokens key_heads dim"],
    spans: Int[Tensor, "3 spans"],
    blocks: dict[int, Blocks],
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Float[Tensor, "tokens heads dim"]:
    """softmax(cap(q · kᵀ · scaling)) v, where a token attends to its span up to itself and, before
    that, to the span's prompt; cap(s) = softcap · tanh(s / softcap). Sums are in float32.
    Differentiable. Takes what `can_use_gpu_attention` accepts.

    Args:
        spans: as in `Tree`.
        blocks: keeps their blocks for the next layers, by size.
        window: the last tokens that a token attends to, itself included; None for all.
    """
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    sizes = _sizes(query.dtype, query.shape[2])
    for each in sizes:
        if each.block not in blocks:
            blocks[each.block] = blocks_of(spans, tokens=len(query), size=each.block)
    how = {"scaling": scaling, "window": window, "softcap": softcap}
    apply: Any = _TreeAttention.apply
    return apply(query, key, value, [(each, blocks[each.block]) for each in sizes], how)


class _TreeAttention(torch.autograd.Function):
    """Saves queries, keys, values and outputs, and the norm of every softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sizes: list[tuple[Sizes, Blocks]],
        how: dict[str, Any],
    ) -> Tensor:
        out = query.new_empty(query.shape)
        norms = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        ctx.sizes, ctx.how = sizes, how
        _launch("forward", (query, key, value, out, norms), *sizes[0], **how)
        ctx.save_for_backward(query, key, value, out, norms)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Float[Tensor, "tokens heads dim"]
    ) -> tuple[Tensor | None, ...]:
        # Unpacked once: what checkpointing recomputes can be read a single time.
        query, key, value, out, norms = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_query, shares = torch.empty_like(out), torch.empty_like(norms)
        given = (query, key, value, out, grad, d_query, norms, shares)
        _launch("query_gradient", given, *ctx.sizes[1], **ctx.how)
        tokens, heads, dim = query.shape
        alone = heads == key.shape[1]
        kind = query.dtype if alone else torch.float32
        d_keys, d_values = query.new_empty(2, tokens, heads, dim, dtype=kind)
        given = (query, key, value, grad, d_keys, d_values, norms, shares)
        _launch("key_gradient", given, *ctx.sizes[1], **ctx.how)
        if not alone:
            d_keys, d_values = (
                d.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for d in (d_keys, d_values)
            )
        return d_query, d_keys, d_values, None, None


def _launch(
    name: str,
    tensors: tuple[Tensor, ...],
    sizes: Sizes,
    blocks: Blocks,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> None:
    query, key, value = tensors[:3]
    tokens, heads, dim = query.shape
    listed = [blocks.branches] if name == "key_gradient" else []
    strides = (stride for x in (query, key, value) for stride in x.stride()[:2])
    getattr(_kernels(), name)[blocks.of_block.shape[1], heads](
        *tensors, blocks.of_block, blocks.spans, *listed, blocks.spans.shape[1], tokens,
        *strides, heads // key.shape[1], LONGEST if window is None else window, scaling,
        softcap or 1.0,
        dim=dim, DIM=max(16, power(dim)), BLOCK=sizes.block, STEP=sizes.step,
        WINDOWED=window is not None, CAPPED=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _kernels() -> Any:
    if takes_fake_tensors():
        return Nothing()
    from groupwise.kernels import triton_attention

    return triton_attention


@cache
def _works(
    device: torch.device,
    kind: torch.dtype,
    dim: int,
    *,
    alone: bool,
    windowed: bool,
    capped: bool,
) -> bool:
    """Whether outputs and gradients are those of the reference; warns once where they are not.

    Args:
        alone: every head of queries has keys of its own.
    """
    # Tensors that a trial saves for its backward pass must not count in an outer checkpoint.
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    how = {"window": 90 if windowed else None, "softcap": 3.0 if capped else None}
    with real_tensors(), torch.inference_mode(False), torch.enable_grad(), own:
        found = fault(lambda: _gap(device, kind, dim, key_heads=4 if alone else 2, **how), kind)
    if found is not None:
        warn_unused(device, found)
    return found is None


def warn_unused(device: torch.device, why: str) -> None:
    """Warn that the kernels are not used, and why."""
    warn(
        f"Attention by Triton is not used on {device} ({why}); updates use padded rectangles, "
        "which takes more time and memory."
    )


def _gap(
    device: torch.device,
    kind: torch.dtype,
    dim: int,
    *,
    key_heads: int,
    window: int | None,
    softcap: float | None,
) -> float:
    """The relative error of the kernels on two prompts with two branches each."""
    length = torch.tensor([150, 9, 140, 1, 100, 200])
    owner = torch.tensor([-1, -1, 0, 0, 1, 1])
    spans = torch.stack([length.cumsum(0) - length, length, owner])
    tokens = int(length.sum())
    random = torch.Generator("cpu").manual_seed(0)
    query, key, value, grad = (
        torch.randn(tokens, heads, dim, generator=random, device="cpu").to(device, kind)
        for heads in (4, key_heads, key_heads, 4)
    )
    how = {"scaling": 0.2, "softcap": softcap}
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    own = [x.requires_grad_() for x in (query, key, value)]
    found = gpu_tree_attention(query, key, value, spans.to(device), {}, window=window, **how)
    exact = attention(
        *(x.transpose(0, 1)[None] for x in wide), mask=_mask(spans, window).to(device), **how
    )[0].transpose(0, 1)
    pairs = zip(
        [found, *torch.autograd.grad(found, own, grad)],
        [exact, *torch.autograd.grad(exact, wide, grad.double())],
        strict=True,
    )
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs]).max().item()


def _mask(spans: Tensor, window: int | None) -> Tensor:
    """Which token attends to which, of spans that lie one after the other."""
    _, length, owner = spans
    span = torch.arange(len(length)).repeat_interleave(length)
    prompt = torch.where(owner < 0, torch.arange(len(owner)), owner)[span]
    place = torch.arange(len(span))
    position = place - spans[0][span] + torch.where(owner < 0, 0, length[owner.clamp(min=0)])[span]
    distance = position[:, None] - position
    seen = (span[:, None] == span) | (prompt[:, None] == span)
    seen &= (distance >= 0) & (distance < (LONGEST if window is None else window))
    return seen[None, None]
