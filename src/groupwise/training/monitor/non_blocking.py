"""Output that a run does not depend on: a reader who is slow, or gone, costs lines and nothing
else."""

from __future__ import annotations

import os
import queue
import select
import threading
from typing import TextIO

WAITING = 1000
"""Pieces of text that may wait for a slow reader before more of them are dropped."""


class Steadfast:
    """A stream like the one given, whose writes neither block nor fail.

    A thread of its own writes to the descriptor; a pipe that is full holds up that thread alone,
    and a terminal that is gone ends it.

    Args:
        stream: one with a file descriptor, such as standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.encoding = stream, "utf-8"
        self._descriptor = stream.fileno()
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Have text written, as soon as the reader takes it."""
        try:
            self._waiting.put_nowait(text.encode("utf-8", "backslashreplace"))
        except queue.Full:
            pass
        return len(text)

    def flush(self) -> None:
        """Nothing is held back here."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._descriptor

    def close(self, *, seconds: float = 2.0) -> None:
        """Let the reader take what waits, for so long at most."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout=seconds)

    def _work(self) -> None:
        while (piece := self._waiting.get()) is not None:
            while piece:
                try:
                    piece = piece[os.write(self._descriptor, piece) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])
                except OSError:  # nobody reads any more
                    return


def steadfast(stream: TextIO) -> TextIO | Steadfast:
    """The stream so that writing to it cannot hold up a run; itself where it has no descriptor."""
    try:
        stream.fileno()
    except (OSError, AttributeError, ValueError):
        return stream
    stream.flush()
    return Steadfast(stream)
