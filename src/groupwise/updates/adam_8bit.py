"""AdamW with moments in 8 bits, by bitsandbytes."""

from __future__ import annotations

from typing import Any

from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]
from torch import nn

BLOCK = 256
"""Moments that share a scale."""
PIECE = 1 << 22
"""Weights that are stepped at once on a CPU, a multiple of `BLOCK`."""


class PiecewiseAdamW8bit(AdamW8bit):
    """`AdamW8bit` that steps a large weight on a CPU piece by piece, to the same bits.

    bitsandbytes makes five float32 copies of the weight's size on a CPU, which for the embedding of
    a model are more than all moments in 8 bits.
    """

    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        state = self.state[p]
        if p.device.type != "cpu" or "absmax1" not in state or not p.is_contiguous():
            super().update_step(group, p, gindex, pindex)
            return
        grad = p.grad.contiguous().view(-1)
        for first in range(0, p.numel(), PIECE):
            part = slice(first, first + PIECE)
            blocks = slice(first // BLOCK, (first + PIECE) // BLOCK)
            piece = nn.Parameter(p.data.view(-1)[part])
            piece.grad = grad[part]
            moments = {n: state[n].view(-1)[part] for n in ("state1", "state2")}
            scales = {n: state[n][blocks] for n in ("absmax1", "absmax2")}
            self.state[piece] = {**state, **moments, **scales}
            super().update_step(group, piece, gindex, pindex)
            del self.state[piece]
        state["step"] += 1
