"""Verdicts of rewards, kept until the step is in a checkpoint, so that a resumed run need not judge
again.

A verdict can depend on the clock (a time-out) or on another model (a judge). A killed run that is
resumed repeats the steps after its last checkpoint; with the stored verdicts it repeats them
exactly.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from groupwise.errors import RunError
from groupwise.types import Group, Scores, Status


class StepFiles:
    """A journal with one file of entries per step, kept until no checkpoint needs it.

    Several processes may write entries of a step, each to a file of its own; all files are read.

    Args:
        folder: made when the first entry is written.
        prefix: of the names of the files.
        writer: names this process among several.
    """

    def __init__(self, folder: Path, *, prefix: str, writer: str = "") -> None:
        self.folder, self.prefix, self.writer = folder, prefix, writer

    def append(self, step: int, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write entries down.

        Raises:
            RunError: the disk is full.
        """
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        try:
            try:
                place = self._opened(step)
            except FileNotFoundError:  # another process has just removed the empty folder
                place = self._opened(step)
            with os.fdopen(place, "a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror}).") from None

    def _opened(self, step: int) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not through a link: a run directory may come from somebody else.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return os.open(self._path(step), flags, 0o666)

    def read(self, step: int) -> Iterator[Any]:
        """The entries of a step; one that was cut off by a kill was not used either."""
        for path in sorted(self.folder.glob(f"{self.prefix}*-{step:06d}.jsonl")):
            try:
                lines = path.read_text(encoding="utf-8").split("\n")
            except (OSError, UnicodeDecodeError):
                continue
            for line in lines:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)

    def forget(self, before: int) -> None:
        """Delete the entries of earlier steps."""
        for path in self.folder.glob(f"{self.prefix}*-*.jsonl"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) < before:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # where nothing is left in it

    def _path(self, step: int) -> Path:
        name = f"{self.prefix}.{self.writer}" if self.writer else self.prefix
        return self.folder / f"{name}-{step:06d}.jsonl"


class RewardJournal:
    """The verdicts of each step. A group that was begun in an earlier step belongs to the step in
    which it is judged.

    Args:
        folder: of the journal.
        rewards: who judges, as text; verdicts of others are not recalled.
    """

    def __init__(self, folder: Path, *, rewards: str = "") -> None:
        self.files, self.rewards = StepFiles(folder, prefix="step"), rewards
        self._step = 0
        self._found: dict[str, Mapping[str, Any]] = {}

    def begin(self, step: int) -> None:
        """Recall and keep the verdicts of this step from now on."""
        self._step, self._found = step, self._read(step)

    def recall(self, group: Group) -> Scores | None:
        """The verdicts on exactly these completions, if there are any from an earlier attempt."""
        found = self._found.get(fingerprint(group, self.rewards))
        return None if found is None else _scores(found)

    def keep(self, groups: Sequence[Group], scores: Scores) -> None:
        """Write down the verdicts on some groups.

        Raises:
            RunError: the disk is full.
        """
        if groups:
            entries = (
                _plain(fingerprint(group, self.rewards), scores, row)
                for row, group in enumerate(groups)
            )
            self.files.append(self._step, entries)

    def _read(self, step: int) -> dict[str, Mapping[str, Any]]:
        found = {}
        for entry in self.files.read(step):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                _scores(entry)
                found[entry["group"]] = entry
        return found


def fingerprint(group: Group, rewards: str) -> str:
    """A hash of the rewards, the prompt, the position in the run, and every token of the
    completions.
    """
    tokens = [list(completion.tokens) for completion in group.completions]
    text = repr((rewards, group.prompt.id, tuple(group.stream), tokens))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(name: str, scores: Scores, row: int) -> dict[str, Any]:
    def numbers(values: Any) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values[row].tolist()]

    return {
        "group": name,
        "total": numbers(scores.total),
        "correct": numbers(scores.correct),
        "parts": {label: numbers(part) for label, part in scores.parts.items()},
        "status": [status.value for status in scores.status[row]],
        "errors": list(scores.errors) if row == 0 else [],
        "reasons": list(scores.reasons[row]) if scores.reasons else [],
    }


def _scores(entry: Mapping[str, Any]) -> Scores:
    def table(values: Sequence[float | None]) -> torch.Tensor:
        return torch.tensor([[math.nan if v is None else float(v) for v in values]])

    status = tuple(Status(value) for value in entry["status"])
    return Scores(
        total=table(entry["total"]),
        correct=table(entry["correct"]),
        parts={label: table(values) for label, values in entry["parts"].items()},
        status=(status,),
        valid=torch.tensor([[s is Status.OK for s in status]]),
        errors=tuple(entry["errors"]),
        reasons=(tuple(entry["reasons"]),) if entry.get("reasons") else (),
    )
