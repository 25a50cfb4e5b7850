"""Attention of packed groups on a GPU, by PyTorch's FlexAttention.

In the tokens × tokens mask of a packed row, a tree fills few blocks of 128 × 128. Only these are
computed; prompts are not copied, and only the end of the row is padded. The kernels are compiled on
first use, and used only if a trial reproduces the outputs and gradients of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from groupwise.errors import warn
from groupwise.kernels.reference import attention

BLOCK = 128
BACKEND = "inductor"
"""Compiles the kernels."""
VARIANTS = 64
"""Maximum number of torch.compile variants (static or dynamic length × grad × window)."""
TRIALS = ((300, None), (500, 90))
"""Tokens and window of the trials; with the second, torch.compile turns to dynamic lengths."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative error, in norm, that a trial accepts for a dtype."""


def tree_blocks(spans: Int[Tensor, "3 spans"], *, window: int | None) -> BlockMask:
    """Which blocks of a packed row are computed, and the mask inside them.

    Args:
        spans: as in `Tree`.
        window: the last tokens that a token attends to, itself included; None for all.
    """
    span, prompt, position = _of_tokens(spans)
    reach = len(span) if window is None else window
    return _blocks(
        len(span),
        spans.device,
        lambda _batch, _head, query, key: (
            (key <= query)
            & ((span[key] == span[query]) | (span[key] == prompt[query]))
            & (position[query] - position[key] < reach)
        ),
    )


def _blocks(tokens: int, device: torch.device, mask: Callable[..., Tensor]) -> BlockMask:
    """The blocks in which the mask is not empty."""
    some, whole = [], []
    place = torch.arange(tokens, device=device)
    for rows in place.split(BLOCK):
        blocks = mask(None, None, rows[:, None], place).unflatten(1, (-1, BLOCK))
        some.append(blocks.any(2).any(0))
        whole.append(blocks.all(2).all(0))
    full = torch.stack(whole)
    partly = torch.stack(some) & ~full
    listed = (*_listed(partly), *_listed(full))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK, mask_mod=mask)


def _of_tokens(spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The span, the span of the prompt and the position of every token. Padding up to a whole block
    is one more span."""
    begin, length, owner = spans
    order = begin.argsort(stable=True)
    padding = torch.full_like(begin[:1], -int(length.sum()) % BLOCK)
    length = torch.cat([length[order], padding])
    prompt = torch.where(owner < 0, torch.arange(len(owner), device=owner.device), owner)
    before = torch.where(owner < 0, 0, spans[1][prompt])
    last = torch.full_like(begin[:1], len(begin))
    of_span = [torch.cat(pair) for pair in ((order, last), (prompt[order], last))]
    first = length.cumsum(0) - length - torch.cat([before[order], torch.zeros_like(last)])
    span, of_prompt, shift = (x.repeat_interleave(length) for x in (*of_span, first))
    return span, of_prompt, torch.arange(len(span), device=span.device) - shift


def _listed(blocks: Bool[Tensor, "rows columns"]) -> tuple[Tensor, Tensor]:
    """The number of blocks of each row, and their indices, set ones first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def flex_tree_attention(
    query: Float[Tensor, "tokens heads dim"],
    key: Float[Tensor, "tokens key_heads dim"],
    value: Float[Tensor, "tokens key_heads dim"],
    blocks: BlockMask,
    *,
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "tokens heads dim"]:
    """softmax(cap(q · kᵀ · scaling)) v under the mask of `tree_blocks`, where
    cap(s) = softcap · tanh(s / softcap). Differentiable. Takes what `can_use_flex` accepts."""
    tokens, padding = len(query), -len(query) % BLOCK
    rows = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (query, key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in rows)
    capped = None if softcap is None else lambda x, *_: softcap * torch.tanh(x / softcap)
    with dynamo_config.patch(recompile_limit=VARIANTS):
        out = _kernel()(
            q, k, v, score_mod=capped, block_mask=blocks, scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    return out[0].transpose(0, 1)[:tokens]


@cache
def _kernel() -> Any:
    # fullgraph, so that what cannot be compiled fails instead of attending to the whole square.
    return torch.compile(flex_attention, fullgraph=True, backend=BACKEND)


def can_use_flex(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, softcap: float | None
) -> bool:
    """Whether `flex_tree_attention` takes these heads: on a GPU, after a trial with heads of their
    shape."""
    return (
        type(query) is Tensor
        and query.is_cuda
        and query.dtype == key.dtype == value.dtype
        and query.dtype in TOLERANCE
        and query.shape[-1] == value.shape[-1]
        and _works(query.device, query.dtype, (*query.shape[1:], key.shape[1]), scaling, softcap)
    )


@cache
def _works(
    device: torch.device,
    kind: torch.dtype,
    sizes: tuple[int, int, int],
    scaling: float,
    softcap: float | None,
) -> bool:
    """Whether outputs and gradients are those of the reference; warns once where they are not."""
    # Tensors that a trial saves for its backward pass must not count in an outer checkpoint.
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    try:
        with torch.inference_mode(False), torch.enable_grad(), own:
            gaps = [
                _gap(device, kind, sizes, scaling, softcap, tokens=tokens, window=window)
                for tokens, window in TRIALS
            ]
        worst = torch.stack(gaps).max().item()  # a NaN where there is one
        found = None if worst <= TOLERANCE[kind] else f"it is off by {worst:.1g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        found = reason(error)
    if found is not None:
        warn_unused(device, found)
    return found is None


def reason(error: Exception) -> str:
    """Type and first line of what a kernel raised."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def warn_unused(device: torch.device, why: str) -> None:
    """Warn that FlexAttention is not used, and why."""
    warn(
        f"FlexAttention is not used on {device} ({why}); updates use padded rectangles, "
        "which takes more time and memory."
    )


def _gap(
    device: torch.device,
    kind: torch.dtype,
    sizes: tuple[int, int, int],
    scaling: float,
    softcap: float | None,
    *,
    tokens: int,
    window: int | None,
) -> Tensor:
    """The relative error of the kernel on two prompts with two branches each."""
    heads, dim, key_heads = sizes
    part = tokens // 10
    lengths = torch.tensor([3, 1, 2, 2, 1, 1]) * part
    lengths[-1] += tokens - int(lengths.sum())
    spans = torch.stack([lengths.cumsum(0) - lengths, lengths, torch.tensor([-1, 0, 0, -1, 3, 3])])
    blocks = tree_blocks(spans.to(device), window=window)
    place = torch.arange(tokens, device=device)
    mask_mod: Any = blocks.mask_mod
    mask = mask_mod(None, None, place[:, None], place)[None, None]
    random = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tokens, each, dim, generator=random).to(device, kind).requires_grad_()
        for each in (heads, key_heads, key_heads, heads)
    ]
    *qkv, grad = inputs
    q, k, v = (x.transpose(0, 1)[None] for x in qkv)
    exact = attention(q, k, v, mask=mask, scaling=scaling, softcap=softcap)[0].transpose(0, 1)
    query, key, value = qkv
    found = flex_tree_attention(query, key, value, blocks, scaling=scaling, softcap=softcap)
    with torch.no_grad():
        alone = flex_tree_attention(query, key, value, blocks, scaling=scaling, softcap=softcap)
    wanted = [exact, exact, *torch.autograd.grad(exact, qkv, grad)]
    made = [alone, found, *torch.autograd.grad(found, qkv, grad)]
    pairs = zip(made, wanted, strict=True)
    gaps = [(a - b).detach().float().norm() / b.detach().float().norm() for a, b in pairs]
    return torch.stack(gaps).max().cpu()
