"""Environments of users run in processes that can be killed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from groupwise.environments.base import ENVIRONMENTS, Environment, Reply, Showing, resume
from groupwise.environments.processes import sendable
from groupwise.environments.workers import Worker, WorkerDied, Workers
from groupwise.errors import RewardError, UsageError
from groupwise.registry import BoundFunction, FunctionSpec
from groupwise.types import Prompt, Status, Stream

F = TypeVar("F", bound=Callable[..., Any])

MOST_BYTES = 64 << 20
"""Size of a reply that a worker may send."""
START_SECONDS = 3600.0
"""Time in which an environment must be made."""


def in_process(function: F) -> F:
    """Decorator of a registered function: its environment runs in the trainer's process, in
    threads.

    For environments that cannot hang and that share objects with the trainer, or that load a model
    onto its GPU. Those of this package do not need it.
    """
    function.in_process = True  # type: ignore[attr-defined]
    return function


def build_environment(chosen: FunctionSpec, *, where: str) -> Environment:
    """A registered environment with its settings.

    Environments from outside this package run in worker processes (`IsolatedEnvironment`), unless
    they are marked `in_process`, run their calls in processes of their own, or no other process can
    import the registered function.

    Raises:
        UsageError: no such environment, an invalid setting, or it cannot be made.
    """
    bound = ENVIRONMENTS.bind(chosen, where=where)
    function = bound.function
    own = (function.__module__ or "").startswith("groupwise.")
    if own or getattr(function, "in_process", False) or not sendable(function):
        return bound({})
    isolated = IsolatedEnvironment(bound, where=where)
    return bound({}) if isolated.has_processes else isolated


@runtime_checkable
class Ending(Protocol):
    """An environment that holds something outside this process for each state."""

    def end(self, state: Any) -> None:
        """Free it, once the completion has ended. A call that was given up may still be running."""
        ...


class State:
    """What is known here of a state that a worker holds.

    Attributes:
        texts: earlier calls that the worker has not received.
        worker: where the state is; None before the first call.
        asked: whether the worker has a call to answer.
        ended: whether the completion is over.
    """

    def __init__(self, prompt: Prompt, stream: Stream) -> None:
        self.prompt, self.stream = prompt, stream
        self.texts: list[str] = []
        self.worker: Worker | None = None
        self.asked = self.ended = False


class IsolatedEnvironment:
    """Runs an environment in worker processes, one for each completion that has called and has not
    ended.

    The environment is made once, in the process from which the workers are forked, so that they
    share its memory. A call fails if its worker dies; a worker whose call is given up is killed. No
    other completion is affected. Workers are used again for later completions.

    Args:
        made: makes the environment.
        where: the setting that names it, for messages.

    Raises:
        UsageError: the environment cannot be made.
    """

    def __init__(self, made: BoundFunction, *, where: str) -> None:
        self.where = where
        job = pickle.dumps(_Unmade(made))
        self.workers = Workers(job, runs="environment", start_seconds=START_SECONDS)
        self._lock = threading.Lock()
        try:
            worker = self.workers.take()
            answer = self.workers.ask(worker, pickle.dumps(None))
        except (RewardError, WorkerDied) as error:
            raise UsageError(f"{where}.name = {made.spec.name!r}: {error}.") from None
        self.workers.give_back(worker)
        said = pickle.loads(answer)
        if isinstance(said, _Failed):
            raise UsageError(said.for_user(f"{where}.name = {made.spec.name!r}: "))
        self.stops, self.has_processes, self._schemas = said

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Those of the environment; none if it has none.

        Raises:
            UsageError: a function that cannot be described.
        """
        if isinstance(self._schemas, _Failed):
            raise UsageError(self._schemas.for_user(f"{self.where}: "))
        return self._schemas

    def begin(self, prompt: Prompt, *, stream: Stream) -> State:
        """A completion that has not called yet."""
        return State(prompt, stream)

    def resume(self, state: State, texts: Sequence[str]) -> None:
        """Have the environment resume before its next reply."""
        state.texts += texts

    def reply(self, state: State, text: str) -> Reply:
        """What the environment replies, in the worker of the completion."""
        try:
            worker, new = self._held(state)
            begun = (state.prompt, state.stream) if new else None
            message = pickle.dumps((begun, state.texts, text))
            state.texts = []
            answer = self.workers.ask(worker, message)
        except RewardError as error:
            return Reply(text=str(error), status=Status.ERROR)
        except WorkerDied as died:
            with self._lock:
                state.worker, state.asked = None, False
            said = f"environment: its process died ({died})"
            return Reply(text=said, status=Status.ERROR)
        with self._lock:
            state.asked = False
        said = pickle.loads(answer)
        return said.reply() if isinstance(said, _Failed) else said

    def end(self, state: State) -> None:
        """Free the worker of a completion, or kill it if it is still running a call."""
        with self._lock:
            state.ended, worker, running = True, state.worker, state.asked
            state.worker = None
        if worker is None:
            return
        if running:
            self.workers.kill(worker)
        else:
            self.workers.give_back(worker)

    def _held(self, state: State) -> tuple[Worker, bool]:
        """The worker of a completion, which has a call to answer from now on, and whether it is
        new.

        Raises:
            RewardError: none could be started.
        """
        found = state.worker
        worker = self.workers.take() if found is None else found
        with self._lock:
            if not state.ended:
                state.worker, state.asked = worker, True
                return worker, found is None
        if found is None:
            self.workers.give_back(worker)
        raise RewardError("environment: the completion has ended")


