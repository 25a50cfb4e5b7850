"""How long a program may take by the clock: more on a busy machine, where it has to wait."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

TEST = 3
"""Wall-clock time of one test, in terms of its processor time."""
PROGRAM = 5
"""Wall-clock time of all tests of a program, likewise."""
PATIENCE = 10
"""How many times these limits a program may take that still gets processor time."""
_SHARE, _IDLE = 0.02, 0.1
_WINDOW_SECONDS = 1.0


class Watched(Protocol):
    """A sandbox with a program in it."""

    def receive(self, deadline: float) -> bytes | None: ...

    def processor_time(self) -> float: ...


class Clock:
    """The wall clock for the tests of a program.

    Processor time decides whether a program is too slow, and the kernel enforces it; the clock
    stops what only waits. On a busy machine a program may be computing and still be late. So where
    the processors are idle for less than a tenth of the time, it goes on beyond the limits while it
    gets at least 2 % of one, `PATIENCE` times as long at most.

    Args:
        seconds: processor time for each test.
        counted: number of tests if a share of them counts. Each then has the same limit, whatever
            came before it: an equal part of the time for all, and at least one window.
    """

    def __init__(self, seconds: float, *, counted: int = 0) -> None:
        self.seconds, self.counted = seconds, counted
        self.begun = time.monotonic()
        self.granted = 0.0

    @property
    def longest(self) -> float:
        """Seconds after which the next test is stopped in any case."""
        if self.counted:
            return PATIENCE * TEST * self.seconds
        left = self.begun + PATIENCE * PROGRAM * self.seconds - time.monotonic()
        return max(min(PATIENCE * TEST * self.seconds, left), 0.0)

    def receive(self, job: Watched) -> bytes | None:
        """The next frame of a sandbox, or None when there will be none.

        Raises:
            TimeoutError: the program waits, or computes beyond all patience.
        """
        now = time.monotonic()
        last = now + self.longest
        window = max(self.seconds, _WINDOW_SECONDS)
        if self.counted:
            part = min(TEST, PROGRAM / self.counted) * self.seconds
            deadline = now + max(part, window)
        else:
            left = self.begun + PROGRAM * self.seconds + self.granted - now
            deadline = min(now + max(min(TEST * self.seconds, left), window), last)
        seen: tuple[float, float] | None = None
        while True:
            try:
                return job.receive(deadline if seen is not None else deadline - window)
            except TimeoutError:
                before, seen = seen, (job.processor_time(), idle_seconds())
                if before is None:
                    continue
                computing = seen[0] - before[0] >= _SHARE * window
                if deadline >= last or not computing or seen[1] - before[1] > _IDLE * window:
                    raise
            deadline = min(deadline + window, last)
            self.granted += window


def idle_seconds() -> float:
    """Seconds for which the processors of this process have been idle so far, on average; the time
    where the system does not tell."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        idle = [int(line[4]) for line in lines if line and line[0] in own]
        return sum(idle) / len(idle) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return time.monotonic()
