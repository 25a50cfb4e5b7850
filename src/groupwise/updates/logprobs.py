"""Log-probabilities from hidden states, in chunks, so that [tokens, vocab] never exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.models import head_product, product

CHUNK_BYTES = 30 * 2**20
KEEP_BYTES = 224 * 2**20
PIECE = 2**21
"""Entries of a weight's gradient that are added at once in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The output projection and what is done to its logits before the softmax.

    Attributes:
        weight, bias: of the projection.
        softcap: logits become softcap · tanh(logits / softcap) where it is set.
        temperature: the sampler's; logits are divided by it, so that log-probabilities are of what
            was sampled from.
        chunk_bytes: size of one float32 logits buffer; two and a half exist at a time.
        keep_bytes: probabilities kept for the backward pass up to this size, recomputed beyond it.
        wide: compute the product in float32 whatever the type of its factors.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0
    chunk_bytes: int = CHUNK_BYTES
    keep_bytes: int = KEEP_BYTES
    wide: bool = False

    def chunks(self, tokens: int) -> list[slice]:
        size = max(16, self.chunk_bytes // (4 * self.weight.shape[0]) // 16 * 16)
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


Kept = Callable[[slice], Bool[Tensor, "chunk vocab"]]


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    target: Int[Tensor, "tokens"],
    head: Head,
    *,
    entropy: bool = False,
    kept: Kept | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"] | None]:
    """log π(target | hidden) and, if asked for, the entropy of π at every token; differentiable.

        z    = cap(hidden · Wᵀ + b) / temperature,   −inf outside the kept set
        logp = z[target] − logsumexp(z)
        H    = −Σ_v π_v log π_v

    Args:
        hidden: states at the positions that predict.
        target: the tokens they predict.
        head: projection, soft cap, temperature, sizes of buffers.
        entropy: whether to compute H.
        kept: for truncated sampling, which tokens a chunk's rows could have drawn.

    Returns:
        float32 (float64 for a float64 model); memory linear in the chunk, not in tokens × vocab.
    """
    anchor = head.weight if head.weight.requires_grad else None
    apply: Any = _TokenLogprobs.apply
    logp, h = apply(hidden, anchor, head.bias, target, head, entropy, kept)
    return logp, (h if entropy else None)


def _logits(hidden: Tensor, head: Head, kept: Bool[Tensor, "chunk vocab"] | None) -> Tensor:
    """z of one chunk, before division by the temperature's effect on the kept set matters (it does
    not)."""
    z = head_product(hidden, head.weight, wide=head.wide)
    if head.bias is not None:
        z = z + head.bias
    if z.dtype in (torch.bfloat16, torch.float16):
        z = z.float()
    if head.softcap is not None:
        z = z.div_(head.softcap).tanh_().mul_(head.softcap)
    if head.temperature != 1.0:
        z = z.div_(head.temperature)
    return z if kept is None else z.masked_fill_(~kept, float("-inf"))


class _TokenLogprobs(torch.autograd.Function):
    """Forward in chunks; backward recomputes the logits of a chunk, or uses its kept
    probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        head: Head,
        entropy: bool,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        h = torch.zeros_like(logp)
        room = head.keep_bytes if any(ctx.needs_input_grad) and head.softcap is None else 0
        probs: list[Tensor | None] = []
        for rows in head.chunks(len(hidden)):
            z = _logits(hidden[rows], head, None if kept is None else kept(rows))
            own = z.gather(-1, target[rows, None])
            top, place = z.max(-1, keepdim=True)
            p = torch.softmax(z, -1, out=z)
            # The fused softmax is the only pass over the vocabulary that exponentiates; its own
            # normaliser is read off where it is most precise, at the largest logit.
            lse = top - p.gather(-1, place).log()
            logp[rows] = (own - lse).squeeze(-1)
            if entropy:
                h[rows] = torch.special.entr(p).sum(-1)
            size = p.numel() * p.element_size()
            keep = size <= room
            probs.append(p if keep else None)
            room -= size if keep else 0
            del z, p
        ctx.save_for_backward(hidden, target, h)
        ctx.head, ctx.entropy, ctx.kept, ctx.probs = head, entropy, kept, probs
        return logp, h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad, grad_h = grads
        hidden, target, h = ctx.saved_tensors
        head: Head = ctx.head
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight: Tensor | None = None
        d_bias = (
            torch.zeros(len(head.weight), dtype=h.dtype, device=hidden.device)
            if want_bias
            else None
        )
        for index, rows in enumerate(head.chunks(len(hidden))):
            p, slope = ctx.probs[index], None
            ctx.probs[index] = None
            if p is None:
                p = _logits(hidden[rows], head, None if ctx.kept is None else ctx.kept(rows))
                if head.softcap is not None:
                    # d cap(x)/dx = 1 − (cap(x)/softcap)², and z·temperature is cap(x); 0 where −inf
                    # was filled in.
                    slope = (
                        1 - (p * (head.temperature / head.softcap)).nan_to_num(neginf=1.0).square()
                    )
                p = torch.softmax(p, -1, out=p)
            extra = None
            if ctx.entropy:
                extra = (torch.special.entr(p) - p * h[rows, None]) * grad_h[rows, None]
            d = p.mul_(-grad[rows, None])
            d.scatter_add_(1, target[rows, None], grad[rows, None].to(d.dtype))
            if extra is not None:
                d += extra
            if slope is not None:
                d *= slope
            if head.temperature != 1.0:
                d /= head.temperature
            narrow = d.to(head.weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = product(narrow, head.weight.t())
            if want_weight:
                d_weight = _add_product(d_weight, narrow, hidden[rows])
            if d_bias is not None:
                d_bias += d.sum(0)
            del p, d, narrow
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(head.weight.dtype),
            None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype),
            *(None,) * 4,
        )


def _add_product(
    total: Float[Tensor, "vocab hidden"] | None, d: Tensor, hidden: Tensor
) -> Float[Tensor, "vocab hidden"]:
    """total + dᵀ · hidden, in place, and in float32 at least.

    Added in pieces, because PyTorch makes a float32 copy of what is added in 16 bits.
    """
    if total is not None and d.dtype == total.dtype:
        return total.addmm_(d.t(), hidden)
    more, piece = d.t() @ hidden, max(1, PIECE // hidden.shape[1])
    if total is None:
        return more.to(torch.promote_types(d.dtype, torch.float32))
    for part, addend in zip(total.split(piece), more.split(piece), strict=True):
        part += addend
    return total
