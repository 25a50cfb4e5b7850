"""A second process that ends the trainer where no thread of it can.

A call that never returns and never releases the interpreter's lock, such as a match of a regular
expression with exponential time, stops every thread, the watchdog's and signal handlers included.
This file is also the program of the second process, so it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

SAID = (
    "no thread has run for {limit:.0f} s (watchdog.limit_minutes): a call does not return and "
    "blocks the interpreter, such as a regular expression in a reward. Ending the process; its "
    "stack follows. With reward_pool.workers = 1, such a reward is interrupted instead."
)


class Backstop:
    """Ends this process with SIGABRT, which prints its stacks, if `beat` is not called in time.

    Time in which this process is stopped, as by Ctrl-Z, does not count.

    Args:
        limit_s: seconds between two beats.
    """

    def __init__(self, limit_s: float) -> None:
        if not faulthandler.is_enabled():
            with contextlib.suppress(ValueError, OSError, AttributeError):  # no standard error
                faulthandler.enable()
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_s)]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def beat(self) -> None:
        """Say that threads run."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), b".")

    def close(self) -> None:
        """End the second process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def watch(process: int, limit_s: float) -> None:
    """Read beats from the standard input; end the process that does not send them."""
    quiet, step = 0.0, min(1.0, limit_s / 10)
    while os.getppid() == process:
        before = time.monotonic()
        if select.select([0], [], [], step)[0]:
            if not os.read(0, 65536):
                return
            quiet = 0.0
        elif not _stopped(process):
            quiet += min(time.monotonic() - before, 2 * step)
        if quiet > limit_s:
            print(SAID.format(limit=limit_s), file=sys.stderr, flush=True)
            os.kill(process, signal.SIGABRT)
            return


def _stopped(process: int) -> bool:
    """Whether a process is stopped by a signal or a debugger, where the system says so."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
