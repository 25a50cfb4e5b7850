"""The loop: prompts → rollouts → rewards → advantages → losses → updates.

`Trainer.step` is those words in that order. What may have to go round again (dynamic sampling)
belongs to the source, what an algorithm is belongs to its row of the table, and where things run
belongs to whoever built the engine and the learner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.errors import RunError
from groupwise.rollouts.source import RolloutSource
from groupwise.rundir.files import RunLog
from groupwise.training.checkpoint.files import Checkpoint, replace_folder
from groupwise.training.checkpoint.manager import Keeper
from groupwise.training.monitor.alerts import Alarm, Alarms, observations
from groupwise.training.monitor.costs import costs
from groupwise.training.monitor.divergence_guard import Guard, skipped, suspects
from groupwise.training.monitor.metrics import diagnose
from groupwise.training.monitor.progress import Progress
from groupwise.training.monitor.trackers import Tracker
from groupwise.training.signals import requests
from groupwise.types import (
    Batch,
    Engine,
    Metrics,
    PublishedWeights,
    ScoredGroups,
    Update,
    Watch,
    unwatched,
)
from groupwise.updates import TorchLearner, assemble, sequences

Evaluate = Callable[[int], Mapping[str, Any]]
"""From a step to the figures of an evaluation; "score" among them decides which model is best."""

Enough = Callable[[Metrics], bool]
"""From the metrics of a step to whether it was the last one."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What the loop itself needs to know; sections of the configuration spell it out."""

    steps: int
    prompts_per_step: int
    seed: int = 0
    epochs: int = 1
    minibatches: int = 1
    evaluate_every_steps: int = 0
    keep_best: bool = True
    rollouts_every: int = 10


