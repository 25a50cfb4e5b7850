"""The objective of preferences: a registered function of the likelihoods of two answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.registry import BoundFunction
from groupwise.types import Batch, Granularity, Outputs

REFERENCED = frozenset({"margin", "chosen", "rejected", "delta"})
"""Data of preference functions that is measured against the reference model."""


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """A preference function over pairs of rows, or over single rows, and the likelihood of what is
    wanted.

        L = mean over pairs of f(Δ_chosen, Δ_rejected) + nll · (−log π(chosen) / |chosen|)
        Δ(y) = Σ_t log π(y_t) − ref

    Batches hold in the column `row` the number of each row, in `ref` Σ_t log π_ref(y_t), and for
    single rows in `label` whether it is wanted. Rows of one prompt are in one microbatch, so a pair
    is never split; the loss of a pair stands at its chosen row.

    Attributes:
        function: of `PREFERENCES`, with its settings.
        pairs: rows (chosen, rejected) of each pair; none for functions of single answers.
        nll: weight of the likelihood term.
        kl: for KTO, z: an estimate of KL(π‖π_ref) over the batch.
    """

    function: BoundFunction
    pairs: Int[Tensor, "pair 2"]
    nll: float = 0.0
    kl: float = 0.0

    needs: frozenset[str] = frozenset({"logp"})
    granularity: Granularity = "group"
    skips_zero_advantage: bool = False

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch"]:
        """The loss of every row, to be weighted by 1 / pairs."""
        logp = torch.where(batch.mask, outputs["logp"], 0)
        total = logp.sum(1)
        mean = total / batch.mask.sum(1).clamp(min=1)
        delta = total - batch.columns["ref"].to(total.dtype)
        if "delta" in self.function.inputs:
            desirable, z = batch.columns["label"] > 0, total.new_tensor(self.kl)
            loss = self.function({"delta": delta, "desirable": desirable, "kl": z})
            return loss - self.nll * torch.where(desirable, mean, 0)
        chosen, rejected = self._places(batch)
        data = {
            "margin": delta[chosen] - delta[rejected],
            "chosen": delta[chosen],
            "rejected": delta[rejected],
            "chosen_mean": mean[chosen],
            "rejected_mean": mean[rejected],
        }
        each = self.function(data) - self.nll * mean[chosen]
        return torch.zeros_like(total).index_add(0, chosen, each)

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where the chosen and rejected rows of this part's pairs stand in it."""
        here = batch.columns["row"].long()
        pairs = self.pairs.to(here.device)
        mine = pairs[torch.isin(pairs, here).all(1)]
        order = here.argsort()
        place = order[torch.searchsorted(here[order], mine)]
        return place[:, 0], place[:, 1]


def preference_figures(
    function: BoundFunction, batch: Batch, objective: PreferenceObjective, logp: Tensor
) -> dict[str, Tensor]:
    """Figures of every pair, or of every single answer, from log-probabilities of a batch."""
    unpaired = "delta" in function.inputs
    total = torch.where(batch.mask, logp, 0).sum(1)
    mean = total / batch.mask.sum(1)
    delta = total - batch.columns["ref"].to(total.dtype)
    if unpaired:
        wanted = batch.columns["label"] > 0
        first, second = wanted.nonzero().squeeze(-1), (~wanted).nonzero().squeeze(-1)
    else:
        first, second = objective.pairs[:, 0], objective.pairs[:, 1]
    found = {"chosen_logp": mean[first], "rejected_logp": mean[second]}
    if REFERENCED.isdisjoint(function.inputs):
        margin = mean[first] - mean[second] if not unpaired else None
    else:
        found |= {"chosen_delta": delta[first], "rejected_delta": delta[second]}
        margin = delta[first] - delta[second] if not unpaired else None
    if margin is not None:
        found["margin"] = margin
        found["pair_accuracy"] = (margin > 0).float() + (margin == 0).float() / 2
    return found
