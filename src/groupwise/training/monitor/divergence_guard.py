"""What a run does about steps that went wrong: leave them out, count them, roll back, or stop."""

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
"""Steps whose gradient norms say what is usual."""

FIRST = 3
"""Batches whose rewards say whether there is anything to learn from."""

Verdict = Literal["fine", "lost", "stop", "spike"]


@dataclass(kw_only=True)
class Guard:
    """Judges steps, one after the other."""

    settings: GuardsSettings = field(default_factory=GuardsSettings)
    lost: int = 0
    rollbacks: int = 0
    _first: list[Scores] = field(default_factory=list)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """ "lost": nothing could be learnt from this step; "stop": too many of those on end;
        "spike": its gradient is far beyond the usual."""
        norm = metrics["grad_norm"]
        if metrics["skipped_updates"] or metrics["valid_share"] == 0:
            self.lost += 1
            return "stop" if self.lost >= self.settings.lost_steps else "lost"
        self.lost = 0
        limit = self.settings.spike
        usual = median(self._norms) if len(self._norms) >= WINDOW // 2 else math.inf
        if limit is not None and usual > 0 and norm > limit * usual:
            self.rollbacks += 1
            return "stop" if self.rollbacks > self.settings.rollbacks else "spike"
        if norm > 0:
            self._norms.append(norm)
        return "fine"

    def silent(self, scores: Scores) -> str | None:
        """Told of every batch: at the third one, why the rewards teach nothing, if that is so."""
        if len(self._first) == FIRST:
            return None
        self._first.append(scores)
        return reward_alert(self._first) if len(self._first) == FIRST else None

    @property
    def reason(self) -> str:
        """Why a run is stopped."""
        if self.rollbacks > self.settings.rollbacks:
            return (
                f"optimizer: {self.rollbacks} gradient spikes (guards.spike = "
                f"{self.settings.spike:g} times the usual norm), and guards.rollbacks = "
                f"{self.settings.rollbacks}; lower optimizer.learning_rate."
            )
        return (
            f"optimizer: nothing could be learnt from {self.lost} steps on end (guards.lost_steps "
            f"= {self.settings.lost_steps}): the gradient was not finite, or no completion could "
            "be judged. No such step was taken; the completions are in suspects/. Lower "
            "optimizer.learning_rate, or use model.dtype = 'float32'."
        )

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on from here."""
        return {
            "lost": self.lost,
            "rollbacks": self.rollbacks,
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
        """Go on from a saved state."""
        self.lost, self.rollbacks = int(state.get("lost", 0)), int(state.get("rollbacks", 0))
        self._norms = deque(state.get("norms", []), maxlen=WINDOW)
        self._first = [_verdicts(**each) for each in state.get("first", [])]


def _verdicts(
    *, total: torch.Tensor, status: Sequence[Sequence[str]], errors: Sequence[str]
) -> Scores:
    """As much of the scores of a batch as a checkpoint holds."""
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


def skipped(updates: Sequence[Update]) -> float:
    """How many updates were left out because their gradient was not finite."""
    return float(sum(not math.isfinite(update.grad_norm) for update in updates))


def suspects(
    scored: ScoredGroups, batches: Sequence[Batch], updates: Sequence[Update]
) -> list[dict[str, Any]]:
    """The completions that a step without a finite gradient is to be blamed on, as plain values:
    those whose log-probability or advantage is not finite, or all of the step if none is."""
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
