"""The loop: prompts → rollouts → rewards → advantages → losses → updates.

`Trainer.step` is those words in that order. What may have to go round again (dynamic sampling)
belongs to the source, what an algorithm is belongs to its row of the table, and where things run
belongs to whoever built the engine and the learner.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise import checkpoint
from groupwise.algorithms import Rules
from groupwise.checkpoint import Checkpoint
from groupwise.diagnostics import diagnose
from groupwise.errors import RunError
from groupwise.logs import Progress, RunLog, Tracker
from groupwise.rewards import alarm
from groupwise.source import RolloutSource
from groupwise.types import Batch, Engine, Metrics, ScoredGroups, Update
from groupwise.updates import TorchLearner, assemble, sequences

Evaluate = Callable[[int], Mapping[str, Any]]
"""From a step to the figures of an evaluation; "score" among them decides which model is the
best."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What the loop itself needs to know; sections of the configuration spell it out."""

    steps: int
    prompts_per_step: int
    seed: int = 0
    epochs: int = 1
    minibatches: int = 1
    checkpoint_every_steps: int = 0
    checkpoint_every_minutes: float | None = None
    keep_last: int = 2
    evaluate_every_steps: int = 0
    keep_best: bool = True
    rollouts_every: int = 10


@dataclass(kw_only=True)
class Trainer:
    """One run.

    Attributes:
        source, engine, learner: who makes scored groups, rollouts and updates.
        rules: the algorithm, bound to its settings.
        log: the run directory; None keeps nothing on disk (and so writes no checkpoints).
        evaluate: measures the model on held-out prompts; None where there are none.
        metrics: one row per step, as logged.
    """

    settings: TrainerSettings
    source: RolloutSource
    engine: Engine
    learner: TorchLearner
    rules: Rules
    log: RunLog | None = None
    progress: Progress | None = None
    trackers: Sequence[Tracker] = ()
    evaluate: Evaluate | None = None
    name: str = "run"
    done: int = 0
    best: float = float("-inf")
    metrics: list[Metrics] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)

    def step(self) -> tuple[ScoredGroups, Float[Tensor, "prompt group *time"], Metrics]:
        """One batch of rollouts and what it teaches."""
        settings, start = self.settings, time.perf_counter()
        scored = self.source.take(settings.prompts_per_step, step=self.done)
        batch = self._annotated(sequences(scored))
        advantages = self.rules.advantage(_evidence(scored, batch))
        batches = assemble(
            batch,
            advantages,
            self.rules.weighting,
            minibatches=settings.minibatches,
            epochs=settings.epochs,
            seed=(settings.seed, self.done),
        )
        updates = [self.learner.update(each, self.rules.objective) for each in batches]
        self.engine.load(self.learner.weights(), version=updates[-1].version)
        metrics = diagnose(scored, advantages, batches, updates, rules=self.rules)
        return scored, advantages, {**metrics, **_costs(scored, updates, start=start)}

    def _annotated(self, batch: Batch) -> Batch:
        """The batch with the log-probabilities that the algorithm needs beyond the current ones.

        With a single optimiser step the update begins where the sampler stood, so `old_logp` stays
            None: the learner
        takes its own log-probabilities, detached, and every ratio is exactly 1.
        """
        if self.settings.epochs * self.settings.minibatches > 1 or self.rules.kl_in_reward:
            batch = replace(batch, old_logp=self.learner.logprobs(batch))
        if self.rules.needs_reference:
            batch = replace(batch, ref_logp=self.learner.logprobs(batch, reference=True))
        return batch

    def run(self) -> list[Metrics]:
        """Train until the last step; on an interrupt a checkpoint is written first.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the step in hand is finished and saved.
            RunError: the rewards of the first batches say nothing, or updates stay without a finite
                gradient.
        """
        saved_at, last = self.done, time.monotonic()
        with _interrupts() as interrupted:
            while self.done < self.settings.steps:
                self.advance()
                if interrupted.is_set():
                    self.save()
                    raise KeyboardInterrupt
                if self._due(saved_at, last):
                    self.save()
                    saved_at, last = self.done, time.monotonic()
        if self.done > saved_at:
            self.save()
        return self.metrics

    def advance(self) -> ScoredGroups:
        """A step with everything that is written down about it."""
        scored, advantages, metrics = self.step()
        self.done += 1
        self.metrics.append(metrics)
        if self.log is not None:
            self.log.step(self.done, metrics)
            every = self.settings.rollouts_every
            if every and (self.done % every == 0 or self.done in (1, self.settings.steps)):
                self.log.rollouts(self.done, scored, advantages if advantages.ndim == 2 else None)
        for tracker in self.trackers:
            tracker.log(self.done, metrics)
        if self.progress is not None:
            self.progress.step(self.name, self.done, metrics)
        self._check(scored)
        every = self.settings.evaluate_every_steps
        if self.evaluate is not None and (
            (every and self.done % every == 0) or self.done == self.settings.steps
        ):
            self._measure(self.evaluate(self.done))
        return scored

    def _measure(self, figures: Mapping[str, Any]) -> None:
        """Note an evaluation, and keep the model if it is the best so far."""
        self.evaluations.append({"step": self.done, **figures})
        score = float(figures["score"])
        if self.log is not None:
            self.log.evaluation(self.done, {k: v for k, v in figures.items() if k != "score"})
            if self.settings.keep_best and score > self.best:
                self.learner.save(str(self.log.folder / "best"))
        self.best = max(self.best, score)

    def _check(self, scored: ScoredGroups) -> None:
        """Stop a run that cannot learn: rewards that say nothing, or gradients that are not
        finite."""
        if len(self.history) < 3:
            self.history.append(scored.scores)
            reason = alarm(self.history)
            if reason is not None and len(self.history) == 3:
                raise RunError(reason)
        norms = [row["grad_norm"] for row in self.metrics[-3:]]
        if len(norms) == 3 and not any(torch.isfinite(torch.tensor(norms))):
            raise RunError(
                "optimizer: the gradient was not finite in three steps on end, and none of them "
                "was taken; lower "
                "optimizer.learning_rate, or use model.dtype = 'float32'."
            )

    def _due(self, saved_at: int, last: float) -> bool:
        every, minutes = (
            self.settings.checkpoint_every_steps,
            self.settings.checkpoint_every_minutes,
        )
        by_steps = bool(every) and self.done - saved_at >= every
        return by_steps or (minutes is not None and time.monotonic() - last >= 60 * minutes)

    def save(self) -> None:
        """Write a checkpoint of everything the next step depends on."""
        if self.log is None:
            return
        state = {"learner": self.learner.state(), "source": self.source.state(), "best": self.best}
        saved = Checkpoint(step=self.done, weights=self.learner.trained(), state=state)
        checkpoint.save(self.log.folder / "checkpoints", saved, keep_last=self.settings.keep_last)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, as if the run had never stopped."""
        self.learner.set_trained(saved.weights)
        self.learner.restore(saved.state["learner"])
        self.source.restore(saved.state["source"])
        self.best, self.done = float(saved.state["best"]), saved.step
        self.engine.load(self.learner.weights(), version=self.learner.version)

    def finish(self) -> Path | None:
        """Write the trained model as a plain folder."""
        if self.log is None:
            return None
        final = self.log.folder / "final"
        self.learner.save(str(final))
        return final


def _costs(scored: ScoredGroups, updates: Sequence[Update], *, start: float) -> Metrics:
    """Seconds of the step as a whole and by stage, and the most memory used so far."""
    stages = dict(scored.seconds)
    for update in updates:
        for stage, seconds in update.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    return {
        "seconds": time.perf_counter() - start,
        **{f"seconds.{stage}": seconds for stage, seconds in stages.items()},
        "memory_mb": peak,
    }


def _evidence(scored: ScoredGroups, batch: Batch) -> dict[str, Any]:
    """What an advantage may ask for, as [prompt, group] or [prompt, group, time]."""
    scores = scored.scores
    shape = scores.total.shape
    kl = None
    if batch.ref_logp is not None and batch.old_logp is not None:
        kl = torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0).unflatten(0, shape)
    return {
        "rewards": scores.total,
        "valid": scores.valid,
        "correct": scores.correct,
        "parts": scores.parts,
        "lengths": batch.length.view(shape),
        "mask": batch.mask.unflatten(0, shape),
        "kl": kl,
    }


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turns Ctrl-C and SIGTERM into a flag that is read between steps; a second one stops at
    once."""
    flag = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
