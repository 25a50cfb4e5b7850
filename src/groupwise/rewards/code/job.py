"""What became of a program, and the line to the judge in its sandbox."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil

from groupwise.errors import RewardError
from groupwise.rewards.code.cgroup import MemoryGroup
from groupwise.rewards.code.inside import codec


class SandboxError(RewardError):
    """The sandbox failed, not the program; nothing is known about the program."""


class Verdict(str, Enum):
    """What became of one test."""

    PASSED = "passed"
    FAILED = "failed"  # wrong output, or an assertion that does not hold
    ERROR = "error"  # the program raised, exited early or crashed
    TIMEOUT = "timeout"  # used up its processor time, or was still running long after it
    FLOODED = "flooded"  # wrote more than it may
    UNJUDGEABLE = "unjudgeable"  # the test is at fault: it does not compile, or cannot be put


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One test: its verdict, and a line on why."""

    verdict: Verdict
    detail: str = ""


NO_VERDICT = Outcome(verdict=Verdict.ERROR, detail="the judge's process ended")
KILLED = Outcome(verdict=Verdict.ERROR, detail="the program was killed by signal 9")
TOO_LARGE = Outcome(verdict=Verdict.ERROR, detail="the program took more memory than a sandbox has")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of a sandbox, and the line to the judge in it.

    Attributes:
        process: bubblewrap, or the judge itself where there is no sandbox.
        confined: whether there is one.
        kills: see `memory_kills`, before the start.
        group: that limits its memory as a whole, where one can be had.
    """

    process: subprocess.Popen[bytes]
    confined: bool
    kills: int
    group: MemoryGroup | None = None
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)

    def send(self, frame: bytes) -> None:
        self.unsent.extend(len(frame).to_bytes(8, "big") + frame)

    def receive(self, deadline: float) -> bytes | None:
        """The next frame, or None when there will be none. Raises TimeoutError at the deadline."""
        while (frame := self._complete()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not self._exchange(left):
                return None
        return frame

    def check(self, outcome: Outcome) -> Outcome:
        """The outcome, unless what ended the program came from outside of the sandbox. A program
        that has filled the sandbox's memory group has itself to blame.

        Raises:
            SandboxError: a SIGKILL, which programs cannot send and do not cause within their
                limits, or somebody killed bubblewrap, which they cannot reach.
        """
        status = 0
        if outcome is NO_VERDICT:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(timeout=1)
        killed = outcome is KILLED or status in (-9, 128 + 9)
        if killed and self.group is not None and self.group.overflowed:
            return TOO_LARGE
        if killed and memory_kills() > self.kills:
            raise SandboxError(
                "code sandbox: the machine ran out of memory while the program ran; lower "
                "memory_mb or the number of workers."
            )
        if self.confined and (killed or status < 0):
            raise SandboxError(
                "code sandbox: something outside killed the program or its judge; if a memory "
                "watcher runs here (earlyoom, systemd-oomd), lower memory_mb or the number of "
                "workers."
            )
        return outcome

    def processor_time(self) -> float:
        """Seconds of processor time that the processes in the sandbox have had so far."""
        total = 0.0
        for one in self._inside():
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
        return total

    def stop_program(self) -> None:
        """Kill the program, which is what the judge has started."""
        inside = self._inside()
        judge = inside[1 if self.confined else 0 : 2 if self.confined else 1]
        for one in judge:
            with contextlib.suppress(psutil.Error):
                for program in one.children():
                    program.kill()

    def _inside(self) -> list[psutil.Process]:
        """The processes from the first one inside on; parents come before their children."""
        try:
            outer = psutil.Process(self.process.pid)
            return outer.children(recursive=True) if self.confined else [outer, *outer.children()]
        except psutil.Error:
            return []

    def _complete(self) -> bytes | None:
        size = int.from_bytes(self.unread[:8], "big")
        if len(self.unread) < 8 + size or len(self.unread) < 8:
            return None
        frame = bytes(self.unread[8 : 8 + size])
        del self.unread[: 8 + size]
        return frame

    def _exchange(self, seconds: float) -> bool:
        """Wait for the judge and read or write once; False at the end of what it has to say."""
        assert self.process.stdin is not None and self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        if self.unsent:
            poll.register(self.process.stdin, select.POLLOUT)
        for fd, _ in poll.poll(max(seconds * 1000, 1)):
            if fd == self.process.stdout.fileno():
                part = os.read(fd, 1 << 20)
                self.unread.extend(part)
                return bool(part) and len(self.unread) <= codec.LONGEST
            try:
                del self.unsent[: os.write(fd, self.unsent)]
            except BrokenPipeError:
                self.unsent.clear()
        return True


def memory_kills() -> int:
    """How many processes the kernel has killed for want of memory, in any container."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
