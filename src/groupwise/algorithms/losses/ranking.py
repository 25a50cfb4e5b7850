"""The objective of reward models: a registered function of the scores of some answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.registry import BoundFunction
from groupwise.types import Batch, Granularity, Outputs


@dataclass(frozen=True, kw_only=True)
class RankingObjective:
    """A ranking function over the scores of rows, read after the last token of each.

        L = mean over rankings of f(scores, ranks)

    The batch numbers its rows in the column `row`. Rows of one prompt are in one microbatch, so a
    ranking is never split; its loss stands at its first row, whose weight has to be 1 / rankings.

    Attributes:
        function: of `RANKINGS`, with its settings.
        rows: the rows of each ranking; -1 where a ranking has fewer.
        ranks: their places, smaller is better.
        margins: by how much the better answer of any pair of the ranking should lead.
        targets: the number that each score should be; NaN where there is none.
    """

    function: BoundFunction
    rows: Int[Tensor, "ranking answer"]
    ranks: Float[Tensor, "ranking answer"]
    margins: Float[Tensor, "ranking"]
    targets: Float[Tensor, "ranking answer"]

    needs: frozenset[str] = frozenset({"values"})
    granularity: Granularity = "group"
    skips_zero_advantage: bool = False

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch"]:
        """The loss of every row, to be weighted by 1 / rankings."""
        scores = final_scores(outputs["values"], batch)
        here = batch.columns["row"].long()
        rows = self.rows.to(here.device)
        mine = torch.isin(rows[:, 0], here)
        rows, valid = rows[mine], rows[mine] >= 0
        order = here.argsort()
        found = torch.searchsorted(here[order], rows.clamp(min=0)).clamp(max=len(here) - 1)
        place = order[found]
        answers = rows.shape[1]
        data = {
            "scores": torch.where(valid, scores[place], 0),
            "ranks": self.ranks.to(here.device)[mine],
            "valid": valid,
            "margins": self.margins.to(scores)[mine][:, None, None].expand(-1, answers, answers),
            "targets": self.targets.to(scores)[mine],
        }
        return torch.zeros_like(scores).index_add(0, place[:, 0], self.function(data))


def final_scores(values: Float[Tensor, "batch reads"], batch: Batch) -> Float[Tensor, "batch"]:
    """What was read after the last token of each row."""
    return values.gather(1, batch.length[:, None]).squeeze(1)
