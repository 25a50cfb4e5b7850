"""Calls of functions in processes that can be killed: none of them can end or hang the run."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from groupwise.errors import RewardError
from groupwise.rewards.scoring.fork_server import ForkServer
from groupwise.rewards.scoring.worker import receive, send
from groupwise.types import Status

Functions = Mapping[str, Callable[..., Any]]


class Called(NamedTuple):
    """What came of a call: what the function returned, as text, or the mistake that it found in the
    arguments."""

    text: str
    mistaken: bool = False


class CallFailed(Exception):
    """The function raised, took too long, or its process died."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.status = Status.TIMEOUT if late else Status.ERROR


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Called:
    """Call a function. What it raises for arguments that do not fit is for the model to read."""
    try:
        returned = function(**arguments)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        return Called(str(error), mistaken=True)
    return Called(returned if isinstance(returned, str) else _written(returned))


def _written(value: Any) -> str:
    """A value as JSON where it has that form, else as text."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def sendable(function: Callable[..., Any]) -> bool:
    """Whether another process can import a function. A method of an object is not sent: workers
    would change copies of the object.

    Example:
        >>> sendable(json.dumps), sendable(lambda: 1), sendable([].append)
        (True, False, False)
    """
    owner = getattr(function, "__self__", None)
    if not inspect.isroutine(function) or not isinstance(owner, ModuleType | type | None):
        return False
    try:
        pickle.dumps(function)
    except Exception:
        return False
    return getattr(function, "__module__", None) != "__main__"


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """What a worker does: it calls functions."""

    functions: Functions

    def begin(self) -> None:
        """Nothing is said before the first call."""

    def answer(self, message: bytes) -> bytes:
        """["called", text, mistaken], or ["failed", message, whether it is a time-out]."""
        name, arguments = json.loads(message)
        try:
            said = ["called", *call(self.functions[name], arguments)]
        except BaseException as error:  # also what ends a process: the trainer waits for an answer
            late = isinstance(error, TimeoutError)
            said = ["failed", f"{type(error).__name__}: {error}", late]
        return json.dumps(said).encode()


class FunctionProcesses:
    """Calls functions in workers, as many as there are calls at the same time. A worker that does
    not answer in time is killed. Nothing is called twice, because a call may have had an effect.

    Args:
        functions: by name; `sendable`.
        seconds: limit for each call.
    """

    def __init__(self, functions: Functions, *, seconds: float) -> None:
        self.functions, self.seconds = functions, seconds
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._idle: list[tuple[int, socket.socket]] = []

    def call(self, name: str, arguments: Mapping[str, Any]) -> Called:
        """Call a function.

        Raises:
            CallFailed: it raised, took too long, or its process died.
        """
        worker, connection = self._worker()
        try:
            connection.settimeout(self.seconds)
            send(connection, json.dumps([name, arguments]).encode())
            answer = receive(connection)
        except TimeoutError:
            self._end(worker, connection)
            said = f"{name}: no result within {self.seconds:g} s"
            raise CallFailed(said, late=True) from None
        except OSError:
            answer = None
        if answer is None:
            how = self._end(worker, connection)
            raise CallFailed(f"{name}: its process died ({how})")
        with self._lock:
            self._idle.append((worker, connection))
        kind, text, flag = json.loads(answer)
        if kind == "failed":
            raise CallFailed(text, late=flag)
        return Called(text, mistaken=flag)

    def _worker(self) -> tuple[int, socket.socket]:
        """A free worker and the connection to it."""
        with self._lock:
            while self._idle:
                worker, connection = self._idle.pop()
                if _silent(connection):
                    return worker, connection
                connection.close()
                assert self._server is not None, "it forked the worker"
                self._server.end(worker)
            try:
                if self._server is None:
                    job = pickle.dumps(FunctionJob(functions=dict(self.functions)))
                    setup = {"job": job, "modules": (), "memory": None}
                    self._server = ForkServer(setup, runs="tool")
                    weakref.finalize(self, self._server.close)
                return self._server.fork()
            except RewardError as error:
                raise CallFailed(str(error)) from None

    def _end(self, worker: int, connection: socket.socket) -> str:
        """Kill a worker; how it died."""
        connection.close()
        with self._lock:
            assert self._server is not None, "it forked the worker"
            status = self._server.end(worker)
        if os.WIFSIGNALED(status):
            with contextlib.suppress(ValueError):
                return signal.Signals(os.WTERMSIG(status)).name
        return f"exit code {os.waitstatus_to_exitcode(status)}"


def _silent(connection: socket.socket) -> bool:
    """Whether a worker waits for a call: it has not died and sends nothing unasked."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
