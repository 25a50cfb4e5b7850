"""Changes during a run: scheduled settings, the reference model, the optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from groupwise.algorithms import bind
from groupwise.algorithms.binding import POLICY
from groupwise.config import Config
from groupwise.config.recipes import with_values
from groupwise.errors import UsageError
from groupwise.rewards import Scorer
from groupwise.rollouts.source import RolloutSource
from groupwise.training.callbacks import Callback
from groupwise.training.trainer import Trainer
from groupwise.types import StepResult


class Changing(Callback):
    """Sets the scheduled numbers before every step, and replaces reference and optimizer state.

    The values depend only on the step number, so a resumed run continues identically.

    Args:
        config: of the run.
        trainer, source, scorer: the objects whose settings are scheduled.
    """

    def __init__(
        self, config: Config, trainer: Trainer, *, source: RolloutSource, scorer: Scorer
    ) -> None:
        self.config, self.trainer, self.source, self.scorer = config, trainer, source, scorer

    def on_step_begin(self, step: int) -> None:
        """Set the numbers of this step."""
        if not self.config.schedules:
            return
        now = scheduled(self.config, step)
        sections = {schedule.setting.partition(".")[0] for schedule in self.config.schedules}
        if "algorithm" in sections:
            algorithm = bind(now.algorithm.name, now.algorithm.overrides())
            self.trainer.algorithm = algorithm
            self.source.keep = algorithm.filter
        if "rewards" in sections:
            set_weights(self.scorer, [part.weight for part in now.rewards])
        self.source.sampling = now.sampling

    def on_step(self, step: int, result: StepResult) -> None:
        """Replace the reference and reset the optimizer where the step is due."""
        learner: Any = self.trainer.learners[POLICY]
        model, optimizer = self.config.model, self.config.optimizer
        if model.reference_every and step % model.reference_every == 0:
            learner.replace_reference()
        if optimizer.reset_every and step % optimizer.reset_every == 0:
            learner.reset_optimizer()


def scheduled(config: Config, step: int) -> Config:
    """The configuration with the numbers of a step.

    Args:
        step: counted from 1.

    Raises:
        UsageError: a setting that is not there, or a value that it cannot have.

    Example:
        >>> from groupwise.config import load
        >>> config = load("word-problems", [
        ...     "schedules=[{setting = 'rewards.0.weight', points = [[1, 0.0], [5, 1.0]]}]"])
        >>> scheduled(config, 3).rewards[0].weight
        0.5
    """
    values = {}
    for schedule in config.schedules:
        value = schedule.at(step)
        whole = schedule.setting == "sampling.max_tokens"
        values[schedule.setting] = round(value) if whole else value
    return with_values(config, values)


def check_schedules(config: Config) -> None:
    """Raise an error for schedules whose values are invalid at some point.

    Raises:
        UsageError: with the step and the setting.
    """
    for step in sorted({step for each in config.schedules for step, _ in each.points}):
        try:
            scheduled(config, step)
        except UsageError as error:
            raise UsageError(f"schedules, step {step}: {error}") from None
    longest = [max(v for _, v in s.points) for s in config.schedules if s.setting == MOST_TOKENS]
    if longest and longest[0] > config.sampling.max_tokens:
        raise UsageError(
            f"schedules: {MOST_TOKENS} rises to {longest[0]:g}; set sampling.max_tokens, which "
            f"the memory plan uses, to the highest value (it is {config.sampling.max_tokens})."
        )


MOST_TOKENS = "sampling.max_tokens"


def set_weights(scorer: Any, weights: Sequence[float]) -> None:
    """Give the parts of a scorer's reward other weights."""
    composition = scorer.composition
    parts = tuple(
        replace(part, weight=weight)
        for part, weight in zip(composition.parts, weights, strict=True)
    )
    scorer.composition = replace(composition, parts=parts)
