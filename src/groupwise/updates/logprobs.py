"""Log-probabilities from hidden states, in chunks: [tokens, vocab] never exists as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.kernels import accumulable_grad, active
from groupwise.models import head_product

CHUNK_BYTES = 30 * 2**20
"""Size of a chunk on a CPU, where it has to fit into the caches."""
CARD_ROWS = 512
"""Rows of a chunk on a card, whose matrix products need many: 30 MiB are 48 rows of a vocabulary of
152 thousand, and 512 rows are 296 MiB."""
PRODUCT_ROWS = 96
"""Rows that are multiplied at once, at least: 48, which is what fits into the caches with a
vocabulary of 152 thousand, take a quarter to a third longer per row."""
KEEP_BYTES, KEEP_BYTES_16 = 224 * 2**20, 320 * 2**20
"""Size of the logits that are kept, in float32 and in 16 bits. The second is 1,024 rows of a
vocabulary of 152 thousand: where all fit, the gradient of the head is one product, without a sum of
the weight's size in float32."""


def chunk_bytes(device: str, *, vocab: int) -> int:
    """Size of one float32 buffer of logits: what a CPU's caches hold, or `CARD_ROWS` rows.

    Args:
        device: type of the device.
        vocab: logits of a row.

    Example:
        >>> chunk_bytes("cpu", vocab=152_000) // 2**20, chunk_bytes("cuda", vocab=152_000) // 2**20
        (30, 296)
    """
    return CHUNK_BYTES if device == "cpu" else max(CHUNK_BYTES, 4 * CARD_ROWS * vocab)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The output projection and what is applied to its logits before the softmax.

    Attributes:
        weight, bias: parameters of the projection.
        softcap: if set, logits become softcap · tanh(logits / softcap).
        temperature: of the sampler; logits are divided by it.
        chunk_bytes: size of one float32 buffer of logits besides those kept; up to two and a half
            exist at one time, on a card without kernels up to four and a half. None: `chunk_bytes`
            of the device and the vocabulary, but at least `PRODUCT_ROWS` rows.
        keep_bytes: size of the buffer of logits kept for the backward pass; those beyond it are
            recomputed. A head that is not trained needs none of them there. None: `KEEP_BYTES`, or
            `KEEP_BYTES_16` for logits in 16 bits.
        fp32_logits: compute logits in float32 whatever the type of the factors.
        accumulate_into_grad: add the gradient of the weight to an existing `weight.grad` in place
            instead of returning it to autograd. Saves a buffer of the weight's size; sums of many
            microbatches are rounded more often.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0
    chunk_bytes: int | None = None
    keep_bytes: int | None = None
    fp32_logits: bool = False
    accumulate_into_grad: bool = False

    @property
    def trained(self) -> bool:
        """Whether weight or bias needs a gradient."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    @property
    def logit_bytes(self) -> int:
        """Size of a logit: that of a weight, or of a float32 where these are asked for."""
        wide = self.fp32_logits or self.softcap is not None
        return max(4 if wide else 0, self.weight.element_size())

    def kept(self, tokens: int) -> int:
        """How many tokens, from the first, have their logits kept."""
        # With float32 logits of 16-bit weights the backward pass rounds a copy of their gradient.
        size = self.weight.element_size()
        each = len(self.weight) * (self.logit_bytes + (size if size < self.logit_bytes else 0))
        room = self.keep_bytes
        if room is None:
            room = KEEP_BYTES_16 if self.logit_bytes == 2 else KEEP_BYTES
        return 0 if self.softcap is not None else min(tokens, room // each // 16 * 16)

    def chunks(self, tokens: int, *, backward: bool = False) -> list[slice]:
        """Rows multiplied at once: all that are kept, then the rest in chunks. In the backward pass
        a chunk may have as many rows as were kept, whose memory is free by then."""
        kept = self.kept(tokens)
        rest = self.products(slice(kept, tokens), least=kept if backward else 0)
        return ([slice(0, kept)] if kept else []) + rest

    def products(self, rows: slice, *, least: int = 0) -> list[slice]:
        """Rows multiplied at once, of those that are not kept: twice as many of 16 bits, since only
        pieces of a chunk are copied to float32, and four times as many on a card, where nothing is
        copied with kernels."""
        size = self._size if self.chunk_bytes else max(PRODUCT_ROWS, self._size)
        if self.logit_bytes == 2:
            size *= 2 if self.weight.device.type == "cpu" else 4
        return _split(rows, max(least, size))

    def pieces(self, rows: slice) -> list[slice]:
        """Rows for which everything else is computed at once."""
        return _split(rows, self._size)

    @property
    def _size(self) -> int:
        """Rows of a chunk."""
        room = self.chunk_bytes or chunk_bytes(self.weight.device.type, vocab=len(self.weight))
        return max(16, room // (4 * len(self.weight)) // 16 * 16)


def _split(rows: slice, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows.stop)) for i in range(rows.start, rows.stop, size)]


Support = Callable[[slice], Bool[Tensor, "chunk vocab"]]
"""For truncated sampling, which tokens could have been drawn in a slice of the rows."""


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    target: Int[Tensor, "tokens"],
    head: Projection,
    *,
    entropy: bool = False,
    support: Support | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"] | None]:
    """log π(target | hidden) and, on request, the entropy of π at every token; differentiable.

        z    = cap(hidden · Wᵀ + b) / temperature,   −inf outside the support
        logp = z[target] − logsumexp(z)
        H    = −Σ_v π_v log π_v

    Args:
        hidden: states at the positions that predict.
        target: the tokens they predict.
        head: projection, soft cap, temperature, sizes of buffers.
        entropy: whether to compute H.
        support: for truncated sampling, which tokens could have been drawn.

    Returns:
        float32 (float64 for a float64 model); memory linear in the chunk, not in tokens × vocab.
    """
    if hidden.requires_grad and not entropy and not head.trained:
        alone: Any = _FrozenHead.apply
        return alone(hidden, target, head, support), None
    anchor = head.weight if head.weight.requires_grad else None
    apply: Any = _TokenLogprobs.apply
    logp, h = apply(hidden, anchor, head.bias, target, head, entropy, support)
    return logp, (h if entropy else None)


def _logits(hidden: Tensor, rows: slice, head: Projection, support: Support | None) -> Tensor:
    """Those of one chunk before they are divided by the temperature; −inf outside the support."""
    z = head_product(hidden[rows], head.weight, wide=head.fp32_logits)
    if head.bias is not None:
        z += head.bias
    if head.softcap is not None:
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        z = z.div_(head.softcap).tanh_().mul_(head.softcap)
    if support is not None:
        for part in head.pieces(rows):
            own = z[part.start - rows.start : part.stop - rows.start]
            own.masked_fill_(~support(part), float("-inf"))
    return z


class _TokenLogprobs(torch.autograd.Function):
    """The forward pass works in chunks; the backward pass recomputes the logits of a chunk, or uses
    those kept of the first one, and overwrites them with their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target: Tensor,
        head: Projection,
        entropy: bool,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        logp = _empty_logprobs(hidden)
        h, ctx.kept = torch.zeros_like(logp), None
        for rows in head.chunks(len(hidden)):
            z = _logits(hidden, rows, head, support)
            logp[rows], h[rows], norm = _log_softmax(z, target[rows], head, entropy=entropy)
            if rows.start == 0 and head.kept(len(hidden)) and any(ctx.needs_input_grad):
                ctx.kept = z, norm
            del z
        ctx.save_for_backward(hidden, target, h)
        ctx.head, ctx.entropy, ctx.support = head, entropy, support
        return logp, h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, target, h = ctx.saved_tensors
        head: Projection = ctx.head
        added = accumulable_grad(head.weight) if head.accumulate_into_grad else None
        found = HeadGradients(hidden, head, ctx.needs_input_grad, added=added)
        for rows in head.chunks(len(hidden), backward=True):
            kept, ctx.kept = ctx.kept, None
            z, norm = kept or (_logits(hidden, rows, head, ctx.support), None)
            entropy = (h[rows], grads[1][rows]) if ctx.entropy else None
            _differentiate_(z, target[rows], grads[0][rows], head, entropy=entropy, norm=norm)
            found.add(rows, z)
            del z, kept  # before the next ones are computed
        return (*found.results(), *(None,) * 4)


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities under a head that is not trained. Logits are computed once: the gradient of
    a token's log-probability with respect to its state,

        (W[target] − Σ_v π_v W_v) / temperature,

    is computed beside it, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target: Tensor, head: Projection, support: Support | None
    ) -> Tensor:
        logp = _empty_logprobs(hidden)
        each = HeadGradients(hidden, head, (True, False, False), added=None)
        for rows in head.products(slice(0, len(hidden))):
            z, own = _logits(hidden, rows, head, support), target[rows]
            logp[rows], _, norm = _log_softmax(z, own, head, entropy=False)
            _differentiate_(z, own, torch.ones_like(logp[rows]), head, entropy=None, norm=norm)
            each.add(rows, z)
            del z
        ctx.save_for_backward(each.d_hidden)
        return logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (each,) = ctx.saved_tensors
        return (grads[0][:, None] * each).to(each.dtype), None, None, None


