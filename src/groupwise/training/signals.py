"""Signals, handled as requests between steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM)
SAVE = (signal.SIGUSR1, signal.SIGHUP)


class Requests:
    """What signals have asked for so far.

    Plain flags instead of `threading.Event`: a handler interrupts the thread that reads them, and
    would deadlock on the lock of an event.

    Attributes:
        stop: SIGINT (Ctrl-C) or SIGTERM: finish the step, write a checkpoint, end.
        save: SIGUSR1, or SIGHUP when the terminal is gone: write a checkpoint and continue.
    """

    def __init__(self) -> None:
        self.stop = False
        self.save = False


@contextmanager
def requests() -> Iterator[Requests]:
    """Turn signals into requests inside the block; a second request to stop raises at once.

    Only the main thread receives signals; in other threads the flags stay False.
    """
    asked = Requests()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def note_stop(number: int, frame: FrameType | None) -> None:
        if asked.stop:
            raise KeyboardInterrupt
        asked.stop = True

    def note_save(number: int, frame: FrameType | None) -> None:
        asked.save = True
        for descriptor in terminals:
            if not os.isatty(descriptor):  # The terminal is gone; printing would fail from here on.
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, note_stop) for number in STOP}
    before |= {number: signal.signal(number, note_save) for number in SAVE}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
