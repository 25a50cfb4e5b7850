"""Completions as branches: a prompt once, then its completions, each seeing the prompt and itself.

A pack is one flat row of tokens,

    [prompt a][a's 1st completion][a's 2nd completion] … [prompt b][b's 1st completion] …

with positions that restart after the prompt for every branch. Nothing in it is padding. The last
token of a completion predicts nothing and is left out; the last token of the prompt predicts the
first token of every branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.kernels import Tree, active
from groupwise.types import Batch

WHOLE = 1.5
"""A group stays in one microbatch while it has no more than so many times the tokens of one."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A microbatch in packed form.

    Attributes:
        rows: which rows of the batch it computes.
        tokens, positions: what the model is given.
        attend: who sees whom.
        source: for every predicted token, the packed position whose hidden state predicts it.
        target: the predicted tokens.
        row, time: where they stand in `batch.rows(rows)`.
    """

    rows: Int[Tensor, "rows"]
    tokens: Int[Tensor, "packed"]
    positions: Int[Tensor, "packed"]
    attend: TreeAttention
    source: Int[Tensor, "predicted"]
    target: Int[Tensor, "predicted"]
    row: Int[Tensor, "predicted"]
    time: Int[Tensor, "predicted"]


class TreeAttention(Tree):
    """Attention of a pack: prompts causal among themselves, branches to their prompt and causally
    to themselves."""

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


def plan(batch: Batch, rows: Int[Tensor, "rows"], *, tokens: int) -> list[Int[Tensor, "_"]]:
    """Split rows into microbatches of about `tokens` packed tokens, completions of one prompt
    together.

    A completion is never split. The completions of one prompt are spread over several microbatches
    only where they are more than half again too many for one, and then the prompt is computed once
    in each. Groups are taken in order of length, so that the rectangles of attention fit.
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
        splits = whole > WHOLE * tokens
        for row in groups[group]:
            if splits and current and length[row] > room:
                plans.append(current)
                current, room = [], tokens - prompt
            current.append(row)
            room -= length[row]
    if current:
        plans.append(current)
    return [torch.tensor(rows) for rows in plans]


def pack(batch: Batch, rows: Int[Tensor, "rows"], *, device: torch.device) -> Pack:
    """Lay some rows of a batch out as one packed row."""
    group = batch.group[rows].tolist()
    length = batch.length[rows].tolist()
    prompts = sorted(set(group))
    place: dict[int, int] = {}
    pieces: list[Tensor] = []
    positions: list[Tensor] = []
    starts: list[int] = []
    filled = 0
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
            given = max(0, length[row] - 1)
            branch_start[row] = filled
            pieces.append(batch.tokens[rows[row], :given])
            positions.append(torch.arange(len(prompt), len(prompt) + given))
            filled += given
    prompt_length = torch.tensor([len(batch.prompts[g]) for g in prompts])
    owner = torch.tensor([place[g] for g in group])
    start, branch = torch.tensor(starts), torch.tensor(branch_start)
    given = (batch.length[rows] - 1).clamp(min=0)
    mask = batch.mask[rows, : max(length)]
    row, time = mask.nonzero(as_tuple=True)
    last_of_prompt = (start + prompt_length - 1)[owner]
    source = torch.where(time == 0, last_of_prompt[row], branch[row] + time - 1)
    return Pack(
        rows=rows,
        tokens=torch.cat(pieces).to(device),
        positions=torch.cat(positions).to(device),
        attend=_tree(start, prompt_length, branch, given, owner, packed=filled, device=device),
        source=source.to(device),
        target=batch.tokens[rows][row, time].to(device),
        row=row.to(device),
        time=time.to(device),
    )


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
    """The rectangles of a pack and the way back."""
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
    step = torch.arange(int(length.max()) if len(length) else 0)
    real = step < length[:, None]
    return torch.where(real, start[:, None] + step, 0), real


def kept_mask(
    kept: Sequence[Sequence[Sequence[int]] | None], row: Tensor, time: Tensor, *, vocab: int
) -> Bool[Tensor, "predicted vocab"]:
    """Which tokens truncated sampling could have drawn, for each predicted position."""
    mask = torch.ones(len(row), vocab, dtype=torch.bool)
    for place, (r, t) in enumerate(zip(row.tolist(), time.tolist(), strict=True)):
        ids = kept[r]
        if ids is not None:
            mask[place] = False
            mask[place, list(ids[t])] = True
    return mask
