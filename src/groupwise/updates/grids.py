"""Outputs of microbatches as grids of [rows, time]."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.types import Batch, Outputs
from groupwise.updates.packing import Pack
from groupwise.updates.reader import Reader
from groupwise.updates.unpacked import Padded


def _dtype(reader: Reader) -> torch.dtype:
    return torch.float64 if reader.backbone.model.dtype == torch.float64 else torch.float32


def blank_outputs(reader: Reader, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
    """Outputs of a batch before they are computed."""
    return {name: torch.zeros(grid_shape(batch, reader), dtype=_dtype(reader)) for name in names}


def read_rows(reader: Reader, batch: Batch) -> Int[Tensor, "rows"]:
    """The rows of which a head reads at least one state."""
    read = batch.mask.any(1) | ("after" in reader.head.reads)
    return read.nonzero().squeeze(-1)


def support_of(batch: Batch, rows: Int[Tensor, "rows"]) -> list[Any] | None:
    """For some rows, the tokens that truncated sampling could draw; None where it was not used."""
    return None if batch.support is None else [batch.support[row] for row in rows.tolist()]


def grid_shape(batch: Batch, reader: Reader) -> tuple[int, int]:
    """Rows and columns of the outputs of a batch."""
    rows, time = batch.tokens.shape
    return rows, time + ("after" in reader.head.reads)


def write(
    grid: Tensor, values: Tensor, laid: Pack | Padded, part: Tensor, place: Tensor | None
) -> None:
    """Write the outputs of a microbatch into a grid of the whole batch.

    Args:
        part: the rows of the microbatch.
        place: which of the rows that were computed each of them equals; None: all were.
    """
    if place is None:
        grid[laid.rows[laid.row.cpu()], laid.time.cpu()] = values
        return
    read = grid.new_zeros(len(laid.rows), grid.shape[1])
    there = torch.zeros(read.shape, dtype=torch.bool)
    at = laid.row.cpu(), laid.time.cpu()
    read[at], there[at] = values.to(read.dtype), True
    grid[part] = torch.where(there[place], read[place], grid[part])


def grids(
    outputs: Outputs, laid: Pack | Padded, *, shape: tuple[int, int], place: Tensor | None
) -> Outputs:
    """Outputs of the reads of a microbatch as [rows, time], 0 where nothing was read."""

    def grid(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        empty = values.new_zeros(len(laid.rows), shape[1])
        found = empty.index_put((laid.row, laid.time), values)
        return found if place is None else found[place.to(found.device)]

    return Outputs(**{f.name: grid(getattr(outputs, f.name)) for f in fields(outputs)})
