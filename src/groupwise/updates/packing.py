"""Packed microbatches: a prompt once, then its completions as branches that attend to it.

A pack is one flat row of tokens without padding,

    [prompt a][a's 1st completion][a's 2nd completion] … [prompt b][b's 1st completion] …

Position ids restart after the prompt for every branch. The state of a prompt's last token predicts
the first token of each of its branches. The last token of a completion predicts nothing, so it is
left out unless a head reads the state after it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.kernels import Tree, active
from groupwise.types import Batch

SPLIT_ABOVE = 1.5
"""A group is split over several microbatches when it exceeds the tokens of one by this factor."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A microbatch in packed form.

    Attributes:
        rows: which rows of the batch it computes.
        tokens, positions: what the model is given.
        attend: which tokens attend to which.
        source: for every read, the packed position of the hidden state.
        target: the token that follows each read.
        row, time: the place of each read in `batch.rows(rows)`.
    """

    rows: Int[Tensor, "rows"]
    tokens: Int[Tensor, "packed"]
    positions: Int[Tensor, "packed"]
    attend: TreeAttention
    source: Int[Tensor, "reads"]
    target: Int[Tensor, "reads"]
    row: Int[Tensor, "reads"]
    time: Int[Tensor, "reads"]


class TreeAttention(Tree):
    """Attention of a pack: prompts attend causally to themselves, branches to their prompt and
    causally to themselves."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "packed heads dim"],
        key: Float[Tensor, "packed key_heads dim"],
        value: Float[Tensor, "packed key_heads dim"],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Float[Tensor, "packed heads dim"]:
        return active().tree_attention(
            self, query, key, value, scaling=scaling, window=window, softcap=softcap
        )


