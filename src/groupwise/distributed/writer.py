"""An engine that serves several callers at a time and loads new weights meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from groupwise.types import Engine, Group, Limits, Request, Sampling, Stream

Result = TypeVar("Result")


class ContinuousWriter:
    """Runs an engine in a thread for several callers.

    Args:
        engine: calls its `errands` between two decoding steps; one without them is interrupted
            when it has finished a group.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._errands: deque[Callable[[], None]] = getattr(engine, "errands", deque())
        self._queue: deque[Request] = deque()
        self._running: dict[Stream, Future[Group]] = {}
        self._changed = threading.Condition()
        self._given: tuple[Sampling, Limits] | None = None
        self._thread: threading.Thread | None = None

    def write(self, request: Request, sampling: Sampling, limits: Limits) -> Group:
        """The group of a request; `sampling` and `limits` are those of all requests."""
        done: Future[Group] = Future()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="writing", daemon=True)
                self._thread.start()
            self._given = sampling, limits
            self._running[request.stream] = done
            self._queue.append(request)
            self._changed.notify_all()
        return done.result()

    def between_steps(self, call: Callable[[], Result]) -> Result:
        """The result of a call that runs between decoding steps, or before they begin."""
        with self._changed:
            if self._thread is None:
                return call()
            done: Future[Result] = Future()
            self._errands.append(lambda: _settle(done, call))
            self._changed.notify_all()
        return done.result()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._errands)
            self._run_errands()
            if not self._queue or self._given is None:
                continue
            sampling, limits = self._given
            try:
                for group in self.engine.generate(self._requests(), sampling, limits):
                    self._running.pop(group.stream).set_result(group)
                    self._run_errands()
            except BaseException as error:
                with self._changed:  # A request that comes now is written, or fails with these.
                    self._queue.clear()
                    for stream in list(self._running):
                        self._running.pop(stream).set_exception(error)

    def _run_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _requests(self) -> Iterator[Request | None]:
        """What is queued, until nothing is queued or being written."""
        while self._running:
            yield self._queue.popleft() if self._queue else None


def _settle(done: Future[Result], call: Callable[[], Result]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
