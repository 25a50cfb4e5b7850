"""Training with a critic, whose values are computed before the advantages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from statistics import fmean
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.advantages import advantage_inputs, value_targets
from groupwise.algorithms.binding import SLOTS, settings_of
from groupwise.algorithms.losses import VALUE_LOSSES, WEIGHTINGS, ValueObjective
from groupwise.algorithms.losses.values import differ, explained_variance
from groupwise.registry import BoundFunction, spec
from groupwise.settings import CriticSettings
from groupwise.training.checkpoint.files import Checkpoint
from groupwise.training.second_learner import SecondLearnerTrainer, with_column
from groupwise.types import (
    Batch,
    Metrics,
    ScoredGroups,
    Update,
)
from groupwise.updates import assemble

POOLED_STEPS = 20
"""Number of steps over which the critic's errors are pooled."""

TOKEN_MEAN = WEIGHTINGS.bind(spec("batch_token_mean"))
"""The critic's loss is a mean over all tokens of an optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Returns:
    """How returns are computed from rewards.

    Attributes:
        gamma: discount per token.
        lam: λ of the returns.
        injected: how injected tokens count (see `gae`).
        kl: coefficient of the KL penalty per token in the reward.
    """

    gamma: float = 1.0
    lam: float = 1.0
    injected: Any = "carry"
    kl: float = 0.0

    @classmethod
    def of(cls, algorithm: BoundAlgorithm, *, lam: float) -> Returns:
        """The settings of an algorithm's advantage."""
        own = settings_of(SLOTS["advantage"], algorithm.row.advantage)
        return cls(
            gamma=own.get("gamma", 1.0),
            lam=lam,
            injected=own.get("injected", "carry"),
            kl=algorithm.kl_in_reward,
        )

    def __call__(self, scored: ScoredGroups, batch: Batch) -> Tensor:
        """Returns of every token [batch, time], from a batch with its columns of values."""
        data = advantage_inputs(scored, batch)
        kl = data["kl"]
        found = value_targets(
            data["rewards"],
            data["values"],
            data["mask"],
            data["valid"],
            None if kl is None or not self.kl else self.kl * kl,
            data["bootstrap"],
            gamma=self.gamma,
            lam=self.lam,
            injected=self.injected,
        )
        return found.flatten(0, 1).float()


def with_values(batch: Batch, found: Tensor, scored: ScoredGroups) -> Batch:
    """The batch with the values before each token, and after truncated completions.

    Args:
        found: the critic's outputs, with one column more than there are tokens where it reads
            states after the last token.
    """
    time = batch.mask.shape[1]
    columns = {**batch.columns, "values": found[:, :time]}
    if found.shape[1] > time:
        cut = torch.tensor([c.finish == "length" for g in scored.groups for c in g.completions])
        after = found.gather(1, batch.length[:, None]).squeeze(1)
        columns["bootstrap"] = torch.where(cut & batch.mask.any(1), after, 0)
    return replace(batch, columns=columns)


def critic_metrics(batch: Batch) -> Metrics:
    """How well values predict returns, of a batch with both columns.

    Returns:
        "explained_variance" over all tokens that the policy wrote, "explained_variance_last" over
        the last ones alone, and "returns", their mean; NaN where the returns are all equal.
    """
    values, returns, mask = batch.columns["values"], batch.columns["returns"], batch.mask
    return {
        "explained_variance": explained_variance(values, returns, mask),
        "explained_variance_last": explained_variance(values, returns, last_tokens(mask)),
        "returns": float(returns[mask].double().mean()) if mask.any() else float("nan"),
    }


