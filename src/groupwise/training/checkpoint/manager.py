"""When a run writes checkpoints, which ones it keeps, and which one it returns to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from groupwise.errors import RunError
from groupwise.rundir.files import RunLog
from groupwise.settings.sections import CheckpointSettings
from groupwise.training.checkpoint.files import (
    Checkpoint,
    RetentionPolicy,
    Writer,
    newest,
    prune,
    steps,
)
from groupwise.training.signals import Requests
from groupwise.types import Learner, Watch, unwatched


class Journal(Protocol):
    """What was noted in the steps since the last checkpoint."""

    def forget(self, before: int) -> None:
        """Delete what was noted in earlier steps."""
        ...


class CheckpointManager:
    """Writes a run's checkpoints into its directory, in the background.

    Args:
        run_log: the run directory.
        settings: when to write and what to keep.
        about: plain values that go into every checkpoint: settings, versions, threads.
        journals: of verdicts, replies and batches; what no checkpoint needs of them is deleted.
        watch: watches the waits for the disk.
    """

    def __init__(
        self,
        run_log: RunLog,
        *,
        settings: CheckpointSettings,
        about: Mapping[str, Any],
        journals: Sequence[Journal] = (),
        watch: Watch = unwatched,
    ) -> None:
        self.run_log, self.settings, self.about = run_log, settings, about
        self.journals, self.watch = tuple(journals), watch
        self.folder: Path = run_log.folder / "checkpoints"
        self.writer = Writer(self.folder)
        self.saved = 0
        self._last = time.monotonic()

    def check_room(self, learners: Iterable[Learner], *, log: Callable[[str], None]) -> None:
        """Check before the first step that the disk has room for the run.

        A checkpoint holds the trained weights, and for each of them up to three float32 values of
        the optimizer: two moments, and the master copy of a 16-bit weight.

        Raises:
            RunError: there is no room for a checkpoint.
        """
        size = 0
        for learner in learners:
            for weight in learner.trained().values():
                wide = 2 if weight.element_size() >= 4 else 3
                size += weight.numel() * (weight.element_size() + 4 * wide)
        free = shutil.disk_usage(self.run_log.folder).free
        # Another one is written before the oldest is deleted; `final` and `best` are smaller.
        wanted = (self.settings.keep_last + 1) * size
        have = f"{free / 2**30:.2g} GiB are free there"
        if free < size:
            raise RunError(
                f"output = {str(self.run_log.folder)!r}: a checkpoint of this run takes "
                f"{size / 2**30:.2g} GiB, and {have}; free some space or choose another output."
            )
        if free < wanted:
            log(
                f"checkpoints of this run take up to {wanted / 2**30:.2g} GiB "
                f"(checkpoint.keep_last = {self.settings.keep_last}), and {have}"
            )

    def due(self, done: int, asked: Requests) -> bool:
        """Whether to write one now: a signal asked, or enough steps or minutes have passed."""
        if asked.save:
            asked.save = False
            return True
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        by_steps = bool(every) and done - self.saved >= every
        by_time = minutes is not None and time.monotonic() - self._last >= 60 * minutes
        return by_steps or by_time

    def write(
        self,
        step: int,
        *,
        weights: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        best: int | None,
    ) -> None:
        """Start to write a checkpoint.

        Args:
            weights, state: as in `Checkpoint`.
            best: step of the best evaluation; its checkpoint is kept.

        Raises:
            RunError: the previous one could not be written.
        """
        self.wait()
        checkpoint = Checkpoint(step=step, weights=weights, state=state, about=self.about)
        self.writer.write(checkpoint, keep=self._policy(best), logs=self.run_log.files())
        self.saved, self._last = step, time.monotonic()

    def resume(self, step: int, *, best: int | None) -> None:
        """Continue after a checkpoint; deletes what an interrupted run left to delete."""
        self.saved = step
        prune(self.folder, keep=self._policy(best), step=step)

    def _policy(self, best: int | None) -> RetentionPolicy:
        settings = self.settings
        return RetentionPolicy(last=settings.keep_last, every=settings.keep_every, best=best)

    def interruption(self, done: int) -> str:
        """The message of an interrupted run: the step that it continues from, and the command.

        Args:
            done: finished steps.
        """
        again = f"--resume {self.run_log.folder}"
        if self.saved and self.saved == done:
            return f"interrupted and saved; continue with {again}"
        if self.saved:
            return f"interrupted; continue from the checkpoint at step {self.saved} with {again}"
        return f"interrupted before the first checkpoint; start again with {again}"

    def wait(self) -> None:
        """Wait until the checkpoint being written is on disk.

        Raises:
            RunError: it could not be written.
        """
        with self.watch("the disk to take a checkpoint"):
            self.writer.wait()
        kept = [step for step in steps(self.folder) if step <= self.saved]
        for journal in self.journals if kept else ():
            journal.forget(kept[-self.settings.keep_last :][0])

    def finish(self, done: int) -> None:
        """Delete the journals of all steps: the trained model is written."""
        for journal in self.journals:
            journal.forget(done)

    def newest(self) -> Checkpoint:
        """The last checkpoint.

        Raises:
            RunError: none is intact.
        """
        self.wait()
        found, skipped = newest(self.folder)
        if found is None:
            reason = "; ".join(skipped) or "none was written yet"
            raise RunError(f"{self.folder}: has no checkpoint to return to ({reason}).")
        return found
