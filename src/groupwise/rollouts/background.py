"""An engine that receives further requests before its last answer is needed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from groupwise.errors import RunError
from groupwise.types import (
    Engine,
    Group,
    Limits,
    Metrics,
    Request,
    Requests,
    Sampling,
    Stream,
    WeightsRef,
)

Key = tuple[Stream, str]
"""Names a request: its stream, and the prompt's id."""


def versions_kept(ahead: int) -> int:
    """How many versions of the weights an engine keeps: those of the batches that are begun, and
    two new ones of the step before the next batch, which publishes a second time if it rolls back.
    """
    return 2 + ahead


class SamplingClosed(Exception):
    """Raised by the stream of requests of a run that has ended."""


class Background:
    """An `Engine` for a source that samples in the background, on an engine that keeps versions of
    weights and takes requests while it writes.

    After the requests of the current batch, the engine receives the requests that later batches
    will probably make, so that it does not idle during the longest completion of a batch. A
    predicted request names the same streams as the real one, so its completions are valid once the
    real request is made. If other prompts are drawn instead, they are dropped.

    Args:
        engine: writes each request with the version of weights that it names.
    """

    exact_continuation = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self.received = self.dropped = 0
        self._version = 0
        self._predicted: Callable[[], Iterable[Request]] = tuple
        self._waiting: deque[Request] = deque()
        self._asked: dict[Key, int] = {}
        self._late: Counter[Key] = Counter()
        self._answers: dict[Key, Group] = {}
        self._groups: Iterator[Group] | None = None

    def begin(self, version: int, predicted: Callable[[], Iterable[Request]]) -> None:
        """Sample the next batch from a version of the weights.

        Args:
            predicted: called whenever there is room, once the batch has drawn its prompts; returns
                requests of later batches that it has not returned before.
        """
        self._version, self._predicted = version, predicted

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield each request's group as soon as it is there, the version of its tokens checked."""
        made = [replace(each, version=self._version) for each in requests if each is not None]
        self._forget(made)
        open_keys = [_key(request) for request in made]
        self._ask(made, first=True)
        while open_keys:
            ready = [key for key in open_keys if key in self._answers]
            for key in ready:
                open_keys.remove(key)
                del self._asked[key]
                yield self._answers.pop(key)
            if open_keys and not ready:
                self._receive(sampling)

    def _forget(self, made: list[Request]) -> None:
        """Drop what was predicted for the batches up to this one and is not asked for."""
        step = max((request.stream.step for request in made), default=-1)
        keys = {_key(request): request.version for request in made}
        wrong = [
            key
            for key, version in self._asked.items()
            if key[0].step <= step and keys.get(key) != version
        ]
        waiting = {_key(request) for request in self._waiting}
        for key in wrong:
            del self._asked[key]
            if self._answers.pop(key, None) is not None:
                self.dropped += 1
            elif key not in waiting:
                self._late[key] += 1
        self._waiting = deque(each for each in self._waiting if _key(each) in self._asked)

    def _ask(self, requests: Iterable[Request], *, first: bool) -> None:
        """Put requests that are not asked for yet into the queue."""
        new = [request for request in requests if _key(request) not in self._asked]
        for request in new:
            assert request.version is not None
            self._asked[_key(request)] = request.version
        if first:
            self._waiting.extendleft(reversed(new))
        else:
            self._waiting.extend(new)

    def _receive(self, sampling: Sampling) -> None:
        """Wait for the next group.

        Raises:
            RunError: it was sampled from other weights than the request named.
        """
        if self._groups is None:
            self._groups = self.engine.generate(self._stream(), sampling)
        group = next(self._groups)
        self.received += 1
        key = group.stream, group.prompt.id
        version = self._asked.get(key)
        written = {v for c in group.completions for _, v in c.versions if c.tokens}
        if version is None or (written - {version} and self._late[key]):
            self._late -= Counter([key])
            self.dropped += 1
            return
        if written - {version}:
            raise RunError(
                f"prompt {group.prompt.id}: was to be completed by weights of version {version}, "
                f"and was by {', '.join(map(str, sorted(written)))}."
            )
        self._answers[key] = group

    def _stream(self) -> Iterator[Request | None]:
        while True:
            if self.closed:
                raise SamplingClosed
            if not self._waiting:
                self._ask(self._predicted(), first=False)
            yield self._waiting.popleft() if self._waiting else None

    def publish(self, weights: WeightsRef) -> Metrics:
        """Hand new weights to the engine."""
        return self.engine.publish(weights)

    def close(self) -> None:
        """End the stream of requests."""
        self.closed = True


def _key(request: Request) -> Key:
    return request.stream, request.prompt.id