@dataclass(kw_only=True)
class Trainer:
    """One run.

    Attributes:
        source, engine, learner: who makes scored groups, rollouts and updates.
        algorithm: the algorithm, bound to its settings.
        log: the run directory; None keeps nothing on disk.
        keeper: of its checkpoints; None writes none.
        evaluate: measures the model on held-out prompts; None where there are none.
        enough: hears of every step and may end the run before its last one, as at a budget.
        alarms, guard: what is said, and what is done, about steps that look or go wrong.
        watch: watches every wait.
        about: plain values that go into every checkpoint: settings, versions, threads.
    """

    settings: TrainerSettings
    source: RolloutSource
    engine: Engine
    learner: TorchLearner
    algorithm: BoundAlgorithm
    log: RunLog | None = None
    keeper: Keeper | None = None
    progress: Progress | None = None
    trackers: Sequence[Tracker] = ()
    evaluate: Evaluate | None = None
    enough: Enough | None = None
    alarms: Alarms = field(default_factory=Alarms)
    guard: Guard = field(default_factory=Guard)
    watch: Watch = unwatched
    about: Mapping[str, Any] = field(default_factory=dict)
    name: str = "run"
    done: int = 0
    evaluated: int = 0
    best: float = -math.inf
    best_step: int | None = None
    moved: bool = False

    def step(self) -> tuple[ScoredGroups, Float[Tensor, "prompt group *time"], Metrics]:
        """One batch of rollouts and what it teaches."""
        settings, start = self.settings, time.perf_counter()
        scored = self.source.take(settings.prompts_per_step, step=self.done)
        with self.watch("log-probabilities"):
            batch = self._annotated(sequences(scored, excluded=self.algorithm.kl_in_reward != 0))
        advantages = self.algorithm.advantage(evidence(scored, batch))
        batches = assemble(
            batch,
            advantages,
            self.algorithm.weighting,
            keep=scored.keep,
            minibatches=settings.minibatches,
            epochs=settings.epochs,
            seed=(settings.seed, self.done),
        )
        still = None if self.moved else self.learner.movement()
        with self.watch("the update") as beat:
            updates = [self._update(each, beat) for each in batches]
        with self.watch("the engine to take over new weights"):
            loaded = self._publish()
        metrics = loaded | diagnose(scored, advantages, batches, updates, algorithm=self.algorithm)
        metrics |= {**observations(scored), "skipped_updates": skipped(updates)}
        if still is not None and metrics["grad_norm"] > 0 and updates[-1].learning_rate > 0:
            self.moved, metrics["still_share"] = True, still()
        if metrics["skipped_updates"] and self.log is not None:
            self.log.suspects(self.done + 1, suspects(scored, batches, updates))
        return scored, advantages, {**metrics, **costs(scored, updates, start=start)}

    def _update(self, batch: Batch, beat: Callable[[], None]) -> Update:
        beat()
        with torch.random.fork_rng():
            # What an adapter's dropout draws depends on the seed and the step alone.
            torch.manual_seed(self.settings.seed * 1_000_003 + self.learner.version)
            return self.learner.update(batch, self.algorithm.objective)

    def _annotated(self, batch: Batch) -> Batch:
        """The batch with the log-probabilities that the algorithm needs beyond the current ones.

        With a single optimiser step the update begins where the sampler stood, so `old_logp` stays
        None: the learner takes its own log-probabilities, detached, and every ratio is exactly 1.
        """
        names = self.algorithm.needs & {"ref_logp"}
        if self.settings.epochs * self.settings.minibatches > 1 or self.algorithm.kl_in_reward:
            names |= {"logp"}
        found = self.learner.evaluate(batch, names)
        return replace(batch, old_logp=found.get("logp"), ref_logp=found.get("ref_logp"))

    def run(self) -> None:
        """Train until the last step; whatever ends it before, a checkpoint is written first.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the step in hand is finished and saved.
            RunError: the rewards of the first batches say nothing, updates stay without a finite
                gradient, a wait took too long, or the disk is full.
        """
        with requests() as asked:
            if self.done > self.evaluated and self._evaluation_due():
                self._evaluate()  # what ended the run before ended it here
                self.save(wait=True)
            while self.done < self.settings.steps:
                before = self.done, self.learner.version, self.source.state()
                try:
                    self.advance()
                except BaseException:
                    self._rescue(*before)
                    raise
                if asked.stop or self.done == self.settings.steps:
                    self.save(wait=True)
                elif self.keeper is not None and self.keeper.due(self.done, asked):
                    self.save()
                if asked.stop:
                    raise KeyboardInterrupt

    def advance(self) -> ScoredGroups:
        """A step with everything that is written down about it."""
        scored, advantages, metrics = self.step()
        step, every = self.done + 1, self.settings.rollouts_every
        if self.log is not None:
            self.log.step(step, metrics)
            if every and (step % every == 0 or step in (1, self.settings.steps)):
                self.log.rollouts(step, scored, advantages if advantages.ndim == 2 else None)
        self.done = step  # not before it is written down: no checkpoint may be ahead of the logs
        for tracker in self.trackers:
            tracker.log(self.done, metrics)
        if self.progress is not None:
            self.progress.step(self.name, self.done, metrics)
        self._sound(self.alarms.hear(metrics))
        self._check(scored, metrics)
        if self.enough is not None and self.enough(metrics):
            self.settings = replace(self.settings, steps=self.done)
        if self._evaluation_due():
            self._evaluate()
        return scored

    def _evaluation_due(self) -> bool:
        every = self.settings.evaluate_every_steps
        last = self.done == self.settings.steps
        return self.evaluate is not None and (last or bool(every) and self.done % every == 0)

    def _evaluate(self) -> None:
        """Measure the model, note the figures, and keep the model if it is the best so far."""
        assert self.evaluate is not None
        with self.watch("the evaluation"):
            figures = self.evaluate(self.done)
        score = float(figures["score"])
        if self.log is not None:
            if self.settings.keep_best and score > self.best:
                replace_folder(self.log.folder / "best", self.learner.save)
                self.best_step = self.done
            self.log.evaluation(self.done, {k: v for k, v in figures.items() if k != "score"})
        self.best, self.evaluated = max(self.best, score), self.done
        self._sound(self.alarms.hear_evaluation(score))

    def _sound(self, alarms: Sequence[Alarm]) -> None:
        for each in alarms:
            if self.log is not None:
                self.log.alarm(self.done, each.kind.threshold, str(each))
            self._say(str(each))

    def _say(self, text: str) -> None:
        """A line that names the run, as several may be shown at once, and the step."""
        if self.progress is not None:
            self.progress.say(f"{self.name}, step {self.done}: {text}")

    def _check(self, scored: ScoredGroups, metrics: Metrics) -> None:
        """Stop a run that cannot learn; roll back from a spike where that is asked for."""
        reason = self.guard.silent(scored.scores)
        if reason is not None:
            if self.guard.settings.silent_rewards == "stop":
                raise RunError(reason)
            self._say(reason)
        verdict = self.guard.judge(metrics)
        if verdict == "stop":
            raise RunError(self.guard.reason)
        if verdict == "spike":
            self._roll_back()

    def _roll_back(self) -> None:
        """The learner of the last checkpoint again; the batches since then are left out."""
        if self.keeper is not None:
            saved = self.keeper.newest()
            self._take_over(saved)
            self._say(f"gradient spike; the weights of step {saved.step} again")

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of everything the next step depends on, in the background."""
        if self.keeper is None:
            return
        trainer = {
            "best": self.best,
            "best_step": self.best_step,
            "evaluated": self.evaluated,
            "moved": self.moved,
            "alarms": self.alarms.state(),
            "guard": self.guard.state(),
        }
        state = {"learner": self.learner.state(), "source": self.source.state(), "trainer": trainer}
        weights = self.learner.trained()
        self.keeper.write(
            Checkpoint(step=self.done, weights=weights, state=state, about=self.about),
            best=self.best_step,
        )
        if wait:
            self.keeper.wait()

    def _rescue(self, done: int, version: int, source: Mapping[str, Any]) -> None:
        """Before an error ends the run: a checkpoint, unless an update is half done. Should that
        fail too, the first error is the one to show."""
        if self.learner.version == version:
            self.source.restore(source)
        elif self.done == done:
            return
        try:
            if self.keeper is not None and self.done > self.keeper.saved:
                self.save(wait=True)
            elif self.keeper is not None:
                self.keeper.wait()
        except RunError as error:
            self._say(str(error))

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, as if the run had never stopped."""
        self._take_over(saved)
        self.source.restore(saved.state["source"])
        trainer = saved.state["trainer"]
        self.best, self.best_step = float(trainer["best"]), trainer.get("best_step")
        self.moved = bool(trainer.get("moved"))
        self.alarms.restore(trainer.get("alarms", {}))
        self.guard.restore(trainer.get("guard", {}))
        self.done = saved.step
        self.evaluated = int(trainer.get("evaluated", self.done))
        if self.keeper is not None:
            self.keeper.resume(saved.step, best=self.best_step)

    def _take_over(self, saved: Checkpoint) -> None:
        self.learner.set_trained(saved.weights)
        self.learner.restore(saved.state["learner"])
        self._publish()

    def _publish(self) -> Metrics:
        """Hand the learner's present weights to the engine."""
        named = self.learner.weights()
        return self.engine.publish(PublishedWeights(version=self.learner.version, named=named))

    def finish(self) -> Path | None:
        """Write the trained model as a plain folder, with a card of what it is."""
        if self.log is None:
            return None
        from groupwise.report.card import write_model_card

        final, run = self.log.folder / "final", self.log.folder

        def write(folder: str) -> None:
            self.learner.save(folder)
            write_model_card(run, folder)

        replace_folder(final, write)
        if self.keeper is not None and self.keeper.journal is not None:
            self.keeper.journal.forget(self.done)
        return final


def evidence(scored: ScoredGroups, batch: Batch) -> dict[str, Any]:
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
