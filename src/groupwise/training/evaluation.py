"""When a run is evaluated, and which evaluation was the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Evaluate = Callable[[int], Mapping[str, Any]]
"""Maps a step to the row of its evaluation; its "score" decides which model is best."""


@dataclass(kw_only=True)
class Evaluation:
    """The schedule of a run's evaluations and their record.

    Attributes:
        evaluate: measures the model on held-out prompts; None where there are none.
        every_steps: steps between evaluations; 0 evaluates after the last step only.
        at_start: whether the base model is to be evaluated before the first step; it never counts
            as the best.
        keep_best: whether the model of the best evaluation is saved in `best/`.
        best, best_step: the highest score and its step.
        last: step of the last evaluation.
        patience: evaluations in a row without a new best that end the run; 0 never ends it.
        stale: such evaluations so far.
    """

    evaluate: Evaluate | None = None
    every_steps: int = 0
    at_start: bool = False
    keep_best: bool = True
    best: float = -math.inf
    best_step: int | None = None
    last: int = 0
    patience: int = 0
    stale: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the best score is older than the patience allows."""
        return bool(self.patience) and self.stale >= self.patience

    def record(self, step: int, score: float) -> None:
        """Note the score of an evaluation."""
        self.stale = 0 if score > self.best else self.stale + 1
        self.best, self.last = max(self.best, score), step

    def due(self, step: int, *, final: bool) -> bool:
        """Whether the model is to be evaluated after this step."""
        if self.evaluate is None or step <= self.last:
            return False
        return final or bool(self.every_steps and step % self.every_steps == 0)

    def due_at_start(self, step: int) -> bool:
        """Whether the base model is still to be evaluated."""
        return self.evaluate is not None and self.at_start and step == 0

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        known = {"best": self.best, "best_step": self.best_step, "last": self.last}
        return known | ({"stale": self.stale} if self.patience else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.best, self.best_step = float(state["best"]), state["best_step"]
        self.last = int(state["last"])
        self.stale = int(state.get("stale", 0))