def last_tokens(mask: Bool[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """True at the last token that the policy wrote of each completion.

    Example:
        >>> last_tokens(torch.tensor([[True, True, False]]))
        tensor([[False,  True, False]])
    """
    later = pad(mask, (0, 1)).flip(1).cumsum(1).flip(1)[:, 1:]
    return mask & (later == 0)


class PooledErrors:
    """Errors of the values, pooled over the tokens of the last `POOLED_STEPS` steps.

        R² = 1 − Σ (R − V)² / Σ (R − mean R)²

    When few answers of a step are wrong, the explained variance of a single step is mostly noise.
    Unlike explained variance, R² also counts a value that is too high or too low everywhere.

    Example:
        >>> pooled, mask = PooledErrors(), torch.tensor([[True, True]])
        >>> for r in (0.0, 1.0):
        ...     pooled.add(torch.tensor([[0.5, 0.25 + r / 2]]), torch.full((1, 2), r), mask)
        >>> pooled.metrics()
        {'pooled_r2': 0.375, 'pooled_r2_last': 0.75}
    """

    def __init__(self) -> None:
        self._steps: deque[list[list[float]]] = deque(maxlen=POOLED_STEPS)

    def add(
        self,
        values: Float[Tensor, "batch time"],
        returns: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
    ) -> None:
        """Count the tokens of a step."""
        sums = []
        for chosen in (mask, last_tokens(mask)):
            r, v = returns[chosen].double(), values[chosen].double()
            parts = (torch.ones_like(r), r, r**2, (r - v) ** 2)
            sums.append([float(part.sum()) for part in parts])
        self._steps.append(sums)

    def metrics(self) -> Metrics:
        """ "pooled_r2" over all tokens, "pooled_r2_last" over last ones; NaN where all returns are
        equal."""
        found = {}
        for place, name in enumerate(("pooled_r2", "pooled_r2_last")):
            parts = zip(*(step[place] for step in self._steps), strict=True)
            count, total, squares, errors = (fsum(part) for part in parts)
            spread = squares - total**2 / count if count else 0.0
            found[name] = 1 - errors / spread if differ(spread, squares) else float("nan")
        return found

    def state(self) -> list[list[list[float]]]:
        """State for `restore`."""
        return list(self._steps)

    def restore(self, state: Sequence[list[list[float]]]) -> None:
        """Restore a saved state."""
        self._steps = deque(state, maxlen=POOLED_STEPS)


@dataclass(kw_only=True)
class CriticTrainer(SecondLearnerTrainer):
    """A run whose learners are "policy" and "critic".

    Attributes:
        critic: settings of the critic.
        value_loss: its loss.
        pooled: its errors over the last steps.
    """

    second: ClassVar[str] = "critic"
    critic: CriticSettings = field(default_factory=CriticSettings)
    value_loss: BoundFunction
    pooled: PooledErrors = field(default_factory=PooledErrors)

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on beyond the weights."""
        return {**super().state(), "pooled_errors": self.pooled.state()}

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint as if the run had never stopped."""
        super().restore(saved)
        self.pooled.restore(saved.state.get("pooled_errors", []))

    def learn(
        self, batch: Batch, scored: ScoredGroups
    ) -> tuple[Batch, tuple[Update, ...], Metrics]:
        """The batch with values and returns, the critic's updates, and their metrics.

        The values are those before the updates. Where the returns do not depend on them, they are
        taken from the first update, so its rows need no forward pass of their own.
        """
        own, critic = self.critic, self.learners[self.second]
        returns = Returns.of(self.algorithm, lam=own.lam)
        steps = critic_batches(own.minibatches, own.epochs, seed=(self.settings.seed, self.done))
        if own.lam == 1 and not own.bootstrap:
            none = with_values(batch, torch.zeros(batch.mask.shape), scored)
            batch = with_column(none, "returns", returns(scored, none))
            batch, first = self._values_of_first_update(batch, steps)
            updates = [first]
        else:
            found = critic.evaluate(batch, {"values"})["values"]
            batch = with_values(batch, found, scored)
            batch = with_column(batch, "returns", returns(scored, batch))
            updates = []
        batch = with_column(batch, "old_values", batch.columns["values"])
        objective = ValueObjective(loss=self.value_loss)
        for part in steps(batch)[len(updates) :]:
            updates.append(critic.update(part, objective))
        losses = [update.loss for update in updates]
        self.pooled.add(batch.columns["values"], batch.columns["returns"], batch.mask)
        metrics = {
            **critic_metrics(batch),
            **self.pooled.metrics(),
            "value_loss": fmean(losses),
        }
        if (share := _clip_share(self.value_loss, steps(batch), updates)) is not None:
            metrics["value_clip_share"] = share
        return batch, tuple(updates), metrics

    def _values_of_first_update(self, batch: Batch, steps: Steps) -> tuple[Batch, Update]:
        """The batch with the values before the first update, and that update."""
        critic = self.learners[self.second]
        rows = torch.arange(len(batch.tokens), dtype=torch.float32)
        first = steps(with_column(batch, "row", rows))[0]
        place = first.columns["row"].long()
        rest = torch.ones(len(rows), dtype=torch.bool).index_fill(0, place, False)
        others = replace(batch, mask=batch.mask & rest[:, None])
        values = torch.zeros(batch.mask.shape)
        if others.mask.any():
            values = critic.evaluate(others, {"values"})["values"].float()
        update = critic.update(first, ValueObjective(loss=self.value_loss))
        assert update.values is not None, "a learner with a value head returns its values"
        values[place, : first.mask.shape[1]] = torch.where(first.mask, update.values, 0)
        return with_column(batch, "values", values), update


Steps = Callable[[Batch], list[Batch]]
"""From a batch to those of its optimizer steps, the same rows every time."""


def critic_batches(minibatches: int, epochs: int, *, seed: tuple[int, ...]) -> Steps:
    """How the critic goes through a batch."""

    def batches(batch: Batch) -> list[Batch]:
        return assemble(
            batch,
            torch.zeros(len(batch.tokens), 1),
            lambda mask, group: TOKEN_MEAN({"mask": mask, "group": group}),
            minibatches=minibatches,
            epochs=epochs,
            seed=(*seed, 1),  # Another partition of the rows than the policy's.
        )

    return batches


def _clip_share(
    loss: BoundFunction, batches: Sequence[Batch], updates: Sequence[Update]
) -> float | None:
    """Share of tokens whose value had moved beyond the clip when they were learned from; None where
    nothing is clipped."""
    settings = settings_of(VALUE_LOSSES, loss.spec)
    if "clip" not in settings:
        return None
    beyond = total = 0
    for batch, update in zip(batches, updates, strict=True):
        assert update.values is not None
        moved = update.values[:, : batch.mask.shape[1]] - batch.columns["old_values"]
        beyond += int((moved.abs() > settings["clip"])[batch.mask].sum())
        total += int(batch.mask.sum())
    return beyond / total if total else 0.0
