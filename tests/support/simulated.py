"""A clock that is told what time it is, and an engine whose replicas live by it: the source that
samples ahead runs as it is, and hours pass in milliseconds."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from groupwise.rollouts.background import versions_kept
from groupwise.types import Completion, Group, Limits, Metrics, Prompt, Request, Requests, Sampling

LEARNER, SAMPLER = "learner", "sampler"
END = 1e6
"""A simulation that has not ended by then never will."""


class Deadlock(Exception):
    """Both sides wait for each other."""


class Clock:
    """A `Runner` on which one of two threads runs at a time; when both wait, time goes on."""

    def __init__(self) -> None:
        self.now, self.current = 0.0, LEARNER
        self.turn = threading.Condition()
        self.waits: dict[str, float | Callable[[], bool]] = {}
        self.failed = False
        self.names = {threading.get_ident(): LEARNER}

    def sleep(self, seconds: float) -> None:
        """Let time pass for the caller."""
        self._block(self.now + seconds)

    def wait(self, until: Callable[[], bool]) -> bool:
        """As `Runner.wait`, without a limit."""
        if not until():
            self._block(until)
        return True

    def start(self, work: Callable[[], None]) -> None:
        """As `Runner.start`."""

        def run() -> None:
            self.names[threading.get_ident()] = SAMPLER
            with self.turn:
                self.turn.wait_for(lambda: self.current == SAMPLER)
            try:
                work()
            finally:
                with self.turn:
                    self.waits.pop(SAMPLER, None)
                    self._choose()

        self.waits[SAMPLER] = self.now
        threading.Thread(target=run, daemon=True).start()

    def notify(self) -> None:
        """Nothing: conditions are looked at whenever a side waits."""

    def join(self) -> None:
        """As `Runner.join`."""
        self.wait(lambda: SAMPLER not in self.waits)

    def _block(self, wait: float | Callable[[], bool]) -> None:
        me = self.names[threading.get_ident()]
        with self.turn:
            self.waits[me] = wait
            self._choose()
            self.turn.wait_for(lambda: self.current == me or self.failed)
            if self.failed:
                raise Deadlock(f"at {self.now:g} s")
            if me == LEARNER:
                del self.waits[me]

    def _choose(self) -> None:
        """Give the turn to a side whose condition holds, else to the one that wakes up first."""
        sides = sorted(self.waits)
        ready = [one for one in sides if callable(wait := self.waits[one]) and wait()]
        times = [(wait, one) for one in sides if not callable(wait := self.waits[one])]
        if ready:
            self.current = ready[0]
        elif times and min(times)[0] < END:
            self.now, self.current = max(self.now, min(times)[0]), min(times)[1]
        elif sides:
            self.failed = True
        self.turn.notify_all()


@dataclass(frozen=True, kw_only=True)
class World:
    """What befalls a run.

    Attributes:
        seed: of the latencies and failures.
        replicas, slots: processes that sample, and the groups that each writes at a time.
        sigma: of the lognormal latencies, whose mean is 1.
        longest: most that a latency can be.
        slow: factor of the latencies of replica 0.
        failures: probability that the replica of a group is killed while it writes it.
        update: seconds of an update.
        lag: most seconds that a replica goes on with its weights after others were published.
    """

    seed: int = 0
    replicas: int = 2
    slots: int = 2
    sigma: float = 1.0
    longest: float = 4.0
    slow: float = 1.0
    failures: float = 0.0
    update: float = 1.0
    lag: float = 0.0


class SimulatedEngine:
    """Replicas that keep as many versions of the weights as those of a cluster; what they write
    follows from prompt, stream and version."""

    exact_continuation = True

    def __init__(self, world: World, clock: Any, *, ahead: int) -> None:
        self.world, self.clock = world, clock
        self.random = random.Random(world.seed)
        self.kept: deque[int] = deque([0], maxlen=versions_kept(ahead))
        self.written = 0

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        source, over = iter(requests), False
        free = [place for place in range(self.world.replicas) for _ in range(self.world.slots)]
        running: list[tuple[float, int, int, tuple[float, int], Request]] = []
        again: deque[Request] = deque()
        number = 0
        while not over or running or again:
            while free:
                request = again.popleft() if again else None
                if request is None and not over:
                    try:
                        request = next(source)
                    except StopIteration:
                        over = True
                if request is None:
                    break
                number += 1
                place = free.pop(self.random.randrange(len(free)))
                end, begun = self._end(place), (self.clock.now, self._version(request))
                heapq.heappush(running, (end, number, place, begun, request))
            if not running:
                self.clock.sleep(1.0)
                continue
            pause = 0.05 if free and not over else float("inf")
            self.clock.sleep(max(0.0, min(running[0][0] - self.clock.now, pause)))
            if running[0][0] > self.clock.now:
                continue
            _, _, place, (begun, version), request = heapq.heappop(running)
            free.append(place)
            if self.random.random() < self.world.failures:
                again.append(request)
                continue
            self.written += 1
            yield self._written(request, begun=begun, version=version)

    def _written(self, request: Request, *, begun: float, version: int) -> Group:
        return completed(request, version=version)

    def _end(self, place: int) -> float:
        world = self.world
        spread = self.random.lognormvariate(-(world.sigma**2) / 2, world.sigma)
        return self.clock.now + min(spread, world.longest) * (world.slow if place == 0 else 1.0)

    def _version(self, request: Request) -> int:
        return request.version if request.version in self.kept else self.kept[-1]

    def publish(self, weights: Any) -> Metrics:
        """Keep another version, given by its number."""
        self.kept.append(weights)
        return {}

    def close(self) -> None: ...


class FlowingEngine(SimulatedEngine):
    """Replicas that take over new weights while they write; a request begins with the newest."""

    TOKENS = 5

    def __init__(self, world: World, clock: Any) -> None:
        super().__init__(world, clock, ahead=0)
        self.published: list[tuple[float, int]] = [(0.0, 0)]

    def _version(self, request: Request) -> int:
        return self.published[-1][1]

    def publish(self, weights: Any) -> Metrics:
        self.published.append((self.clock.now, weights))
        return {}

    def _written(self, request: Request, *, begun: float, version: int) -> Group:
        """With the versions that there were while each of the tokens was drawn."""
        lag, spans = self.random.uniform(0.0, self.world.lag), [(0, version)]
        for place in range(1, self.TOKENS):
            now = begun + (self.clock.now - begun) * place / self.TOKENS
            known = max((v for at, v in self.published if at + lag <= now), default=0)
            if known > spans[-1][1]:
                spans.append((place, known))
        group = completed(request, version=version)
        return replace(
            group,
            completions=tuple(
                replace(
                    c,
                    tokens=[*c.tokens] * self.TOKENS,
                    mask=[True] * self.TOKENS,
                    logprobs=[-0.5] * self.TOKENS,
                    versions=tuple(spans),
                )
                for c in group.completions
            ),
        )


def completed(request: Request, *, version: int) -> Group:
    """What a version of the weights writes of a request."""
    drawn = random.Random(repr((request.prompt.id, tuple(request.stream), version)))
    completions = tuple(
        Completion(
            tokens=[token],
            mask=[True],
            logprobs=[-0.5],
            text=str(token),
            finish="stop",
            versions=((0, version),),
        )
        for token in (drawn.randrange(1000) for _ in range(request.group))
    )
    return Group(
        prompt=request.prompt,
        prompt_tokens=request.tokens,
        completions=completions,
        stream=request.stream,
        samples=request.wanted,
    )


DATA = [Prompt(id=str(n), text="?") for n in range(11)]


def reward(group: Group) -> list[float | None]:
    """Some groups have one reward throughout, and a few cannot be judged at all."""
    if int(group.completions[0].text) < 2:
        return [None for _ in group.completions]
    return [float(int(c.text) % 3 > 0) for c in group.completions]


class SlowJudge:
    """Judges one group after the other, beside the caller."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.pool = inner, ThreadPoolExecutor(1)

    def submit(self, group: Group) -> Any:
        def judged() -> Any:
            time.sleep(0.03)
            return self.inner.submit(group).result()

        return self.pool.submit(judged)

    def gather(self, tickets: Any) -> Any:
        return self.inner.gather(tickets)


def beats_of(source: Any, received: Callable[[], int]) -> list[int]:
    """How many groups a source had received at each sign of progress that its waits report."""
    beats: list[int] = []

    @contextmanager
    def watch(name: str) -> Iterator[Callable[[], None]]:
        yield lambda: beats.append(received())

    source.watch = watch
    return beats
