"""The definition of every operation in PyTorch: the backend "torch", what "auto" falls back to, and
what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from groupwise.kernels.interface import (
    BACKENDS,
    Affine,
    Decoder,
    DecoderLayer,
    DecodeRows,
    LayerCache,
    Norm,
    SplitAdamW,
    Tree,
)

PIECE = 2**21
"""Entries of a 16-bit product that are added at once."""
BLOCK = 256
"""Rows of an adapter's product that are computed at once on a CPU, whose caches hold their float32
copies."""


class Reference:
    """Every operation in PyTorch. `Backend` documents the methods."""

    def description(self, device: torch.device) -> str:
        return "torch"

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · Wᵀ"""
        return x @ weight.t()

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """left · right; records no gradient."""
        return left @ right

    def add_matmul(self, total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
        """total + left · right, in place, in float32 at least; records no gradient.

        Products of 16 bits are added in pieces, because PyTorch makes a float32 copy of each.
        """
        if total is not None and left.dtype == total.dtype:
            return total.addmm_(left, right)
        more, piece = left @ right, max(1, PIECE // right.shape[1])
        if total is None:
            return more.to(torch.promote_types(left.dtype, torch.float32))
        for part, addend in zip(total.split(piece), more.split(piece), strict=True):
            part += addend
        return total

    def low_rank(
        self, x: Tensor, a: Tensor, b: Tensor, *, onto: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """onto + scaling · (x · aᵀ) · bᵀ, computed in the dtype of a and b and returned in that of
        `onto` or x, and x · aᵀ."""
        out = torch.empty(
            len(x), len(b), dtype=(x if onto is None else onto).dtype, device=x.device
        )
        inner = a.new_empty(len(x), len(a))
        for part in _blocks(x):
            inner[part] = self.matmul(x[part].to(a.dtype), a.t())
            product = self.matmul(inner[part], b.t()).mul_(scaling)
            out[part] = product if onto is None else product.add_(onto[part])
        return out, inner

    def low_rank_gradient(self, inner: Tensor, x: Tensor, *, scaling: float) -> Tensor:
        """scaling · innerᵀ · x, computed in the dtype of `inner`."""
        total = inner.new_zeros(inner.shape[1], x.shape[1])
        for part in _blocks(x):
            total = self.add_matmul(total, inner[part].t(), x[part].to(inner.dtype))
        return total.mul_(scaling)

    def draw(self, logits: Tensor, uniform: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Inverse-CDF sampling from softmax(logits / temperature): one token per row, and its
        log-probability."""
        if temperature != 1.0:
            logits = logits / temperature
        return inverse_cdf(torch.softmax(logits, -1), uniform)

    def selective_log_softmax(
        self, logits: Tensor, target: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """z[target] − log Σ e^z for z = logits / temperature, and −Σ p · log p."""
        top = logits.amax(-1)
        z = _tempered(logits, temperature)
        own = z.gather(-1, target[:, None]).squeeze(-1)
        most = softmax_(z)
        logp = own - (top.to(z.dtype) / temperature - most.log())
        h = torch.special.entr(z).sum(-1) if entropy else None
        return logp, h, torch.stack([top.to(z.dtype), 1 / most], -1)

    def selective_log_softmax_backward_(
        self,
        logits: Tensor,
        target: Tensor,
        grad: Tensor,
        *,
        temperature: float,
        entropy: tuple[Tensor, Tensor] | None,
        norm: Tensor | None,
    ) -> None:
        """With p = softmax(logits / temperature) and the entropy h, logits become

        ((1[target] − p) · grad − (p · log p + p · h) · grad_h) / temperature.
        """
        p = _tempered(logits, temperature, copy=False)
        softmax_(p)
        extra = None
        if entropy is not None:
            h, grad_h = entropy
            extra = (torch.special.entr(p) - p * h[:, None]) * grad_h[:, None]
        d = p.mul_(-grad[:, None]).scatter_add_(1, target[:, None], grad[:, None].to(p.dtype))
        if extra is not None:
            d += extra
        if temperature != 1.0:
            d.div_(temperature)
        if d is not logits:
            logits.copy_(d)

    def causal_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        length: int,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention within sequences of one length, one after the other."""
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
        mask = None
        if window is not None and window < length:
            place = torch.arange(length, device=query.device)
            mask = within_window(place[:, None], place, window)[None, None]
        out = attention(q, k, v, mask=mask, scaling=scaling, softcap=softcap)
        return out.transpose(1, 2).flatten(0, 1)

    def tree_attention(
        self,
        tree: Tree,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Prompts attend causally to themselves, branches to their prompt and causally to
        themselves. Fused kernels require rectangles; only attention computes their padding."""
        prompt_mask, branch_mask = _tree_masks(tree, window)
        q, k, v = (_cells(x, tree.prompt_index) for x in (query, key, value))
        out = attention(q, k, v, mask=prompt_mask, scaling=scaling, softcap=softcap)
        out = out.transpose(1, 2).flatten(0, 1)
        if tree.branch_index.numel():
            own_q, own_k, own_v = (_cells(x, tree.branch_index) for x in (query, key, value))
            keys = torch.cat([k.index_select(0, tree.owner), own_k], 2)
            values = torch.cat([v.index_select(0, tree.owner), own_v], 2)
            branches = attention(
                own_q, keys, values, mask=branch_mask, scaling=scaling, softcap=softcap
            )
            out = torch.cat([out, branches.transpose(1, 2).flatten(0, 1)])
        return out.index_select(0, tree.inverse)

    def decode_attention(
        self,
        rows: DecodeRows,
        layer: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one new token per row to its prompt and its own suffix, into which its key
        and value are written first.

            scores = [ q · promptᵀ | q · suffixᵀ ] · scaling      [S, K, G·heads/K, P + T]
            out    = softmax(scores + mask) [prompt values; suffix values]

        The queries of all G completions of a prompt meet its keys in one matrix product.
        """
        if rows.order is not None:
            out = torch.empty_like(query)
            for index, part in _decode_parts(rows):
                out[index] = self.decode_attention(
                    part, layer, query[index], key[index], value[index],
                    scaling=scaling, window=window, softcap=softcap,
                )  # fmt: skip
            return out
        used, group = rows.used, rows.cache.group
        (count, heads, dim), key_heads = query.shape, key.shape[1]
        repeats, keys = heads // key_heads, rows.prompt + rows.suffix
        place = _suffix_place(rows, key_heads)
        layer.suffix_key.view(-1, dim).index_copy_(0, place, key.reshape(-1, dim))
        layer.suffix_value.view(-1, dim).index_copy_(0, place, value.reshape(-1, dim))
        full = count == used * group
        if not full:
            query = query.new_zeros(used * group, heads, dim).index_copy_(0, rows.rows, query)
        grid = query.reshape(used, group, key_heads, repeats, dim).transpose(1, 2)
        q = grid.reshape(used * key_heads, group * repeats, dim)
        own = q.reshape(used * key_heads * group, repeats, dim)
        prompt_key = layer.prompt_key[:used, :, : rows.prompt].flatten(0, 1).transpose(1, 2)
        suffix_key = layer.suffix_key[:used, :, :, : rows.suffix].flatten(0, 2).transpose(1, 2)
        to_prompt = torch.baddbmm(q.new_zeros(()), q, prompt_key, beta=0, alpha=scaling)
        to_suffix = torch.baddbmm(q.new_zeros(()), own, suffix_key, beta=0, alpha=scaling)
        scores = torch.cat([to_prompt, to_suffix.view(len(q), -1, rows.suffix)], -1)
        scores = scores.view(used, key_heads, group * repeats, keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None or not rows.aligned:
            of_rows = scores.view(used, key_heads, group, repeats, keys)
            of_rows += _decode_mask(rows, window, scores.dtype)
        weights = _softmax(scores)
        prompt_value = layer.prompt_value[:used, :, : rows.prompt].flatten(0, 1)
        suffix_value = layer.suffix_value[:used, :, :, : rows.suffix].flatten(0, 2)
        out = torch.bmm(weights.view(len(q), -1, keys)[..., : rows.prompt], prompt_value)
        out = torch.baddbmm(
            out.view(len(own), repeats, dim),
            weights.view(len(own), repeats, keys)[..., rows.prompt :],
            suffix_value,
        )
        out = out.view(used, key_heads, group, repeats, dim).transpose(1, 2)
        out = out.reshape(used * group, heads, dim)
        return out if full else out.index_select(0, rows.rows)

    def gradient_norm(self, grad: Tensor) -> Tensor:
        """√Σ g², in float32."""
        return torch.linalg.vector_norm(grad, dtype=torch.float32)

    def split_adamw(self, parameter: Tensor) -> SplitAdamW | None:
        """None: the optimizer's own step is the definition."""
        return None

    def training_layers(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def inference_layers(self, model: nn.Module, *, rows: int) -> AbstractContextManager[None]:
        return nullcontext()

    def shapes_only(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copied_bytes(self, model: nn.Module, *, four_bit: Collection[nn.Module]) -> int:
        return 0

    def decoder(
        self,
        layers: Sequence[DecoderLayer],
        *,
        norm: Norm,
        rotation: tuple[Tensor, Tensor],
        head: Affine | None,
    ) -> Decoder | None:
        """None: the model's own modules are the definition."""
        return None

    def replayed(
        self, hidden: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
    ) -> Callable[..., Tensor]:
        return hidden


BACKENDS["torch"] = Reference


def _tempered(
    logits: Float[Tensor, "rows vocab"], temperature: float, *, copy: bool = True
) -> Float[Tensor, "rows vocab"]:
    """Logits / temperature, in float32 at least: a copy, or in place where they are as wide."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)
    return wide if temperature == 1.0 else wide.div_(temperature)


def softmax_(x: Float[Tensor, "rows size"]) -> Float[Tensor, "rows"]:
    """Softmax of every row, in place; returns the largest probability, 1 / Σ e^(x − max x), where
    the normaliser can be read off most precisely."""
    torch.softmax(x, -1, out=x)  # the only pass that exponentiates
    return x.amax(-1)


def rising(
    cdf: Float[Tensor, "rows vocab"], probs: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    """A cumulative distribution that rises at tokens of positive probability only.

    A parallel scan on a GPU adds in a different order at every position, so rounding can make it
    fall and rise again, even where the probability is 0.
    """
    return torch.where(probs > 0, cdf, 0).cummax(-1).values


def inverse_cdf(
    probs: Float[Tensor, "rows vocab"], uniform: Float[Tensor, "rows"]
) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:
    """The first token of each row whose cumulative probability exceeds the row's uniform number,
    and the logarithm of its probability."""
    cdf = probs.cumsum(-1)
    if cdf.device.type != "cpu":
        cdf = rising(cdf, probs)
    total = cdf[:, -1]
    # u·total may round up to total; the largest number below it still has a token whose step of the
    # CDF contains it.
    target = torch.minimum(
        uniform.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    # NaN logits index past the end, so clamp; their log-probability is NaN.
    tokens = torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)
    tokens = tokens.clamp(max=cdf.shape[-1] - 1)
    return tokens, probs.gather(-1, tokens[:, None]).squeeze(-1).log()


def within_window(
    query_position: Int[Tensor, "*query"], key_position: Int[Tensor, "*key"], window: int | None
) -> Bool[Tensor, "*pair"]:
    """Whether a key lies in the sliding window of a query (its own position counts as the first of
    `window`)."""
    distance = query_position - key_position
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def attention(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows key_heads keys dim"],
    value: Float[Tensor, "rows key_heads keys dim"],
    *,
    mask: Bool[Tensor, "#rows 1 queries keys"] | None,
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "rows heads queries dim"]:
    """Attention with grouped-query heads, causal where no mask is given.

    `softmax(cap(q·kᵀ · scaling)) v`, where cap(s) = softcap · tanh(s / softcap) as in Gemma 2 and
    the identity where `softcap` is None. Fused (`scaled_dot_product_attention`) unless a soft cap
    forbids it.
    """
    narrow = query.dtype
    if query.device.type == "cpu" and narrow in (torch.bfloat16, torch.float16):
        # The backward pass of a CPU's fused attention takes 1.5 times as long in 16 bits.
        query, key, value = query.float(), key.float(), value.float()
    return _attention(query, key, value, mask=mask, scaling=scaling, softcap=softcap).to(narrow)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """`attention` in the dtype of its arguments."""
    gqa = query.shape[1] != key.shape[1]
    # On a card, no fused kernel takes both a mask and grouped heads; PyTorch would hold the scores
    # of all heads. Copies of the keys cost less.
    masked_on_card = mask is not None and query.device.type != "cpu"
    if gqa and (softcap is not None or masked_on_card):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        gqa = False
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def _tree_masks(
    tree: Tree, window: int | None
) -> tuple[Bool[Tensor, "1 1 _ _"] | None, Bool[Tensor, "branch 1 _ _"]]:
    """Masks of the prompts (None: plain causal) and of the branches; made once per window width."""
    if window not in tree.masks:
        device = tree.prompt_index.device
        place = torch.arange(tree.prompt_index.shape[1], device=device)
        step = torch.arange(tree.branch_index.shape[1], device=device)
        prompts = None
        if window is not None and window < len(place):
            prompts = within_window(place[:, None], place, window)[None, None]
        length = tree.prompt_length[tree.owner][:, None, None]
        position = length + step[:, None]
        to_prompt = (place < length) & within_window(position, place, window)
        to_itself = within_window(step[:, None], step, window).expand(len(tree.owner), -1, -1)
        tree.masks[window] = prompts, torch.cat([to_prompt, to_itself], -1)[:, None]
    return tree.masks[window]


def _cells(values: Float[Tensor, "packed heads dim"], index: Int[Tensor, "rows time"]) -> Tensor:
    """Packed values laid out as [rows, heads, time, dim]."""
    return values.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _decode_mask(
    rows: DecodeRows, window: int | None, dtype: torch.dtype
) -> Float[Tensor, "slots 1 #group 1 keys"]:
    """0 at the keys that a row attends to, −inf elsewhere; made once per window width."""
    if window not in rows.masks:
        length, written = rows.cache.prompt_length[: rows.used, None, None], _written(rows)
        prompt = torch.arange(rows.prompt, device=length.device).expand(*written.shape[:2], -1)
        suffix = torch.arange(rows.suffix, device=length.device).expand(*written.shape[:2], -1)
        position = torch.cat([prompt, length + suffix], 2)
        held = torch.cat([prompt < length, suffix <= written], 2)
        allowed = held & within_window(length + written, position, window)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=length.device)
        rows.masks[window] = mask.masked_fill_(~allowed, float("-inf"))[:, None, :, None, :]
    return rows.masks[window]


def _written(rows: DecodeRows) -> Int[Tensor, "slots #group 1"]:
    """The last place of every row's suffix, or of all rows of a slot where these agree."""
    if rows.in_step:
        return (rows.clock - rows.cache.start[: rows.used])[:, None, None]
    grid = rows.time.new_zeros(rows.used * rows.cache.group)
    return grid.index_copy_(0, rows.rows, rows.time).view(rows.used, -1, 1)


def _decode_parts(rows: DecodeRows) -> list[tuple[Tensor, DecodeRows]]:
    """Steps of one row per completion, in the order of these rows; made once."""
    if not rows.parts and rows.order is not None:
        for place in range(int(rows.order.max()) + 1):
            index = (rows.order == place).nonzero().squeeze(-1)
            one = {name: getattr(rows, name)[index] for name in ("slot", "sample", "time", "rows")}
            part = replace(rows, **one, order=None, masks={}, places={}, parts=[])
            rows.parts.append((index, part))
    return rows.parts


def _suffix_place(rows: DecodeRows, key_heads: int) -> Int[Tensor, "cells"]:
    """Where the new keys go in a suffix store seen as [cells, dim]; the same in every layer."""
    if key_heads not in rows.places:
        head = torch.arange(key_heads, device=rows.rows.device)
        row = (rows.slot[:, None] * key_heads + head) * rows.cache.group + rows.sample[:, None]
        place = row * rows.cache.suffix_capacity + rows.time[:, None]
        rows.places[key_heads] = place.flatten()
    return rows.places[key_heads]


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys, in float32 where the model computes in less."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    return scores.softmax(-1)


def _blocks(x: Tensor) -> Iterator[slice]:
    """The rows of a matrix in blocks."""
    size = BLOCK if x.device.type == "cpu" else max(1, len(x))
    return (slice(first, first + size) for first in range(0, len(x), size))


def accumulable_grad(weight: Tensor) -> Tensor | None:
    """The gradient that a weight has already, where another one can be added to it in place: its
    own, or the float32 one that is kept beside a weight of 16 bits (`weight.main_grad`)."""
    grad = weight.grad
    if grad is None and (beside := getattr(weight, "main_grad", None)) is not None:
        grad = beside if beside.dtype == torch.float32 else None
    return grad if grad is not None and grad.is_contiguous() else None


def is_plain_linear(layer: nn.Module, device: str = "cpu") -> TypeGuard[nn.Linear]:
    """Whether a layer on a device of this type is x · Wᵀ + bias and nothing else."""
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not is_traceable_wrapper_subclass(layer.weight)  # torchao's, for example
        and layer.weight.device.type == device
    )
