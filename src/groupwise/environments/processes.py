"""Calls of functions in processes that can be killed: none of them can end or hang the run."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from groupwise.environments.workers import WorkerDied, Workers
from groupwise.errors import RewardError
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
        self.workers = Workers(pickle.dumps(FunctionJob(functions=dict(functions))), runs="tool")

    def call(self, name: str, arguments: Mapping[str, Any]) -> Called:
        """Call a function.

        Raises:
            CallFailed: it raised, took too long, or its process died.
        """
        message = json.dumps([name, arguments]).encode()
        try:
            worker = self.workers.take()
            answer = self.workers.ask(worker, message, seconds=self.seconds)
        except RewardError as error:
            raise CallFailed(str(error)) from None
        except TimeoutError:
            said = f"{name}: no result within {self.seconds:g} s"
            raise CallFailed(said, late=True) from None
        except WorkerDied as died:
            raise CallFailed(f"{name}: its process died ({died})") from None
        self.workers.give_back(worker)
        kind, text, flag = json.loads(answer)
        if kind == "failed":
            raise CallFailed(text, late=flag)
        return Called(text, mistaken=flag)
