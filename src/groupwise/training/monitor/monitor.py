"""Collects metrics, logs and alerts of a run, and judges its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from groupwise.errors import GroupwiseError, RunError, first_line
from groupwise.rollouts.spans import Spans
from groupwise.rundir.files import RunLog
from groupwise.training.monitor.alerts import Alert, Alerts
from groupwise.training.monitor.divergence_guard import DivergenceGuard, Verdict, suspects
from groupwise.training.monitor.metrics import Clipping, step_costs, step_metrics
from groupwise.training.monitor.progress import Progress, ShowsFigures
from groupwise.training.monitor.trackers import Tracker, completion_rows
from groupwise.types import Learner, Metrics, StepResult

MOST_KINDS = 5
"""Kinds of errors of rewards that a run shows."""


class Monitor:
    """Measures every step, writes it down, and judges it.

    Args:
        run_log: the run directory; None writes nothing.
        progress: shows the run; None shows nothing.
        trackers: receive every step's metrics, and completions where rollouts are written.
        alerts, guard: warn about steps, and decide whether the run continues.
        name: of the run in messages, as several may be shown at once.
        rollouts_every: steps between files of rollouts; 0 writes none.

    Attributes:
        spans: what processes do, for the timeline; None writes none.
        queue: how many groups stand where.
    """

    def __init__(
        self,
        *,
        run_log: RunLog | None = None,
        progress: Progress | None = None,
        trackers: Sequence[Tracker] = (),
        alerts: Alerts | None = None,
        guard: DivergenceGuard | None = None,
        name: str = "run",
        rollouts_every: int = 10,
    ) -> None:
        self.run_log, self.progress, self.trackers = run_log, progress, trackers
        self.alerts, self.guard = alerts or Alerts(), guard or DivergenceGuard()
        self.name, self.rollouts_every = name, rollouts_every
        self.spans: Spans | None = None
        self.queue: Callable[[], Mapping[str, int]] = dict
        self.moves = 0
        self._unmoved: Callable[[], float] | None = None
        self._start = 0.0
        self._step = 0
        self._reward_failure: str | None = None
        self._errors: set[str] = set()
        self._held_out: float | None = None

    def begin_step(self, policy: Learner) -> None:
        """Start the clock, and watch whether the second step moves the policy's parameters.

        Not the first one, which moves one factor of a low-rank adapter only: the other factor
        starts at 0, and so does the gradient.
        """
        self._start = time.perf_counter()
        self._unmoved = policy.movement() if self.moves == 1 else None

    def measured(
        self, result: StepResult, *, algorithm: Clipping, published: Metrics
    ) -> StepResult:
        """The step with its metrics.

        Args:
            algorithm: for the band that clip shares refer to.
            published: metrics of the engine about new weights.
        """
        metrics = {**published, **step_metrics(result, algorithm=algorithm)}
        if metrics.get("grad_norm", 0.0) > 0 and metrics["learning_rate"] > 0:
            self.moves += 1
            if self._unmoved is not None:
                metrics["unmoved_share"] = self._unmoved()
        every = [update for several in result.updates.values() for update in several]
        seconds = time.perf_counter() - self._start
        return replace(
            result, metrics={**metrics, **step_costs(result.scored, every, seconds=seconds)}
        )

    def write(self, step: int, result: StepResult, *, final: bool) -> None:
        """Write a step to the run directory."""
        if self.run_log is None:
            return
        policy = result.updates.get("policy", ())
        if result.metrics["skipped_updates"]:
            self.run_log.suspects(step, suspects(result.scored, result.batches, policy))
        self.run_log.step(step, result.metrics)
        if self.spans is not None:
            self.run_log.timeline(step, self.spans.drained(), self.queue(), self.spans.memory())
        every, advantages = self.rollouts_every, result.advantages
        if every and (step % every == 0 or step == 1 or final):
            per_completion = advantages if advantages.ndim == 2 else None
            self.run_log.rollouts(step, result.scored, per_completion)
            for tracker in self.trackers:
                tracker.table(step, completion_rows(step, result.scored))

    def judge(self, step: int, result: StepResult) -> Verdict:
        """Show a step, fire its alerts, and decide whether the run continues."""
        self._step = step
        for tracker in self.trackers:
            tracker.log(step, result.metrics)
        if self.progress is not None:
            known = {} if self._held_out is None else {"held_out": self._held_out}
            self.progress.step(self.name, step, {**result.metrics, **known})
        self._fire(self.alerts.observe(result.metrics))
        self._report_errors(result.scored.scores.errors)
        reason = self.guard.reward_failure_reason(result.scored.scores)
        if reason is not None:
            if self.guard.settings.silent_rewards == "stop":
                self._reward_failure = f"{reason} guards.silent_rewards = 'say' trains regardless."
                return "stop"
            self.log(reason)
        return self.guard.judge(result.metrics)

    @property
    def reason(self) -> str:
        """Why the run is stopped."""
        return self._reward_failure or self.guard.reason

    def ended(self, step: int, error: Exception) -> None:
        """Store why the run ended early, beside the alerts that its report shows."""
        if self.run_log is not None:
            note_end(self.run_log, step, error)

    def write_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Write an evaluation, with those of other splits, to the run directory and the trackers,
        and show it."""
        rows = [*row.get("others", ()), row]
        if self.run_log is not None:
            logged = [
                {k: v for k, v in each.items() if k not in ("score", "others")} for each in rows
            ]
            self.run_log.evaluation(step, *logged)
        for each in rows:
            self._show_evaluation(step, each)

    def _show_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        figures = {name: cell["value"] for name, cell in row.get("figures", {}).items()}
        split = str(row.get("split", "held-out"))
        for tracker in self.trackers:
            tracker.log(step, {f"{split}/{name}": value for name, value in figures.items()})
        if "greedy" in figures and split == "held_out":
            self._held_out = greedy = figures["greedy"]
            if isinstance(self.progress, ShowsFigures):
                self.progress.update(self.name, {"held_out": greedy})
        accuracies = {k: figures[k] for k in ("greedy", "sampled") if k in figures}
        told = ", ".join(f"{name} {100 * value:.1f} %" for name, value in accuracies.items())
        if told:
            self.log(f"{split.replace('_', '-')}: {told}")

    def judge_evaluation(self, score: float) -> None:
        """Fire the alerts of an evaluation."""
        self._fire(self.alerts.observe_evaluation(score))

    def _report_errors(self, errors: Sequence[str]) -> None:
        """Show and store the first error of each kind that rewards raise."""
        for error in errors:
            kind = ": ".join(error.split(": ")[:2])
            if kind in self._errors or len(self._errors) == MOST_KINDS:
                continue
            self._errors.add(kind)
            text = f"a completion was not scored: {error}"
            if self.run_log is not None:
                self.run_log.alert(self._step, "reward_error", text)
            self.log(text)

    def _fire(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            if self.run_log is not None:
                self.run_log.alert(self._step, alert.rule.threshold, str(alert))
            self.log(str(alert))

    def log(self, text: str) -> None:
        """Show a line that names the run and the step."""
        if self.progress is not None:
            self.progress.log(f"{self.name}, step {self._step}: {text}")

    def close(self) -> None:
        """End the trackers: nothing is measured after this."""
        for tracker in self.trackers:
            tracker.close()

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {
            "moves": self.moves,
            "alerts": self.alerts.state(),
            "guard": self.guard.state(),
        }

    def restore(self, state: Mapping[str, Any], *, step: int) -> None:
        """Restore a saved state of a step."""
        self._step, self.moves = step, int(state["moves"])
        self.alerts.restore(state["alerts"])
        self.guard.restore(state["guard"])


def note_end(run_log: RunLog, step: int, error: Exception) -> None:
    """Store why a run ended early, unless the disk is full."""
    own = isinstance(error, GroupwiseError)
    said = str(error) if own else f"{type(error).__name__}: {first_line(error)}"
    with suppress(RunError):
        run_log.alert(step, "ended", said)
