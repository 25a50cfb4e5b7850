"""When a run writes checkpoints, which of them stay, and what it goes back to."""

from __future__ import annotations

import time
from pathlib import Path

from groupwise.errors import RunError
from groupwise.rewards.cache import RewardCache
from groupwise.rundir.files import RunLog
from groupwise.settings import CheckpointSettings
from groupwise.training.checkpoint.files import Checkpoint, Keep, Writer, newest, prune, steps
from groupwise.training.signals import Requests
from groupwise.types import Watch, unwatched


class Keeper:
    """Keeps a run's checkpoints in its directory, written in the background.

    Args:
        log: the run directory.
        settings: when to write and what to keep.
        journal: forgets what no checkpoint needs any more.
        watch: watches the waits for the disk.
    """

    def __init__(
        self,
        log: RunLog,
        *,
        settings: CheckpointSettings,
        journal: RewardCache | None = None,
        watch: Watch = unwatched,
    ) -> None:
        self.log, self.settings, self.journal, self.watch = log, settings, journal, watch
        self.folder: Path = log.folder / "checkpoints"
        self.writer = Writer(self.folder)
        self.saved = 0
        self._last = time.monotonic()

    def due(self, done: int, asked: Requests) -> bool:
        """Whether it is time for one: a signal asked, or so many steps or minutes have passed."""
        if asked.save:
            asked.save = False
            return True
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        by_steps = bool(every) and done - self.saved >= every
        by_time = minutes is not None and time.monotonic() - self._last >= 60 * minutes
        return by_steps or by_time

    def write(self, checkpoint: Checkpoint, *, best: int | None) -> None:
        """Start to write a checkpoint.

        Args:
            best: step of the best evaluation; its checkpoint stays.

        Raises:
            RunError: the one before could not be written.
        """
        self.wait()
        self.writer.write(checkpoint, keep=self._keep(best), logs=self.log.files())
        self.saved, self._last = checkpoint.step, time.monotonic()

    def resume(self, step: int, *, best: int | None) -> None:
        """Go on after a checkpoint; what a kill kept from being deleted goes now."""
        self.saved = step
        prune(self.folder, keep=self._keep(best), step=step)

    def _keep(self, best: int | None) -> Keep:
        return Keep(last=self.settings.keep_last, every=self.settings.keep_every, best=best)

    def wait(self) -> None:
        """Until the checkpoint in hand is on disk.

        Raises:
            RunError: it could not be written.
        """
        with self.watch("the disk to take a checkpoint"):
            self.writer.wait()
        if self.journal is not None:
            kept = [step for step in steps(self.folder) if step <= self.saved]
            if kept:
                self.journal.forget(kept[-self.settings.keep_last :][0])

    def newest(self) -> Checkpoint:
        """The last checkpoint.

        Raises:
            RunError: there is none that is whole.
        """
        self.wait()
        found, skipped = newest(self.folder)
        if found is None:
            reason = "; ".join(skipped) or "none was written yet"
            raise RunError(f"{self.folder}: holds no checkpoint to go back to ({reason}).")
        return found
