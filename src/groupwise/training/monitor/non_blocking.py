"""Output that cannot hold up a run: a slow or closed reader costs lines and nothing else."""

from __future__ import annotations

import os
import queue
import select
import threading
from typing import TextIO

WAITING = 1000
"""Writes that may wait for a slow reader before further ones are dropped."""


class NonBlockingStream:
    """A stream whose writes neither block nor fail.

    A background thread writes to the file descriptor; a full pipe blocks that thread alone, and a
    closed terminal ends it.

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
        """Queue text for writing."""
        try:
            self._waiting.put_nowait(text.encode("utf-8", "backslashreplace"))
        except queue.Full:
            pass
        return len(text)

    def flush(self) -> None:
        """Do nothing: there is no buffer here."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._descriptor

    def close(self, *, seconds: float = 2.0) -> None:
        """Wait until the queue is written, for at most `seconds`."""
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
                except OSError:  # The reader is gone.
                    return


def non_blocking(stream: TextIO) -> TextIO | NonBlockingStream:
    """A non-blocking stream to the same descriptor; the stream itself where it has none."""
    try:
        stream.fileno()
    except (OSError, AttributeError, ValueError):
        return stream
    stream.flush()
    return NonBlockingStream(stream)
