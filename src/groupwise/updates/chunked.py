"""Functions of the logits of every token, in chunks: [tokens, vocab] never exists as a whole."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.algorithms.losses.distillation import LogitsFunction
from groupwise.models import head_product
from groupwise.types import Batch
from groupwise.updates.logprobs import HeadGradients, Projection


@runtime_checkable
class LogitsObjective(Protocol):
    """An objective that reads the output "of_logits": what a function of its own gives for the
    logits of each token."""

    def on_logits(
        self, batch: Batch, row: Int[Tensor, "tokens"], time: Int[Tensor, "tokens"]
    ) -> LogitsFunction:
        """The function for some tokens of a batch.

        Args:
            row, time: where each of them stands.
        """
        ...


def of_logits(
    hidden: Float[Tensor, "tokens hidden"], head: Projection, function: LogitsFunction
) -> Float[Tensor, "tokens *rest"]:
    """A function of the logits of every token, computed in chunks; differentiable.

        out[rows] = function(z[rows], rows),   z = cap(hidden · Wᵀ + b) / temperature

    The backward pass recomputes the logits of a chunk and differentiates the function there.

    Args:
        hidden: states at the positions that predict.
        head: projection, soft cap, temperature, size of a chunk.
        function: of the logits [chunk, vocab] of a slice of the tokens, row by row. It is called
            again in the backward pass, with the same slices.

    Example:
        >>> head = Projection(weight=torch.eye(2), chunk_bytes=1)
        >>> of_logits(torch.tensor([[0.0, 2.0]]), head, lambda z, rows: z.amax(-1))
        tensor([2.])
    """
    anchor = head.weight if head.weight.requires_grad else None
    apply: Any = _OfLogits.apply
    return apply(hidden, anchor, head.bias, head, function)


def _raw(hidden: Tensor, head: Projection) -> Tensor:
    """Logits of one chunk before soft cap and temperature, in float32 at least."""
    z = head_product(hidden, head.weight, wide=head.fp32_logits)
    if head.bias is not None:
        z = z + head.bias
    return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z


def _finished(z: Tensor, head: Projection) -> Tensor:
    if head.softcap is not None:
        z = (z / head.softcap).tanh() * head.softcap
    return z if head.temperature == 1.0 else z / head.temperature


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        head: Projection,
        function: LogitsFunction,
    ) -> Tensor:
        chunks = head.pieces(slice(0, len(hidden)))
        found = [function(_finished(_raw(hidden[rows], head), head), rows) for rows in chunks]
        ctx.save_for_backward(hidden)
        ctx.head, ctx.function = head, function
        return torch.cat(found) if found else hidden.new_zeros(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        head: Projection = ctx.head
        found = HeadGradients(hidden, head, ctx.needs_input_grad, added=None)
        for rows in head.pieces(slice(0, len(hidden))):
            raw = _raw(hidden[rows], head).requires_grad_()
            with torch.enable_grad():
                out = ctx.function(_finished(raw, head), rows)
            (d,) = torch.autograd.grad(out, raw, grad[rows].to(out.dtype))
            found.add(rows, d)
        return (*found.results(), None, None)