class HeadGradients:
    """The gradients of hidden states, weight and bias of a head, summed chunk by chunk.

    Args:
        hidden: states of all tokens.
        needed: of which of the three a gradient is needed.
        added: the gradient of the weight that is added to in place, and not returned.
    """

    def __init__(
        self, hidden: Tensor, head: Projection, needed: Sequence[bool], *, added: Tensor | None
    ) -> None:
        self.hidden, self.head = hidden, head
        self.d_hidden = torch.empty_like(hidden) if needed[0] else None
        self.added = self.d_weight = added
        self.d_bias: Tensor | None = None
        self.needs_weight, self.needs_bias = needed[1], needed[2]

    def add(self, rows: slice, d: Tensor) -> None:
        """Take in the gradient of one chunk's logits, before soft cap and temperature."""
        narrow = d.to(self.head.weight.dtype)
        if self.d_hidden is not None:
            self.d_hidden[rows] = active().matmul(narrow, self.head.weight)
        if self.needs_weight and self.d_weight is None and len(d) == len(self.hidden):
            # There is nothing to add, so no float32 sum of the weight's size is needed.
            self.d_weight = active().matmul(narrow.t(), self.hidden)
        elif self.needs_weight:
            self.d_weight = active().add_matmul(self.d_weight, narrow.t(), self.hidden[rows])
        if self.needs_bias:
            more = d.sum(0, dtype=torch.promote_types(d.dtype, torch.float32))
            self.d_bias = more if self.d_bias is None else self.d_bias + more

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of the hidden states, of the weight and of the bias, in the dtype of each."""
        weight, bias = self.d_weight, self.d_bias
        return (
            self.d_hidden,
            None if weight is None or weight is self.added else weight.to(self.head.weight.dtype),
            None if bias is None or self.head.bias is None else bias.to(self.head.bias.dtype),
        )


def _empty_logprobs(hidden: Tensor) -> Tensor:
    return hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))


def _log_softmax(
    z: Tensor, target: Tensor, head: Projection, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: log-probabilities, entropies (0 unless wanted), and what the gradient needs."""
    logp, norm = _empty_logprobs(z), _empty_logprobs(z).new_empty(len(z), 2)
    h = torch.zeros_like(logp)
    for part in head.pieces(slice(0, len(z))):
        logp[part], of_part, norm[part] = active().selective_log_softmax(
            z[part], target[part], temperature=head.temperature, entropy=entropy
        )
        if of_part is not None:
            h[part] = of_part
    return logp, h, norm


