"""Training with a token reward model, which learns from the outcomes of the rollouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from groupwise.algorithms.advantages.cloning import token_weights
from groupwise.algorithms.advantages.statistics import outcome
from groupwise.algorithms.losses import OutcomeObjective
from groupwise.algorithms.losses.outcomes import token_mean
from groupwise.training.second_learner import SecondLearnerTrainer, with_column
from groupwise.types import Batch, Metrics, ScoredGroups, Update


@dataclass(kw_only=True)
class TokenRewardTrainer(SecondLearnerTrainer):
    """A run whose learners are "policy" and "token_reward"."""

    second: ClassVar[str] = "token_reward"

    def learn(
        self, batch: Batch, scored: ScoredGroups
    ) -> tuple[Batch, tuple[Update, ...], Metrics]:
        """The batch with the scores of its tokens, the update of the token reward model, and its
        metrics. The scores are taken from the forward pass of that update."""
        judged = with_outcomes(batch, scored)
        update = self.learners[self.second].update(judged, OutcomeObjective())
        assert update.values is not None, "a learner with a value head returns its values"
        scores = torch.where(batch.mask, update.values, 0)
        metrics = token_reward_metrics(scores, judged)
        return with_column(batch, "token_scores", scores), (update,), metrics


def with_outcomes(batch: Batch, scored: ScoredGroups) -> Batch:
    """The batch with the column "outcome", 1 for right completions and 0 for wrong ones, and equal
    weights of the completions that have tokens to learn from."""
    scores = scored.scores
    right = outcome(scores.total, scores.correct) > 0.5
    used = batch.mask.any(1).float()
    batch = replace(batch, row_weight=used / used.sum().clamp(min=1))
    return with_column(batch, "outcome", right.flatten().float())


def token_reward_metrics(scores: Tensor, batch: Batch) -> Metrics:
    """Statistics of the scores of a batch.

    Returns:
        "token_reward_right" and "token_reward_wrong", the mean predicted probability of being
            right, over right and wrong completions; absent if there are none. "token_weight", the
            mean ω
        of all tokens.

    Example:
        >>> batch = Batch(prompts=(torch.tensor([1]),), group=torch.zeros(2).long(),
        ...     tokens=torch.zeros(2, 1).long(), length=torch.ones(2).long(),
        ...     mask=torch.ones(2, 1) > 0, advantage=torch.zeros(2, 1), weight=torch.zeros(2, 1),
        ...     columns={"outcome": torch.tensor([1.0, 0.0])})
        >>> token_reward_metrics(torch.tensor([[0.0], [-200.0]]), batch)
        {'token_weight': 0.5, 'token_reward_right': 0.5, 'token_reward_wrong': 0.0}
    """
    right, mask = batch.columns["outcome"] > 0.5, batch.mask
    if not mask.any():
        return {}
    chance = torch.sigmoid(token_mean(scores, mask))
    found = {"token_weight": float(token_weights(scores, mask, right)[mask].mean())}
    for name, rows in (("right", right), ("wrong", ~right)):
        chosen = chance[rows & mask.any(1)]
        if len(chosen):
            found[f"token_reward_{name}"] = float(chosen.mean())
    return found
