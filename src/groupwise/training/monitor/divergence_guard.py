"""Handling of bad steps: skip and count them, roll back, or stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from groupwise.rewards import reward_alert
from groupwise.settings import GuardsSettings
from groupwise.types import Batch, ScoredGroups, Scores, Status, Update

WINDOW = 20
"""Number of recent gradient norms whose median is the usual norm."""

FIRST = 3
"""Number of first batches whose rewards are checked for a signal."""

Verdict = Literal["fine", "bad", "stop", "spike"]


@dataclass(kw_only=True)
class DivergenceGuard:
    """Judges the steps of a run in order."""

    settings: GuardsSettings = field(default_factory=GuardsSettings)
    bad_steps: int = 0
    rollbacks: int = 0
    not_finite: int = 0
    learning_rate: float = math.nan
    _first: list[Scores] = field(default_factory=list)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """ "bad": the step gave no usable gradient; "stop": too many consecutive bad steps or too
        many spikes; "spike": the gradient norm is far above the usual."""
        norm = metrics.get("grad_norm", 0.0)
        if metrics["skipped_updates"] or metrics["valid_share"] == 0:
            self.bad_steps += 1
            broken = metrics["skipped_updates"] or metrics.get("broken_share", 0.0) > 0
            self.not_finite += int(bool(broken))
            self.learning_rate = metrics.get("learning_rate", self.learning_rate)
            return "stop" if self.bad_steps >= self.settings.max_bad_steps else "bad"
        self.bad_steps = self.not_finite = 0
        limit = self.settings.spike
        usual = median(self._norms) if len(self._norms) >= WINDOW // 2 else math.inf
        if limit is not None and usual > 0 and norm > limit * usual:
            self.rollbacks += 1
            return "stop" if self.rollbacks > self.settings.rollbacks else "spike"
        if norm > 0:
            self._norms.append(norm)
        return "fine"

    def reward_failure_reason(self, scores: Scores) -> str | None:
        """Called with the scores of every batch; at the third, why the rewards carry no signal, or
        None."""
        if len(self._first) == FIRST:
            return None
        self._first.append(scores)
        return reward_alert(self._first) if len(self._first) == FIRST else None

    @property
    def reason(self) -> str:
        """Why the run is stopped."""
        if self.rollbacks > self.settings.rollbacks:
            return (
                f"optimizer: {self.rollbacks} gradient spikes (guards.spike = "
                f"{self.settings.spike:g} times the usual norm), and guards.rollbacks = "
                f"{self.settings.rollbacks}; lower optimizer.learning_rate."
            )
        begun = (
            f"optimizer: {self.bad_steps} consecutive steps gave no usable gradient "
            f"(guards.max_bad_steps = {self.settings.max_bad_steps})"
        )
        if not self.not_finite:
            return (
                f"{begun}: no completion could be judged. Read the errors of the rewards in "
                "alarms.jsonl and rollouts/."
            )
        rate = f" = {self.learning_rate:g}" if math.isfinite(self.learning_rate) else ""
        return (
            f"{begun}: in {self.not_finite} of them, log-probabilities or the gradient were NaN or "
            "infinite, so the policy has probably diverged. These steps were skipped; their "
            f"completions are in suspects/. Lower optimizer.learning_rate{rate}, and resume from "
            f"a checkpoint before the collapse, or start again{self._advice()}."
        )

    def _advice(self) -> str:
        """What the gradient norms before the collapse suggest."""
        if len(self._norms) < 2:
            return ""
        return (
            f"; the norms of the last gradients were {min(self._norms):.3g} to "
            f"{max(self._norms):.3g} (optimizer.max_grad_norm limits them)"
        )

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {
            "bad_steps": self.bad_steps,
            "rollbacks": self.rollbacks,
            "not_finite": self.not_finite,
            "norms": list(self._norms),
            "first": [
                {
                    "total": scores.total,
                    "status": [[status.value for status in row] for row in scores.status],
                    "errors": list(scores.errors),
                }
                for scores in self._first
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.bad_steps, self.rollbacks = int(state["bad_steps"]), int(state["rollbacks"])
        self.not_finite = int(state.get("not_finite", 0))
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self._first = [_verdicts(**each) for each in state["first"]]


def _verdicts(
    *, total: torch.Tensor, status: Sequence[Sequence[str]], errors: Sequence[str]
) -> Scores:
    """The scores of a batch as far as a checkpoint holds them."""
    rows = tuple(tuple(map(Status, row)) for row in status)
    valid = torch.tensor([[each is Status.OK for each in row] for row in rows])
    return Scores(
        total=total,
        correct=torch.full_like(total, math.nan),
        parts={},
        status=rows,
        valid=valid,
        errors=tuple(errors),
    )


def suspects(
    scored: ScoredGroups, batches: Sequence[Batch], updates: Sequence[Update]
) -> list[dict[str, Any]]:
    """The completions that may have caused a gradient that is not finite, as plain values: those
    with a log-probability or advantage that is not finite, or all of the step if none has."""
    completions = [
        (group.prompt.id, completion) for group in scored.groups for completion in group.completions
    ]
    places = {tuple(map(int, c.tokens)): place for place, (_, c) in enumerate(completions)}
    found: dict[int, str] = {}
    for batch, update in zip(batches, updates, strict=True):
        used = batch.mask & update.computed[:, None]
        broken = {
            "log-probability": used & ~torch.isfinite(update.logp),
            "advantage": batch.mask & ~torch.isfinite(batch.advantage),
        }
        for what, where in broken.items():
            for row in where.any(1).nonzero().squeeze(-1).tolist():
                own = batch.tokens[row, : int(batch.length[row])].tolist()
                found.setdefault(places[tuple(own)], what)
    chosen = found or dict.fromkeys(range(len(completions)), "unknown")
    return [
        {"prompt": completions[place][0], "text": completions[place][1].text, "not_finite": what}
        for place, what in sorted(chosen.items())
    ]
