"""The batches of the steps since the last checkpoint, for a run whose sampling cannot be repeated.

What is sampled while weights change depends on timing. A killed run that is resumed learns again
from the journalled batches, so it reaches the same weights as before.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from groupwise.errors import RunError

PREFIX = "batch-"


class BatchJournal:
    """One file per batch, kept until no checkpoint needs it.

    Args:
        folder: made when the first batch is written.
        settings: of the run, as text; batches of other settings are not read.
    """

    def __init__(self, folder: Path, *, settings: str = "") -> None:
        self.folder, self.settings = folder, settings

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        """Write a batch before the learner uses it.

        Raises:
            RunError: the disk is full.
        """
        path = self._path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".tmp").unlink(missing_ok=True)  # perhaps a link
            torch.save({"settings": self.settings, **content}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
            raise RunError(f"{path}: cannot be written ({error}).") from None

    def read(self, step: int) -> dict[str, Any] | None:
        """The batch of a step; None where it is not there, or was cut off."""
        try:
            content = torch.load(self._path(step), weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
            return None
        return content if content.pop("settings", None) == self.settings else None

    def forget(self, before: int) -> None:
        """Delete the batches of earlier steps."""
        self._delete(lambda step: step < before)

    def drop(self, since: int) -> None:
        """Delete the batches from a step on."""
        self._delete(lambda step: step >= since)

    def _delete(self, which: Any) -> None:
        for path in self.folder.glob(f"{PREFIX}*"):
            number = path.stem.removeprefix(PREFIX)
            if number.isdecimal() and which(int(number)):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # where nothing is left in it

    def _path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:06d}.pt"
