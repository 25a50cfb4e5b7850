"""Online preferences: pairs of each step's rollouts, formed by their rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.algorithms.binding import POLICY
from groupwise.algorithms.losses import REFERENCED, PreferenceObjective, preference_figures
from groupwise.config.preferences import preference_function
from groupwise.registry import BoundFunction
from groupwise.settings import PreferenceSettings
from groupwise.training.offline.own_answers import pairs_of_ranked, ranked_answers
from groupwise.training.trainer import Trainer
from groupwise.types import Batch, Metrics, ScoredGroups, StepResult
from groupwise.updates import sequences

How = Literal["best_worst", "all"]


@dataclass(kw_only=True)
class OnlinePreferenceTrainer(Trainer):
    """A run that learns from pairs of its own rollouts, with one optimizer step for each batch.

    Attributes:
        function: of `PREFERENCES`, with its settings.
        pairs: which answers of a group make pairs.
        nll: weight of −log π per token of the chosen answer.
    """

    function: BoundFunction
    pairs: How = "best_worst"
    nll: float = 0.0

    def step(self) -> StepResult:
        """Train on the pairs of one batch of rollouts; without pairs, no weight changes."""
        self.monitor.begin_step(self.policy)
        scored = self.source.take(self.settings.prompts_per_step, step=self.done)
        batch, pairs = paired(sequences(scored), rollout_pairs(scored, self.pairs))
        objective = PreferenceObjective(function=self.function, pairs=pairs, nll=self.nll)
        with self.watch("log-probabilities"):
            ref = torch.zeros(len(batch.tokens))
            if not REFERENCED.isdisjoint(self.function.inputs):
                logp = self.policy.evaluate(batch, {"ref_logp"})["ref_logp"]
                ref = torch.where(batch.mask, logp, 0).sum(1)
        batch = replace(batch, columns={**batch.columns, "ref": ref})
        with self.watch("the update"):
            update = self.policy.update(batch, objective)
        metrics = pair_metrics(scored, batch, pairs)
        if len(pairs):
            figures = preference_figures(self.function, batch, objective, update.logp)
            metrics |= {name: float(values.mean()) for name, values in figures.items()}
        result = StepResult(
            scored=scored,
            advantages=torch.zeros(scored.scores.total.shape),
            batches=(batch,),
            updates={POLICY: (update,)},
        )
        published = {**metrics, **self._publish()}
        return self.monitor.measured(result, algorithm=self.algorithm, published=published)


def rollout_pairs(scored: ScoredGroups, how: How) -> Int[Tensor, "pair 2"]:
    """Rows (better, worse) of the pairs of some groups, as rows of their `sequences`.

    Answers that are truncated, repeated, not judged or excluded by a filter form no pair, and
    neither do two answers with equal rewards.

    Args:
        how: "best_worst" makes one pair of each group, "all" every pair of unequal rewards.
    """
    usable = scored.scores.valid & scored.keep
    rewards = torch.where(usable, scored.scores.total, float("nan")).tolist()
    found, start = [], 0
    for group, own in zip(scored.groups, rewards, strict=True):
        ranked = ranked_answers(group.completions, own)
        found += [(start + a, start + b) for a, b in pairs_of_ranked(ranked, how)]
        start += len(group.completions)
    return torch.tensor(found, dtype=torch.long).reshape(-1, 2)


def paired(batch: Batch, pairs: Int[Tensor, "pair 2"]) -> tuple[Batch, Int[Tensor, "pair 2"]]:
    """The rows of a batch that are in a pair, weighted by 1 / pairs, and the pairs as indices of
    these rows."""
    rows = pairs.unique()
    batch = batch.rows(rows)
    weight = torch.full((len(rows),), 1 / max(1, len(pairs)))
    columns = {**batch.columns, "row": torch.arange(len(rows)).float()}
    batch = replace(batch, row_weight=weight, columns=columns)
    return batch, torch.searchsorted(rows, pairs)


def pair_metrics(scored: ScoredGroups, batch: Batch, pairs: Int[Tensor, "pair 2"]) -> Metrics:
    """How many pairs a step had.

    Returns:
        "pairs", and "unpaired_share", the share of groups that made none.
    """
    groups = len(scored.groups)
    used = len(batch.group[pairs[:, 0]].unique())
    return {"pairs": float(len(pairs)), "unpaired_share": 1 - used / max(1, groups)}


def on_own_pairs(settings: PreferenceSettings) -> Callable[..., OnlinePreferenceTrainer]:
    """A function that makes the trainer of a configuration with online preferences."""
    return partial(
        OnlinePreferenceTrainer,
        function=preference_function(settings),
        pairs=settings.pairs,
        nll=settings.nll,
    )
