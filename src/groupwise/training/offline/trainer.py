"""The loop of training on data: a batch of items, an optimizer step, and what a run writes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.errors import RunError, UsageError
from groupwise.evaluation import Estimate
from groupwise.prompts.order import PromptOrder
from groupwise.rundir.files import RunLog
from groupwise.training.checkpoint.files import Checkpoint, replace_folder
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.evaluation import Evaluation
from groupwise.training.monitor.monitor import note_end
from groupwise.training.monitor.progress import Progress
from groupwise.training.monitor.trackers import Tracker
from groupwise.training.signals import Requests, requests
from groupwise.types import Batch, Metrics, Objective, Update, Watch, unwatched
from groupwise.updates import TorchLearner


@runtime_checkable
class Task(Protocol):
    """What is learned from a data set."""

    def batch(self, items: Sequence[int]) -> tuple[Batch, Objective]:
        """The batch of an optimizer step on some items, and its loss."""
        ...

    def metrics(self, batch: Batch, objective: Objective, update: Update) -> Metrics:
        """Figures of a step."""
        ...

    def evaluate(self) -> Sequence[Mapping[str, Any]]:
        """Rows of an evaluation, one for each split, as `evaluations.jsonl` holds them; the "score"
        of the first decides which model is best."""
        ...


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """Settings of the loop.

    Attributes:
        steps: optimizer steps.
        items: items of a step.
        max_bad_steps: stop after this many consecutive steps without a finite gradient.
    """

    steps: int
    items: int
    max_bad_steps: int = 3


@dataclass(kw_only=True)
class OfflineTrainer:
    """One run on a data set.

    Attributes:
        task: makes batches of items and measures the model.
        learner: takes the steps.
        order: of the items.
        data: hash of the items.
        evaluation: when the model is evaluated, and how many evaluations in a row without a better
            score end the run.
        done: steps finished.
        bad_steps: consecutive steps without a finite gradient.
    """

    settings: OfflineSettings
    task: Task
    learner: TorchLearner
    order: PromptOrder
    data: str
    run_log: RunLog
    progress: Progress
    checkpoints: CheckpointManager
    evaluation: Evaluation
    name: str = "run"
    learner_name: str = "policy"
    trackers: Sequence[Tracker] = ()
    watch: Watch = field(default=unwatched)
    done: int = 0
    bad_steps: int = 0

    def run(self) -> None:
        """Train until the last step; whatever ends the run earlier, a checkpoint is written first.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the current step is finished and saved.
            RunError: updates stay without a finite gradient, a wait took too long, or the disk is
                full.
        """
        with requests() as asked:
            try:
                self._take_steps(asked)
            except KeyboardInterrupt:
                self._log(self.checkpoints.interruption(self.done))
                raise
            except Exception as error:
                note_end(self.run_log, self.done, error)
                raise

    def _take_steps(self, asked: Requests) -> None:
        if self.done == 0 or self._evaluation_due():
            self._evaluate()
        while self.done < self.settings.steps and not self.evaluation.exhausted:
            before = self.done, self.learner.version, self.order.state()
            try:
                self.advance()
            except BaseException:
                self._rescue(*before)
                raise
            ended = self.done == self.settings.steps or self.evaluation.exhausted
            stop = asked.stop  # Read once, as in the other trainer.
            if stop or ended:
                self.save(wait=True)
            elif self.checkpoints.due(self.done, asked):
                self.save()
            if stop:
                raise KeyboardInterrupt

    def advance(self) -> None:
        """Take a step, log it, and evaluate where that is due."""
        start = time.perf_counter()
        with self.watch("the update"):
            batch, objective = self.task.batch(self.order.next(self.settings.items))
            update = self.learner.update(batch, objective)
        metrics = {
            **self.task.metrics(batch, objective, update),
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "epoch": self.order.epoch,
        }
        seconds = time.perf_counter() - start
        tokens = sum(map(len, batch.prompts)) + int(batch.length.sum())
        metrics |= {"tokens_per_second": tokens / seconds, "seconds": seconds}
        step = self.done + 1
        self.run_log.step(step, metrics)
        self.done = step  # Set after logging: no checkpoint may be ahead of the logs.
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self.progress.step(self.name, step, {**metrics, "supervised_loss": update.loss})
        self._judge(update)
        if self._evaluation_due():
            self._evaluate()

    def _judge(self, update: Update) -> None:
        finite = abs(update.grad_norm) < float("inf")
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if self.bad_steps >= self.settings.max_bad_steps:
            raise RunError(
                f"optimizer: {self.bad_steps} consecutive steps gave no finite gradient "
                "(guards.max_bad_steps); none was taken. Lower optimizer.learning_rate, or use "
                "model.dtype = 'float32'."
            )

    def _evaluation_due(self) -> bool:
        return self.evaluation.due(self.done, final=self.done == self.settings.steps)

    def _evaluate(self) -> None:
        """Evaluate the model, log the figures, and save the model if it is the best so far."""
        with self.watch("the evaluation"):
            rows = self.task.evaluate()
        logged = [{k: v for k, v in row.items() if k != "score"} for row in rows]
        self.run_log.evaluation(self.done, *logged)
        for row in rows:
            self._log(f"{row['split']}: {_shown(row['figures'])}")
            values = {f"{row['split']}/{k}": cell["value"] for k, cell in row["figures"].items()}
            for tracker in self.trackers:
                tracker.log(self.done, {k: v for k, v in values.items() if v is not None})
        score = float(rows[0]["score"]) if rows else float("nan")
        if score > self.evaluation.best and self.evaluation.keep_best and self.done:
            replace_folder(self.run_log.folder / "best", self.learner.save)
            self.evaluation.best_step = self.done
        self.evaluation.record(self.done, score)

    def _log(self, text: str) -> None:
        self.progress.log(f"{self.name}, step {self.done}: {text}")

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of everything the next step depends on, in the background."""
        state = {
            "learners": {self.learner_name: self.learner.state()},
            "order": self.order.state(),
            "data": self.data,
            "evaluation": self.evaluation.state(),
            "loop": {"bad_steps": self.bad_steps},
        }
        weights = {self.learner_name: self.learner.trained()}
        self.checkpoints.write(
            self.done, weights=weights, state=state, best=self.evaluation.best_step
        )
        if wait:
            self.checkpoints.wait()

    def _rescue(self, done: int, version: int, order: Mapping[str, Any]) -> None:
        """Write a checkpoint before an error ends the run, unless an update is half done."""
        updated = self.learner.version != version
        if self.done == done and not updated:
            self.order.restore(order)
        try:
            if self.done > self.checkpoints.saved and (self.done > done or not updated):
                self.save(wait=True)
            else:
                self.checkpoints.wait()
        except RunError as error:
            self._log(str(error))

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint as if the run had never stopped.

        Raises:
            UsageError: the data or the seed are not those of the checkpoint.
        """
        self.order.restore(saved.state["order"])
        if saved.state.get("data", self.data) != self.data:
            raise UsageError(
                "data: is not that of the run to resume, though it has as many rows; put it back "
                "as it was, or start a new run with --set output=FOLDER."
            )
        self.learner.set_trained(saved.weights[self.learner_name])
        self.learner.restore(saved.state["learners"][self.learner_name])
        self.evaluation.restore(saved.state["evaluation"])
        self.bad_steps = int(saved.state["loop"]["bad_steps"])
        self.done = saved.step
        self.checkpoints.resume(saved.step, best=self.evaluation.best_step)

    def finish(self) -> Path:
        """Write the trained model as a plain folder, with a model card."""
        from groupwise.report.card import write_model_card

        final, run = self.run_log.folder / "final", self.run_log.folder

        def write(folder: str) -> None:
            self.learner.save(folder)
            write_model_card(run, folder)

        replace_folder(final, write)
        return final


def evaluation_row(split: str, figures: Mapping[str, Estimate], *, score: float) -> dict[str, Any]:
    """A row of `Task.evaluate`."""
    shown = {name: value.as_dict() for name, value in figures.items()}
    return {"split": split, "figures": shown, "score": score}


def _shown(figures: Mapping[str, Mapping[str, float | None]]) -> str:
    """Figures in one line."""
    return ", ".join(
        f"{name.replace('_', ' ')} {cell['value']:.3f}"
        for name, cell in figures.items()
        if cell["value"] is not None
    )
