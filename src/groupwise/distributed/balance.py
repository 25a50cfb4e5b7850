"""Assignment of rows to ranks: whole groups, most expensive first, each to the rank with the least
work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.types import Batch


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an update of a group costs, in products of one token with all weights.

        cost = P + Σ Lᵢ + pair · (P²/2 + Σ (P·Lᵢ + Lᵢ²/2))

    P tokens of the prompt, Lᵢ of the completions; the second term is attention. A token costs
    2·parameters multiplications with weights, a pair of tokens 4·hidden in every layer, so
    pair = 2 · hidden · layers / parameters.
    """

    pair: float = 0.0

    @classmethod
    def of(cls, model: Any) -> Cost:
        """The cost for a model, as its configuration says."""
        shape = model.config.get_text_config()
        width = getattr(shape, "hidden_size", 0) * getattr(shape, "num_hidden_layers", 0)
        return cls(pair=2 * width / max(1, sum(p.numel() for p in model.parameters())))

    def __call__(self, prompt: int, lengths: list[int]) -> float:
        pairs = prompt**2 / 2 + sum(prompt * n + n**2 / 2 for n in lengths)
        return prompt + sum(lengths) + self.pair * pairs


def deal(
    batch: Batch,
    rows: Int[Tensor, "rows"],
    ranks: int,
    *,
    cost: Cost | None = None,
    whole_groups: bool = False,
) -> list[Int[Tensor, "_"]]:
    """The rows of each rank, in ascending order.

    Completions of one prompt stay together, so that the prompt is computed once, unless their group
    costs more than an equal share of everything. Units are sorted by cost, then by first row, so
    every process computes the same assignment.

    Args:
        rows: rows of the batch that are to be computed.
        ranks: how many ranks there are.
        cost: of a group; None counts tokens.
        whole_groups: never divide a group.
    """
    cost = cost or Cost()
    lengths = batch.length.tolist()
    groups: dict[int, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(int(batch.group[row]), []).append(row)

    def price(group: int, members: list[int]) -> float:
        return cost(len(batch.prompts[group]), [lengths[row] for row in members])

    share = sum(price(group, members) for group, members in groups.items()) / ranks
    units: list[tuple[float, list[int]]] = []
    for group, members in groups.items():
        pieces = [members]
        if not whole_groups and price(group, members) > share:
            pieces = _divided(members, lengths, into=min(ranks, len(members)))
        units += [(price(group, piece), piece) for piece in pieces]
    load, dealt = [0.0] * ranks, [[] for _ in range(ranks)]
    for amount, unit in sorted(units, key=lambda each: (-each[0], each[1])):
        rank = load.index(min(load))
        load[rank] += amount
        dealt[rank] += unit
    return [torch.tensor(sorted(each), dtype=torch.long) for each in dealt]


def _divided(members: list[int], lengths: list[int], *, into: int) -> list[list[int]]:
    """Rows of one group in pieces of about equal length, the longest row first."""
    load, pieces = [0] * into, [[] for _ in range(into)]
    for row in sorted(members, key=lambda each: (-lengths[each], each)):
        place = load.index(min(load))
        load[place] += lengths[row]
        pieces[place].append(row)
    return [sorted(piece) for piece in pieces if piece]