def _differentiate_(
    z: Tensor,
    target: Tensor,
    grad: Tensor,
    head: Projection,
    *,
    entropy: tuple[Tensor, Tensor] | None,
    norm: Tensor | None,
) -> None:
    """Overwrite logits with their gradient before soft cap and temperature."""
    for part in head.pieces(slice(0, len(z))):
        slope = None if head.softcap is None else _softcap_slope(z[part], head.softcap)
        active().selective_log_softmax_backward_(
            z[part], target[part], grad[part],
            temperature=head.temperature,
            entropy=None if entropy is None else (entropy[0][part], entropy[1][part]),
            norm=None if norm is None else norm[part],
        )  # fmt: skip
        if slope is not None:
            z[part] *= slope


def _softcap_slope(z: Tensor, softcap: float) -> Tensor:
    """d cap(x)/dx = 1 − (cap(x)/softcap)², of z = cap(x); 0 where z was masked to −inf."""
    return 1 - (z / softcap).nan_to_num(neginf=1.0).square()


def logits_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    target: Int[Tensor, "tokens"],
    *,
    temperature: float,
    entropy: bool = False,
    support: Bool[Tensor, "tokens vocab"] | None = None,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"] | None]:
    """log π(target) and, on request, the entropy, as `token_logprobs`, from all logits at once."""
    z = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    if support is not None:
        z = z.masked_fill(~support, float("-inf"))
    logs = z.log_softmax(-1)
    logp = logs.gather(-1, target[:, None]).squeeze(-1)
    if not entropy:
        return logp, None
    finite = logs if support is None else logs.masked_fill(~support, 0.0)
    return logp, -(logs.exp() * finite).sum(-1)
