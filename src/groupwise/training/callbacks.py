"""The one place where other code joins the training loop."""

from __future__ import annotations

from groupwise.types import Metrics, StepResult


class Callback:
    """Base class of callbacks; override what is needed."""

    def on_step_begin(self, step: int) -> None:
        """Called before step number `step`, counted from 1."""

    def on_step(self, step: int, result: StepResult) -> None:
        """Called after a step has been logged, before its checkpoint and its evaluation."""

    def should_stop(self, metrics: Metrics) -> bool:
        """Called with each step's metrics; True makes this step the last one."""
        return False
