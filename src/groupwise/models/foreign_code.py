"""Limits for code that comes with a model: chat templates, patterns of adapters."""

from __future__ import annotations

import ctypes
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPUTING = ("sampling", "reward")
"""How the names of threads begin that sample or judge, and need memory at any time."""


class _Late(BaseException):
    """Ends code that handles every `Exception`, too."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context that raises TimeoutError after a time limit. Compiled code is interrupted when it
    returns to Python; outside the main thread, a search with a regular expression is not.
    """
    if threading.current_thread() is not threading.main_thread():
        with _limit_of_thread(seconds):
            yield
        return

    def stop(*_: object) -> None:
        raise _Late

    handler, start = signal.signal(signal.SIGALRM, stop), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Late:
        raise TimeoutError(f"it runs for more than {seconds:g} s") from None
    finally:
        remaining = max(left - (time.monotonic() - start), 1e-3) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)


@contextmanager
def _limit_of_thread(seconds: float) -> Iterator[None]:
    """`time_limit` without signals, which only the main thread receives."""

    class TooLong(TimeoutError):
        """Raised by the interpreter, which passes no arguments."""

        def __str__(self) -> str:
            return f"it runs for more than {seconds:g} s"

    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    over, thrown = threading.Event(), threading.Event()
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def stop() -> None:
        with lock:
            if not over.is_set():
                thrown.set()
                throw(thread, ctypes.py_object(TooLong))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over.set()
            if thrown.is_set():
                throw(thread, None)  # It may not have arrived yet.
        timer.cancel()


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """A context in which the process can map at most `size` more bytes: Python raises MemoryError.
    The limit is one of the whole process, so it is without effect outside the main thread, while
    others sample or judge, and without Linux' /proc.
    """
    sizes, threads = Path("/proc/self/statm"), threading.enumerate()
    main = threading.current_thread() is threading.main_thread()
    if not main or not sizes.exists() or any(t.name.startswith(COMPUTING) for t in threads):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + size
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
