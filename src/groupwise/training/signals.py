"""Signals as requests that are answered between steps."""

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

    Plain flags, because a handler interrupts the very thread that reads them: were they a
    `threading.Event`, one that came while its lock was held would wait for that lock for ever.

    Attributes:
        stop: SIGINT (Ctrl-C) or SIGTERM: finish the step, write a checkpoint, end.
        save: SIGUSR1, or SIGHUP when the terminal is gone: write a checkpoint and go on.
    """

    def __init__(self) -> None:
        self.stop = False
        self.save = False


@contextmanager
def requests() -> Iterator[Requests]:
    """Turn signals into requests while this is open; a second one to stop raises at once.

    Only the main thread can receive signals; elsewhere nothing is ever asked for.
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
            if not os.isatty(descriptor):  # it is gone; a reward that prints would fail from now on
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
