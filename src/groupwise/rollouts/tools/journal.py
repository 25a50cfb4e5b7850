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
from groupwise.rollouts.tools.calls import problem
from groupwise.types import Request, Status

MOST_STEPS = 8
"""Steps whose replies are held in memory."""


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
    """Files of replies per step: the step that `begin` names or, in a process that gets none, that
    of the request's stream. Replies in evaluations, whose streams have negative steps, are not
    kept.

    Args:
        folder: of the journal.
        environment: who replies, as text; replies of others are not recalled.
        writer: names this process where several sample. The folder must then be shared: nothing is
            kept where there is no run directory.
    """

    def __init__(self, folder: Path, *, environment: str = "", writer: str = "") -> None:
        self.files = StepFiles(folder, prefix="replies", writer=writer)
        self.environment = environment
        self._step: int | None = None
        self._found: dict[int, dict[str, tuple[Reply, float, float]]] = {}

    def begin(self, step: int) -> None:
        """Recall and keep the replies of this step from now on."""
        self._step, self._found = step, {}

    def recall(self, asked: Asked) -> tuple[Reply, float, float] | None:
        """The reply of an earlier attempt, the seconds that the call ran, and those before."""
        if asked.request.stream.step < 0:
            return None
        step = self._step_of(asked)
        if step not in self._found:
            while len(self._found) >= MOST_STEPS:
                del self._found[min(self._found)]
            self._found[step] = self._read(step)
        return self._found[step].get(asked.name)

    def keep(self, asked: Asked, reply: Reply, seconds: float, queued: float) -> None:
        """Write down a reply.

        Raises:
            RunError: the disk is full.
        """
        shared = not self.files.writer or self.files.folder.parent.is_dir()
        if asked.request.stream.step < 0 or not shared:
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
            "queued": queued,
        }
        self.files.append(self._step_of(asked), [entry])

    def _step_of(self, asked: Asked) -> int:
        return asked.request.stream.step if self._step is None else self._step

    def _read(self, step: int) -> dict[str, tuple[Reply, float, float]]:
        found = {}
        for entry in self.files.read(step):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                reply = _reply(entry)
                if entry["environment"] == self.environment and not problem(reply):
                    times = float(entry["seconds"]), float(entry.get("queued", 0.0))
                    found[entry["call"]] = reply, *times
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
