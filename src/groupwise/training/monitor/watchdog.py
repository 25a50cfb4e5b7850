"""Names and limits every wait; a wait that takes too long is reported and ended."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from groupwise.config import Config
from groupwise.errors import RunError
from groupwise.rundir.files import RunLog, no_link
from groupwise.training.monitor.backstop import Backstop
from groupwise.training.monitor.progress import Progress
from groupwise.types import Heartbeat

SLOWER = 10
"""A wait may take this many times the longest successful one of its name."""

LOOKS = 10
"""Number of checks within the limit."""


@dataclass(kw_only=True)
class _Wait:
    name: str
    thread: int
    start: float
    deadline: float
    reported: bool = False
    over: bool = False


class _Interrupted(BaseException):
    """Ends a wait. Not an Exception, so that handlers of errors on the way, such as those around
    rewards, do not catch it."""


class Watchdog:
    """Watches the waits of a run.

    Past the limit of a wait the stacks of all threads and the state of all worker processes are
    appended to `stacks.txt`, the name of the wait is logged, and, if `stop` is set, the wait is
    ended by a RunError. A wait that cannot be interrupted (stuck in native code) ends the process,
    from outside where it blocks the interpreter.

    Args:
        folder: where `stacks.txt` goes.
        limit_s: seconds without progress; more for waits that have taken long before.
        stop: end a wait that is past its limit; False only reports it.
        log: called with messages.
        grace_s: seconds that an interrupted wait has to end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_s: float,
        stop: bool,
        log: Callable[[str], None],
        grace_s: float = 60.0,
    ) -> None:
        self.folder, self.limit_s, self.stop, self.log = folder, limit_s, stop, log
        self.grace_s = grace_s
        self._waits: list[_Wait] = []
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._message = ""
        self._late: _Wait | None = None
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGUSR2, self._raise)
        self._backstop = Backstop(limit_s + grace_s) if stop and not _interactive() else None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, name: str) -> Iterator[Heartbeat]:
        """Watch the block.

        Args:
            name: of what is waited for, in messages.

        Raises:
            RunError: it took too long, and `stop` is set.
        """
        wait = _Wait(name=name, thread=threading.get_ident(), start=time.monotonic(), deadline=0.0)

        def heartbeat() -> None:
            wait.deadline = time.monotonic() + self._limit(name)

        heartbeat()
        with self._lock:
            self._waits.append(wait)
        try:
            yield heartbeat
            spent = time.monotonic() - wait.start
            self._longest[name] = max(self._longest.get(name, 0.0), spent)
        except _Interrupted as interruption:
            raise RunError(self._message) from interruption
        finally:
            wait.over = True  # A signal that is still pending is ignored.
            with self._lock:
                self._waits.remove(wait)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join(timeout=5)
        if self._backstop is not None:
            self._backstop.close()
        if self._before is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGUSR2) == self._raise:
                signal.signal(signal.SIGUSR2, self._before)

    def _limit(self, name: str) -> float:
        return max(self.limit_s, SLOWER * self._longest.get(name, 0.0))

    def _watch(self) -> None:
        every, looked = self.limit_s / LOOKS, time.monotonic()
        while not self._closed.wait(every):
            if self._backstop is not None:
                self._backstop.beat()
            now = time.monotonic()
            stood_still = now - looked - every
            looked = now
            with self._lock:
                for wait in list(self._waits):
                    if stood_still > every:  # The process was suspended and resumed.
                        wait.deadline += stood_still
                    if wait.deadline <= now:
                        self._past_limit(wait)

    def _past_limit(self, wait: _Wait) -> None:
        """Called with the lock held; the wait cannot end before this returns."""
        waited = time.monotonic() - wait.start
        if wait.reported and self.stop:
            self.log(f"{wait.name}: could not be interrupted; ending the process.")
            if not _interactive():
                os._exit(1)
        self._message = (
            f"waited {waited:.0f} s for {wait.name}, and nothing came for "
            f"{self._limit(wait.name):g} s (watchdog.limit_minutes); {self._stacks(wait.name)}"
        )
        wait.deadline = time.monotonic() + (self.grace_s if self.stop else self._limit(wait.name))
        wait.reported = True
        if self.stop:
            self._late = wait
            self._interrupt(wait.thread)
        else:
            self.log(self._message)

    def _stacks(self, name: str) -> str:
        """Write all stacks to the file; returns a sentence about it."""
        path = self.folder / "stacks.txt"
        try:
            with open(path, "a", encoding="utf-8", opener=no_link) as file:
                print(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} waiting for {name}", file=file)
                print("\n".join(_workers()), file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f"the stacks could not be written ({error.strerror})."
        return f"the stacks of all threads and the workers' states are in {path}."

    def _interrupt(self, thread: int) -> None:
        if self._before is not None and thread == threading.main_thread().ident:
            signal.pthread_kill(thread, signal.SIGUSR2)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(_Interrupted)
            )

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._late is not None and not self._late.over:
            raise _Interrupted
        if callable(self._before):  # The watchdog of another run in this process.
            self._before(number, frame)


def _workers() -> Iterator[str]:
    """A line per child process; those that catch SIGUSR2 are asked to print their own stacks."""
    for child in psutil.Process().children(recursive=True):
        try:
            with child.oneshot():
                spent = child.cpu_times()
                name = " ".join(child.cmdline()[:4]) or child.name()
                yield (
                    f"worker {child.pid} ({name}): {child.status()}, "
                    f"{spent.user + spent.system:.1f} s of CPU, {child.num_threads()} threads"
                )
            if _catches(child.pid, signal.SIGUSR2):
                child.send_signal(signal.SIGUSR2)
        except psutil.Error:
            continue


def _catches(process: int, number: int) -> bool:
    """Whether a process handles a signal, which would kill it otherwise."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _interactive() -> bool:
    """Whether ending the process would take a user's notebook with it."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(sys, "ps1") or shell is not None


def make_watchdog(config: Config, run_log: RunLog, *, progress: Progress) -> Watchdog:
    """The watchdog of a run's waits."""
    return Watchdog(
        run_log.folder,
        limit_s=60 * config.watchdog.limit_minutes,
        stop=config.watchdog.stop,
        log=progress.log,
    )
