"""What environments replied, kept until the step is in a checkpoint, so that a resumed run asks the
world nothing again and continues with the same tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.environments import Reply
from groupwise.errors import RunError
from groupwise.types import Request, Status


class Asked(NamedTuple):
    """Names one call of one completion: its request, sample, number, and the text of the policy
    since the last reply."""

    request: Request
    sample: int
    number: int
    text: str

    @property
    def name(self) -> str:
        parts = (tuple(self.request.stream), self.request.prompt.id, *self[1:])
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class ReplyJournal:
    """One file of replies per step. Evaluations, whose steps are negative, are not kept.

    Args:
        folder: made when the first reply is written.
        environment: who replies, as text; replies of others are not recalled.
    """

    def __init__(self, folder: Path, *, environment: str = "") -> None:
        self.folder, self.environment = folder, environment
        self._step = -1
        self._found: dict[str, tuple[Reply, float]] = {}

    def recall(self, asked: Asked) -> tuple[Reply, float] | None:
        """The reply of an earlier attempt, and the seconds that it took."""
        step = asked.request.stream.step
        if step < 0:
            return None
        if step != self._step:
            self._step, self._found = step, self._read(step)
        return self._found.get(asked.name)

    def keep(self, asked: Asked, reply: Reply, seconds: float) -> None:
        """Write down a reply.

        Raises:
            RunError: the disk is full.
        """
        step = asked.request.stream.step
        if step < 0:
            return
        entry = {
            "call": asked.name,
            "environment": self.environment,
            "text": reply.text,
            "done": reply.done,
            "status": reply.status.value,
            "values": dict(reply.values),
            "frame": list(reply.frame),
            "seconds": seconds,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self._path(step), "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror}).") from None

    def forget(self, before: int) -> None:
        """Delete the replies of steps that no checkpoint needs any more."""
        for path in self.folder.glob("replies-*.jsonl"):
            if path.stem[8:].isdecimal() and int(path.stem[8:]) < before:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _path(self, step: int) -> Path:
        return self.folder / f"replies-{step:06d}.jsonl"

    def _read(self, step: int) -> dict[str, tuple[Reply, float]]:
        """The replies of a step; one that was cut off by a kill was not used either."""
        found = {}
        try:
            lines = self._path(step).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            return {}
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["environment"] == self.environment:
                    found[entry["call"]] = _reply(entry), float(entry["seconds"])
        return found


def _reply(entry: Mapping[str, Any]) -> Reply:
    frame: Sequence[int] = entry["frame"]
    return Reply(
        text=entry["text"],
        done=entry["done"],
        status=Status(entry["status"]),
        values=entry["values"],
        frame=(frame[0], frame[1]),
    )
