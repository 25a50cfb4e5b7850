"""Microbatches of models that cannot be packed: whole sequences, padded on the right.

Slower and larger than the packed form (the prompt is computed for every completion, and every
logit exists at once), but it assumes nothing of the model beyond causality.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from groupwise.types import Batch
from groupwise.updates.packing import read_positions


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A microbatch of rows padded on the right.

    Attributes:
        rows: which rows of the batch it computes.
        tokens, seen: prompt and completion of each row, and which of them are not padding.
        source: for every read, the position of the hidden state in its sequence.
        target: the token that follows each read.
        row, time: the place of each read in `batch.rows(rows)`.
    """

    rows: Int[Tensor, "rows"]
    tokens: Int[Tensor, "rows time"]
    seen: Bool[Tensor, "rows time"]
    source: Int[Tensor, "reads"]
    target: Int[Tensor, "reads"]
    row: Int[Tensor, "reads"]
    time: Int[Tensor, "reads"]


def pad(
    batch: Batch,
    rows: Int[Tensor, "rows"],
    *,
    device: torch.device,
    reads: Collection[str] = ("before",),
) -> Padded:
    """Lay out rows of a batch as sequences padded on the right."""
    own = batch.rows(rows)
    prompts = [batch.prompts[int(group)] for group in own.group]
    before = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long)
    whole = before + own.length
    tokens = torch.zeros(len(rows), max(whole.tolist(), default=0), dtype=torch.long)
    for place, prompt in enumerate(prompts):
        tokens[place, : len(prompt)] = prompt
        tokens[place, len(prompt) : whole[place]] = own.tokens[place, : own.length[place]]
    read = read_positions(own, reads)
    return Padded(
        rows=rows,
        tokens=tokens.to(device),
        seen=(torch.arange(tokens.shape[1]) < whole[:, None]).to(device),
        source=(before[read.row] + read.seen - 1).to(device),
        target=read.target.to(device),
        row=read.row.to(device),
        time=read.time.to(device),
    )