def plan(
    batch: Batch, rows: Int[Tensor, "rows"], *, tokens: int, whole_groups: bool = False
) -> list[Int[Tensor, "_"]]:
    """Split rows into microbatches of about `tokens` packed tokens, keeping groups together.

    A completion is never split. A group is split only if it has more than `SPLIT_ABOVE` times the
    tokens of a microbatch; its prompt is then computed once in each. Groups are taken in order of
    length, which keeps the rectangles of attention small.

    Args:
        batch: the batch.
        rows: the rows to compute; none gives no microbatch.
        tokens: packed tokens of a microbatch.
        whole_groups: never split a group, whatever its size.
    """
    groups: dict[int, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(int(batch.group[row]), []).append(row)
    length = batch.length.tolist()
    cost = {g: max(length[row] for row in members) for g, members in groups.items()}
    plans: list[list[int]] = []
    current: list[int] = []
    room = tokens
    for group in sorted(groups, key=lambda g: (cost[g], g)):
        prompt = len(batch.prompts[group])
        whole = prompt + sum(length[row] for row in groups[group])
        if current and whole > room:
            plans.append(current)
            current, room = [], tokens
        room -= prompt
        splits = not whole_groups and whole > SPLIT_ABOVE * tokens
        for row in groups[group]:
            if splits and current and length[row] > room:
                plans.append(current)
                current, room = [], tokens - prompt
            current.append(row)
            room -= length[row]
    if current:
        plans.append(current)
    return [torch.tensor(rows) for rows in plans]


def first_of_equal(batch: Batch, rows: Int[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """For each of some rows, the index of the first one with the same prompt, tokens, mask and
    support.
    """
    known: dict[tuple[Any, ...], int] = {}
    found = []
    for place, row in enumerate(rows.tolist()):
        size = int(batch.length[row])
        key = (
            int(batch.group[row]),
            batch.tokens[row, :size].numpy().tobytes(),
            batch.mask[row, :size].numpy().tobytes(),
            None if batch.support is None else _bytes(batch.support[row]),
        )
        found.append(known.setdefault(key, place))
    return _whole(found)


def _bytes(sets: Sequence[Sequence[int]] | None) -> tuple[bytes, ...] | None:
    """Sets of token ids as values that can be compared."""
    return None if sets is None else tuple(array("i", ids).tobytes() for ids in sets)


class Reads(NamedTuple):
    """The states of a batch that a head reads, one entry each: the row, the column of the output,
    how many tokens of the completion were seen, and the token that follows."""

    row: Int[Tensor, "reads"]
    time: Int[Tensor, "reads"]
    seen: Int[Tensor, "reads"]
    target: Int[Tensor, "reads"]


def read_positions(batch: Batch, reads: Collection[str]) -> Reads:
    """Every state that a head reads: "before" each token the policy wrote, or of the "written"
    token itself, and "after" the last token of each row, whose column is the row's length."""
    row = torch.zeros(0, dtype=torch.long)
    time = seen = target = row
    if "before" in reads:
        row, time = batch.mask.nonzero(as_tuple=True)
        seen, target = time, batch.tokens[row, time]
    if "written" in reads:
        row, time = batch.mask.nonzero(as_tuple=True)
        seen, target = time + 1, torch.zeros_like(time)
    if "after" in reads:
        row = torch.cat([row, torch.arange(len(batch.length))])
        time, seen = torch.cat([time, batch.length]), torch.cat([seen, batch.length])
        target = torch.cat([target, torch.zeros_like(batch.length)])
    return Reads(row, time, seen, target)


def pack(
    batch: Batch,
    rows: Int[Tensor, "rows"],
    *,
    device: torch.device,
    reads: Collection[str] = ("before",),
) -> Pack:
    """Lay out rows of a batch as one packed row, with the states that a head reads."""
    own = batch.rows(rows)
    group, length = own.group.tolist(), own.length.tolist()
    prompts = sorted(set(group))
    place: dict[int, int] = {}
    none = torch.zeros(0, dtype=torch.long)
    pieces, positions = [none], [none]
    starts: list[int] = []
    filled = 0
    unread = 0 if {"after", "written"} & set(reads) else 1
    given = (own.length - unread).clamp(min=0)
    members: dict[int, list[int]] = {g: [] for g in prompts}
    for row, g in enumerate(group):
        members[g].append(row)
    branch_start = [0] * len(group)
    for g in prompts:
        prompt = batch.prompts[g]
        place[g] = len(starts)
        starts.append(filled)
        pieces.append(prompt)
        positions.append(torch.arange(len(prompt)))
        filled += len(prompt)
        for row in members[g]:
            size = max(0, length[row] - unread)
            branch_start[row] = filled
            pieces.append(own.tokens[row, :size])
            positions.append(torch.arange(len(prompt), len(prompt) + size))
            filled += size
    prompt_length = _whole([len(batch.prompts[g]) for g in prompts])
    owner = _whole([place[g] for g in group])
    start, branch = _whole(starts), _whole(branch_start)
    read = read_positions(own, reads)
    last_of_prompt = (start + prompt_length - 1)[owner]
    source = torch.where(read.seen == 0, last_of_prompt[read.row], branch[read.row] + read.seen - 1)
    return Pack(
        rows=rows,
        tokens=torch.cat(pieces).to(device),
        positions=torch.cat(positions).to(device),
        attend=_tree(start, prompt_length, branch, given, owner, packed=filled, device=device),
        source=source.to(device),
        target=read.target.to(device),
        row=read.row.to(device),
        time=read.time.to(device),
    )


def _whole(numbers: list[int]) -> Int[Tensor, "_"]:
    """Whole numbers as a tensor, also where there are none."""
    return torch.tensor(numbers, dtype=torch.long)


def _tree(
    start: Tensor,
    prompt_length: Tensor,
    branch: Tensor,
    given: Tensor,
    owner: Tensor,
    *,
    packed: int,
    device: torch.device,
) -> TreeAttention:
    """The attention of a pack."""
    prompt_index, prompt_real = _rectangle(start, prompt_length)
    branch_index, branch_real = _rectangle(branch, given)
    inverse = torch.zeros(packed, dtype=torch.long)
    inverse[prompt_index[prompt_real]] = prompt_real.flatten().nonzero().squeeze(-1)
    inverse[branch_index[branch_real]] = (
        branch_real.flatten().nonzero().squeeze(-1) + prompt_index.numel()
    )
    spans = [
        torch.cat(pair)
        for pair in (
            (start, branch),
            (prompt_length, given),
            (torch.full_like(start, -1), owner),
        )
    ]
    return TreeAttention(
        spans=torch.stack(spans).to(device),
        prompt_index=prompt_index.to(device),
        prompt_length=prompt_length.to(device),
        branch_index=branch_index.to(device),
        owner=owner.to(device),
        inverse=inverse.to(device),
    )


def _rectangle(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Packed positions [rows, longest] of spans, 0 in padding, and which cells are real."""
    step = torch.arange(max(length.tolist(), default=0))
    real = step < length[:, None]
    return torch.where(real, start[:, None] + step, 0), real


def support_mask(
    support: Sequence[Sequence[Sequence[int]] | None], row: Tensor, time: Tensor, *, vocab: int
) -> Bool[Tensor, "reads vocab"]:
    """Which tokens truncated sampling could have drawn, for each read."""
    mask = np.ones((len(row), vocab), dtype=bool)
    for place, (r, t) in enumerate(zip(row.tolist(), time.tolist(), strict=True)):
        ids = support[r]
        if ids is not None:
            mask[place] = False
            mask[place, np.asarray(ids[t], dtype=np.int64)] = True
    return torch.from_numpy(mask)
