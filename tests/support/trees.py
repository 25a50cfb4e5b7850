"""Packed groups, and their attention written plainly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GROUPS: dict[str, list[tuple[int, list[int]]]] = {
    "one short": [(5, [3, 0, 1])],
    "more than a block": [(70, [65, 130]), (1, [2])],
    "equal": [(129, [127] * 4)],
    "prompts without completions": [(3, []), (100, [0]), (64, [10, 20])],
}


def laid_out(groups: list[tuple[int, list[int]]]) -> Tensor:
    """Spans of prompts and then of completions, which lie behind their prompt."""
    prompts: list[tuple[int, int, int]] = []
    completions: list[tuple[int, int, int]] = []
    end = 0
    for owner, (prompt, lengths) in enumerate(groups):
        prompts.append((end, prompt, -1))
        end += prompt
        for length in lengths:
            completions.append((end, length, owner))
            end += length
    return torch.tensor(prompts + completions).t().contiguous()


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Attention span by span, with a mask."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    parts = torch.zeros_like(query)
    for begin, length, owner in spans.t().tolist():
        own = torch.arange(begin, begin + length)
        first, size = (0, 0) if owner < 0 else spans[:2, owner].tolist()
        seen = torch.cat([torch.arange(first, first + size), own])
        distance = torch.arange(size, size + length)[:, None] - torch.arange(size + length)
        mask = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = torch.einsum("qhd,khd->hqk", query[own], key[seen]) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        parts = parts.index_put((own,), torch.einsum("hqk,khd->qhd", weights, value[seen]))
    return parts


def tensors(heads: int, key_heads: int, dim: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads * dim + tokens)
    shapes = [(tokens, heads, dim), *[(tokens, key_heads, dim)] * 2, (tokens, heads, dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check_attention(
    attend: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    given: list[Tensor],
    *,
    accuracy: float = 1e-5,
) -> None:
    """Output and gradients against those of the plain one in float64."""
    *parts, grad = given
    parts = [x.detach().requires_grad_() for x in parts]
    wide = [x.detach().double().requires_grad_() for x in parts]
    wanted = plain(*wide)
    wanted.backward(grad.double())
    found = attend(*parts)
    found.backward(grad)
    pairs = [(found, wanted), *[(x.grad, y.grad) for x, y in zip(parts, wide, strict=True)]]
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert one.dtype == parts[0].dtype
        assert (one.double() - other).abs().max() <= accuracy * max(1.0, other.abs().max())
