"""The loop: prompts → rollouts → rewards → advantages → losses → updates.

`Trainer.step` is those words in that order. Whatever repeats within a step (dynamic sampling)
belongs to the source, an algorithm is a row of the table, and where things run is decided by
whoever built the engine and the learners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.advantages import advantage_inputs
from groupwise.algorithms.binding import POLICY
from groupwise.errors import RunError
from groupwise.training.callbacks import Callback
from groupwise.training.checkpoint.files import Checkpoint, replace_folder
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.evaluation import Evaluation
from groupwise.training.monitor.monitor import Monitor
from groupwise.training.signals import Requests, requests
from groupwise.types import (
    Batch,
    Engine,
    Learner,
    Metrics,
    Objective,
    ScoredGroups,
    Source,
    StepResult,
    Update,
    Watch,
    unwatched,
)
from groupwise.updates import assemble, sequences


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of the loop itself.

    Attributes:
        masks_old_tokens: leave tokens of earlier policies out of the loss.
        proximal: whose log-probabilities `old_logp` are.
    """

    steps: int
    prompts_per_step: int
    seed: int = 0
    epochs: int = 1
    minibatches: int = 1
    masks_old_tokens: bool = False
    proximal: Literal["learner", "sampler"] = "learner"


@dataclass(kw_only=True)
class Trainer:
    """One run.

    Attributes:
        source, engine: make scored groups and rollouts.
        learners: by name; "policy" is the one that the engine samples from.
        algorithm: an algorithm bound to its settings.
        monitor: measures, logs and judges every step.
        evaluation: when the model is evaluated.
        checkpoints: writes and reads checkpoints; None writes none.
        callbacks: called around every step.
        folder: where `best/` and `final/` are written; None writes neither.
        watch: watches every wait.
        done: steps finished.
    """

    settings: TrainerSettings
    source: Source
    engine: Engine
    learners: Mapping[str, Learner]
    algorithm: BoundAlgorithm
    monitor: Monitor = field(default_factory=Monitor)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: CheckpointManager | None = None
    callbacks: Sequence[Callback] = ()
    folder: Path | None = None
    watch: Watch = unwatched
    done: int = 0

    @property
    def policy(self) -> Learner:
        """The learner whose weights the engine samples from."""
        return self.learners[POLICY]

    @property
    def objective(self) -> Objective:
        """The loss of the policy's updates."""
        return self.algorithm.objective

    def step(self) -> StepResult:
        """Train on one batch of rollouts."""
        self.monitor.begin_step(self.policy)
        scored = self.source.take(self.settings.prompts_per_step, step=self.done)
        return self.learned(scored, self.evaluated(scored), {})

    def learned(
        self,
        scored: ScoredGroups,
        batch: Batch,
        metrics: Metrics,
        *,
        beside: Mapping[str, tuple[Update, ...]] = MappingProxyType({}),
    ) -> StepResult:
        """The update from scored groups and their sequences, with the step's metrics.

        Args:
            scored: groups with their scores.
            batch: their sequences, with every column that the advantage needs.
            metrics: known already.
            beside: updates of further learners in this step, by their names.
        """
        advantages = self.algorithm.advantage(advantage_inputs(scored, batch))
        batches = self.assembled(batch, advantages, keep=scored.keep)
        updates = {**beside, **self.update(batches)}
        published = self._publish() if POLICY in updates else {}
        result = StepResult(scored=scored, advantages=advantages, batches=batches, updates=updates)
        return self.monitor.measured(
            result, algorithm=self.algorithm, published={**metrics, **published}
        )

    def evaluated(self, scored: ScoredGroups) -> Batch:
        """The sequences with the log-probabilities that the algorithm needs beyond the current
        ones, and, where there are tokens of earlier policies, the column "age".

        With a single optimizer step the update begins where the sampler stood, so `old_logp` stays
        None: the learner takes its own log-probabilities, detached, and every ratio is exactly 1.
        Tokens of earlier policies are weighted by the algorithm's correction, or masked, or their
        ratios start from the sampler's log-probabilities (`proximal`).
        """
        algorithm = self.algorithm
        batch = sequences(scored, excluded=algorithm.kl_in_reward != 0, version=self.policy.version)
        if self.settings.masks_old_tokens and "age" in batch.columns:
            batch = replace(batch, mask=batch.mask & (batch.columns["age"] == 0))
        with self.watch("log-probabilities"):
            names = algorithm.needs & {"ref_logp"}
            several = self.settings.epochs * self.settings.minibatches > 1
            if self.settings.proximal == "learner" and (several or algorithm.kl_in_reward):
                names |= {"logp"}
            found = self.policy.evaluate(batch, names)
        by_sampler = self.settings.proximal == "sampler"
        old = batch.sampler_logp if by_sampler else found.get("logp")
        return replace(batch, old_logp=old, ref_logp=found.get("ref_logp"))

    def assembled(
        self,
        batch: Batch,
        advantages: Float[Tensor, "prompt group *time"],
        *,
        keep: Bool[Tensor, "prompt group"],
    ) -> tuple[Batch, ...]:
        """The batches of the policy's optimizer steps."""
        steps = assemble(
            batch,
            advantages,
            self.algorithm.weighting,
            keep=keep,
            minibatches=self.settings.minibatches,
            epochs=self.settings.epochs,
            seed=(self.settings.seed, self.done),
            whole_groups=self.objective.granularity == "group",
        )
        return tuple(steps)

    def update(self, batches: Sequence[Batch]) -> dict[str, tuple[Update, ...]]:
        """The optimizer steps of one training step, by learner.

        A trainer with further learners overrides this; a step that leaves the policy as it is
        returns no entry for it, and the engine keeps its weights.
        """
        updates = []
        with self.watch("the update") as heartbeat:
            for batch in batches:
                heartbeat()
                updates.append(self.policy.update(batch, self.objective))
        return {POLICY: tuple(updates)}

    def _publish(self) -> Metrics:
        """Hand the policy's weights to the engine."""
        with self.watch("the engine to load new weights"):
            return self.engine.publish(self.policy.publish())

    def run(self) -> None:
        """Train until the last step; whatever ends the run earlier, a checkpoint is written first.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the current step is finished and saved.
            RunError: the rewards of the first batches carry no signal, updates stay without a
                finite gradient, a wait took too long, or the disk is full.
        """
        with requests() as asked:
            try:
                self._take_steps(asked)
            except KeyboardInterrupt:
                if self.checkpoints is not None:
                    self.monitor.log(self.checkpoints.interruption(self.done))
                raise
            except Exception as error:
                self.monitor.ended(self.done, error)
                raise

    def _take_steps(self, asked: Requests) -> None:
        if self.evaluation.due_at_start(self.done):
            self.monitor.log("evaluating the base model")
            self._evaluate()
        if self._evaluation_due():
            self._evaluate()  # The previous run was interrupted before this evaluation.
            self.save(wait=True)
        while self.done < self.settings.steps:
            before = self.done, self._versions(), self.source.state()
            try:
                self.advance()
            except BaseException:
                self._rescue(*before)
                raise
            # Read once: a signal that comes later ends the next step, which is saved.
            stop = asked.stop
            if stop or self.done == self.settings.steps:
                self.save(wait=True)
            elif self.checkpoints is not None and self.checkpoints.due(self.done, asked):
                self.save()
            if stop:
                raise KeyboardInterrupt

    def advance(self) -> StepResult:
        """Take a step, log it, and act on what the monitor and the callbacks say."""
        step = self.done + 1
        for callback in self.callbacks:
            callback.on_step_begin(step)
        result = self.step()
        self.monitor.write(step, result, final=step == self.settings.steps)
        self.done = step  # Set after logging: no checkpoint may be ahead of the logs.
        verdict = self.monitor.judge(step, result)
        for callback in self.callbacks:
            callback.on_step(step, result)
        if verdict == "stop":
            raise RunError(self.monitor.reason)
        if verdict == "spike":
            self._roll_back()
        if any([callback.should_stop(result.metrics) for callback in self.callbacks]):
            self.settings = replace(self.settings, steps=self.done)
        if self._evaluation_due():
            self._evaluate()
        return result

    def _evaluation_due(self) -> bool:
        return self.evaluation.due(self.done, final=self.done == self.settings.steps)

    def _evaluate(self) -> None:
        """Evaluate the model, log the figures, and save the model if it is the best so far."""
        evaluation = self.evaluation
        assert evaluation.evaluate is not None
        with self.watch("the evaluation"):
            row = evaluation.evaluate(self.done)
        if self.done == 0:
            self.monitor.write_evaluation(0, row)
            return
        score = float(row["score"])
        if evaluation.keep_best and score > evaluation.best and self.folder is not None:
            replace_folder(self.folder / "best", self.policy.save)
            evaluation.best_step = self.done
        self.monitor.write_evaluation(self.done, row)
        evaluation.record(self.done, score)
        self.monitor.judge_evaluation(score)
        self._stop_if_stale()

    def _stop_if_stale(self) -> None:
        """Make this step the last one if held-out accuracy has stopped rising."""
        if self.evaluation.exhausted and self.done < self.settings.steps:
            self.monitor.log(
                f"evaluation.patience = {self.evaluation.patience}: the score stopped improving; "
                f"the run ends at step {self.done} of {self.settings.steps}"
            )
            self.settings = replace(self.settings, steps=self.done)

    def _roll_back(self) -> None:
        """Restore the learners of the last checkpoint; the batches since then are left out."""
        if self.checkpoints is not None:
            saved = self.checkpoints.newest()
            self._restore_learners(saved)
            self.monitor.log(f"gradient spike; rolled back to the weights of step {saved.step}")

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of everything the next step depends on, in the background."""
        if self.checkpoints is None:
            return
        weights = {name: learner.trained() for name, learner in self.learners.items()}
        self.checkpoints.write(
            self.done, weights=weights, state=self.state(), best=self.evaluation.best_step
        )
        if wait:
            self.checkpoints.wait()

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on beyond the weights."""
        return {
            "learners": {name: learner.state() for name, learner in self.learners.items()},
            "source": self.source.state(),
            "evaluation": self.evaluation.state(),
            "monitor": self.monitor.state(),
        }

    def _versions(self) -> dict[str, int]:
        return {name: learner.version for name, learner in self.learners.items()}

    def _rescue(self, done: int, versions: Mapping[str, int], source: Mapping[str, Any]) -> None:
        """Write a checkpoint before an error ends the run, unless an update is half done; then
        finish the one that is being written. If that fails too, the first error is the one to
        raise."""
        if self.checkpoints is None:
            return
        updated = self._versions() != versions
        if self.done == done and not updated:
            self.source.restore(source)
        try:
            if self.done > self.checkpoints.saved and (self.done > done or not updated):
                self.save(wait=True)
            else:
                self.checkpoints.wait()
        except RunError as error:
            self.monitor.log(str(error))

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint as if the run had never stopped."""
        self._restore_learners(saved)
        self.source.restore(saved.state["source"])
        self.evaluation.restore(saved.state["evaluation"])
        self.monitor.restore(saved.state["monitor"], step=saved.step)
        self.done = saved.step
        self._stop_if_stale()
        if self.checkpoints is not None:
            self.checkpoints.resume(saved.step, best=self.evaluation.best_step)

    def _restore_learners(self, saved: Checkpoint) -> None:
        if self.learners.keys() != saved.weights.keys():
            raise RunError(
                f"checkpoint at step {saved.step}: contains the learners "
                f"{', '.join(sorted(saved.weights))}, but this run has "
                f"{', '.join(sorted(self.learners))}; resume with the settings of the run's "
                "config.json."
            )
        for name, learner in self.learners.items():
            learner.set_trained(saved.weights[name])
            learner.restore(saved.state["learners"][name])
        self._publish()

    def finish(self) -> Path | None:
        """Write the trained model as a plain folder, with a model card."""
        if self.folder is None:
            return None
        final = self.folder / "final"
        replace_folder(final, self.write_model)
        if self.checkpoints is not None:
            self.checkpoints.finish(self.done)
        return final

    def write_model(self, folder: str) -> None:
        """Write the current policy, with a model card."""
        from groupwise.report.card import write_model_card

        self.policy.save(folder)
        if self.folder is not None:
            write_model_card(self.folder, folder)
