"""Calls of tools that run beside the rollout and are given up when they take too long."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

from groupwise.environments import Reply
from groupwise.types import Status

LONGEST_MESSAGE = 500
"""Characters of what is said of a failed call."""
IDLE_S = 1.0
"""Seconds that a thread waits for another call before it ends."""


class Answered(NamedTuple):
    """A call that has ended: whose it was, its reply, the seconds that it ran, and those that it
    waited for a free worker."""

    key: Any
    reply: Reply
    seconds: float
    queued: float = 0.0


@dataclass(kw_only=True)
class _Running:
    """A call in its thread."""

    key: Any
    started: float
    queued: float

    def answered(self, reply: Reply, now: float) -> Answered:
        """The call, which has ended."""
        return Answered(self.key, reply, now - self.started, self.queued)


@runtime_checkable
class Calls(Protocol):
    """Runs calls of tools."""

    def submit(self, key: Any, call: Callable[[], Reply]) -> None: ...

    def collect(self) -> list[Answered]: ...

    def forget(self) -> None: ...


class InlineCalls:
    """Runs each call when it is submitted, in the same thread, without a time limit; what it raises
    ends the rollout.

    For functions that must run in the main thread, such as those that set signals.
    """

    def __init__(self) -> None:
        self._ended: list[Answered] = []

    def submit(self, key: Any, call: Callable[[], Reply]) -> None:
        """Run a call; `collect` gives its reply with the key."""
        start = time.monotonic()
        self._ended.append(Answered(key, call(), time.monotonic() - start))

    def collect(self) -> list[Answered]:
        """The calls that have ended since."""
        found, self._ended = self._ended, []
        return found

    def forget(self) -> None:
        """Give up every reply."""
        self._ended.clear()


class ToolCalls:
    """Runs calls in threads, some at a time, each with a time limit.

    A thread that is done takes the next call, and ends when there has been none for a while. It
    cannot be killed: one that is given up goes on as a daemon and its reply is thrown away, and
    another takes its place. Calls that may hang for good belong into a process of their
    own, as those of the environment `python` are.

    Args:
        workers: calls that run at the same time.
        timeout_s: seconds from the start of a call until it is given up.
    """

    def __init__(self, *, workers: int, timeout_s: float) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self._waiting: deque[tuple[Any, Callable[[], Reply], float]] = deque()
        self._running: dict[int, _Running] = {}
        self._begun: queue.SimpleQueue[tuple[int, Callable[[], Reply]]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, Reply]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._tickets = 0

    def submit(self, key: Any, call: Callable[[], Reply]) -> None:
        """Run a call as soon as there is room; `collect` gives its reply with the key."""
        self._waiting.append((key, call, time.monotonic()))
        self._start()

    def collect(self) -> list[Answered]:
        """The calls that have ended since, those that ran into the time limit among them."""
        found, now = [], time.monotonic()
        while not self._ended.empty():
            ticket, reply = self._ended.get()
            running = self._running.pop(ticket, None)
            if running is not None:
                found.append(running.answered(reply, now))
        for ticket, running in list(self._running.items()):
            if now - running.started > self.timeout_s:
                del self._running[ticket]
                said = f"environment: no reply within {self.timeout_s:g} s"
                reply = Reply(text=said, status=Status.TIMEOUT)
                found.append(running.answered(reply, now))
        self._start()
        return found

    def forget(self) -> None:
        """Give up every call."""
        self._waiting.clear()
        self._running.clear()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.workers:
            key, call, submitted = self._waiting.popleft()
            self._tickets += 1
            now = time.monotonic()
            running = _Running(key=key, started=now, queued=now - submitted)
            self._running[self._tickets] = running
            if not self._idle.acquire(blocking=False):
                threading.Thread(target=self._work, name="tool call", daemon=True).start()
            self._begun.put((self._tickets, call))

    def _work(self) -> None:
        """Run calls until there has been none for `IDLE_S`."""
        ticket, call = self._begun.get()
        while True:
            reply = _reply(call)
            self._idle.release()  # before the reply is seen, so that the next call comes here
            self._ended.put((ticket, reply))
            try:
                ticket, call = self._begun.get(timeout=IDLE_S)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                ticket, call = self._begun.get()  # a call counts on this thread


def _reply(call: Callable[[], Reply]) -> Reply:
    """What a call replies; one that raises has failed."""
    try:
        reply: Any = call()
        if wrong := problem(reply):
            reply = Reply(text=f"environment: {wrong}", status=Status.ERROR)
        else:
            values = {name: float(value) for name, value in reply.values.items()}
            reply = replace(reply, values=values)
    except BaseException as error:  # also what ends a thread: the completion must not wait
        status = Status.TIMEOUT if isinstance(error, TimeoutError) else Status.ERROR
        reply = Reply(text=f"{type(error).__name__}: {error}", status=status)
    if reply.status is not Status.OK:
        reply = replace(reply, text=reply.text[:LONGEST_MESSAGE])
    return reply


def problem(reply: Any) -> str | None:
    """What is wrong with the reply of an environment, if anything is."""
    if not isinstance(reply, Reply):
        return f"must reply with a Reply, got {type(reply).__name__}"
    for name, kind in (("text", str), ("done", bool), ("status", Status), ("values", Mapping)):
        value = getattr(reply, name)
        if not isinstance(value, kind):
            return f"Reply.{name} must be a {kind.__name__}, got {value!r}"[:LONGEST_MESSAGE]
    for name, value in reply.values.items():
        if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
            return f"Reply.values must map names to finite numbers, got {name!r}: {value!r}"
    match reply.frame:
        case (int(first), int(last)) if min(first, last) >= 0 and first + last <= len(reply.text):
            return None
    size = len(reply.text)
    return f"Reply.frame must be two counts of characters of a text of {size}, got {reply.frame!r}"