class _Failed:
    """What is sent of an exception."""

    def __init__(self, error: BaseException) -> None:
        self.message, self.kind = str(error), type(error).__name__
        self.usage, self.late = isinstance(error, UsageError), isinstance(error, TimeoutError)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    def for_user(self, where: str) -> str:
        """The message for a user; an error of this package says itself where it is."""
        return self.message if self.usage else f"{where}{self}"

    def reply(self) -> Reply:
        """The call has failed."""
        return Reply(text=str(self), status=Status.TIMEOUT if self.late else Status.ERROR)


class _Unmade:
    """A job whose environment is made where it arrives: in the process that forks the workers."""

    def __init__(self, made: BoundFunction) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return _Job, (self.made,)


class _Job:
    """What a worker does: it holds the state of one completion.

    Args:
        made: makes the environment.
    """

    def __init__(self, made: BoundFunction) -> None:
        self.environment: Any = None
        self.state: Any = None
        self.failure: Exception | None = None
        try:
            self.environment = made({})
        except Exception as error:
            self.failure = error

    def begin(self) -> None:
        """Nothing is said before the first call."""

    def answer(self, message: bytes) -> bytes:
        """A reply, the description of the environment, or what failed."""
        try:
            if self.failure is not None:
                raise self.failure
            asked = pickle.loads(message)
            said = pickle.dumps(self._described() if asked is None else self._reply(*asked))
            if len(said) > MOST_BYTES:
                raise ValueError(f"the reply has more than {MOST_BYTES >> 20} MiB")
        except BaseException as error:  # also what ends a process: the trainer waits for an answer
            said = pickle.dumps(_Failed(error))
        return said

    def _described(self) -> tuple[Any, ...]:
        """Stop strings, whether calls run in processes of their own, and schemas."""
        schemas: Any = ()
        stops = self.environment.stops
        try:
            if isinstance(self.environment, Showing):  # reads the property
                schemas = tuple(self.environment.schemas)
        except Exception as error:
            schemas = _Failed(error)
        has_processes = getattr(self.environment, "has_processes", False)
        return stops, has_processes, schemas

    def _reply(
        self, begun: tuple[Prompt, Stream] | None, earlier: Sequence[str], text: str
    ) -> Reply:
        if begun is not None:
            prompt, stream = begun
            self.state = self.environment.begin(prompt, stream=stream)
        if earlier:
            resume(self.environment, self.state, earlier)
        return self.environment.reply(self.state, text)
