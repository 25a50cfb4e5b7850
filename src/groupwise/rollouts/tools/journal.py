"""What environments replied, kept until the step is in a checkpoint, so that a resumed run asks the
world nothing again and continues with the same tokens."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.environments import Reply
from groupwise.rewards.journal import StepFiles
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
    """One file of replies per step, that of the call. Replies in evaluations, whose streams have
    negative steps, are not kept.

    Args:
        folder: of the journal.
        environment: who replies, as text; replies of others are not recalled.
    """

    def __init__(self, folder: Path, *, environment: str = "") -> None:
        self.files, self.environment = StepFiles(folder, prefix="replies"), environment
        self._step = 0
        self._found: dict[str, tuple[Reply, float]] = {}

    def begin(self, step: int) -> None:
        """Recall and keep the replies of this step from now on."""
        self._step, self._found = step, self._read(step)

    def recall(self, asked: Asked) -> tuple[Reply, float] | None:
        """The reply of an earlier attempt, and the seconds that it took."""
        return None if asked.request.stream.step < 0 else self._found.get(asked.name)

    def keep(self, asked: Asked, reply: Reply, seconds: float) -> None:
        """Write down a reply.

        Raises:
            RunError: the disk is full.
        """
        if asked.request.stream.step < 0:
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
        self.files.append(self._step, [entry])

    def _read(self, step: int) -> dict[str, tuple[Reply, float]]:
        found = {}
        for entry in self.files.read(step):
            with contextlib.suppress(ValueError, KeyError, TypeError):
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
