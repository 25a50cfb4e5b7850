"""Training with a second learner, whose output for every token is an input of the advantages and
which learns from the same rollouts as the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from groupwise.training.checkpoint.files import replace_folder
from groupwise.training.trainer import Trainer
from groupwise.types import Batch, Metrics, ScoredGroups, StepResult, Update


@dataclass(kw_only=True)
class SecondLearnerTrainer(Trainer, ABC):
    """A run with a second learner; subclasses define what it learns.

    Attributes:
        second: name of that learner in `learners`, in metrics and in the run directory.
        freeze_policy_steps: number of initial steps that train only this learner.
    """

    second: ClassVar[str]
    freeze_policy_steps: int = 0

    @abstractmethod
    def learn(
        self, batch: Batch, scored: ScoredGroups
    ) -> tuple[Batch, tuple[Update, ...], Metrics]:
        """Train the second learner: the batch with the columns that the advantages need, its
        updates, and their metrics. The columns are computed before the updates."""

    def step(self) -> StepResult:
        """Train both learners on one batch of rollouts."""
        self.monitor.begin_step(self.policy)
        scored = self.source.take(self.settings.prompts_per_step, step=self.done)
        batch = self.evaluated(scored)
        with self.watch(f"the learner {self.second!r}"):
            batch, updates, metrics = self.learn(batch, scored)
        return self.learned(scored, batch, metrics, beside={self.second: updates})

    def update(self, batches: Sequence[Batch]) -> dict[str, tuple[Update, ...]]:
        """The optimizer steps of the policy; none while it is frozen."""
        return {} if self.done < self.freeze_policy_steps else super().update(batches)

    def finish(self) -> Path | None:
        """Write the trained models as plain folders, the second learner next to the policy."""
        final = super().finish()
        if self.folder is not None:
            replace_folder(self.folder / self.second, self.learners[self.second].save)
        return final


def with_column(batch: Batch, name: str, column: Tensor) -> Batch:
    """The batch with one column more."""
    return replace(batch, columns={**batch.columns, name: column})
