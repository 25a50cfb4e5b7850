"""Replicas that sample, and the versions of weights that they sample from."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from groupwise.distributed import connection
from groupwise.distributed.actors import Replica
from groupwise.distributed.lost import TransferError
from groupwise.errors import RunError, warn
from groupwise.rollouts.background import versions_kept
from groupwise.rollouts.spans import Spans
from groupwise.types import Group, Limits, Metrics, Request, Requests, Sampling, WeightsRef

PAUSE_S = 0.01
"""Seconds between checks on a source that has no request while nothing is being written."""
LOOK_S = 0.05
"""Longest wait for a replica while there may be requests for another one."""
CHECK_S = 2.0
"""Seconds between checks of what starts, and of what gives no answer."""
REPLACEMENTS = 10
"""How often a replica may be lost without completions in between."""


class Stored:
    """Published weights in the object store; replicas read them, the driver does not."""

    def __init__(self, version: int, ref: Any) -> None:
        self.version, self.ref = version, ref
        self.manifest: Mapping[str, Any] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Nothing: the tensors are in the object store."""
        return iter(())

    def digest(self, name: str) -> int:
        """KeyError: the tensors are in the object store."""
        raise KeyError(name)


class Idle:
    """The idle replicas, shared by several callers.

    Args:
        count: of replicas.
    """

    def __init__(self, count: int) -> None:
        self.free = set(range(count))
        self.wanted: dict[object, int] = {}
        self.lock = threading.Lock()

    def claim(self, caller: object, step: int) -> int | None:
        """A replica for a caller, if one is idle and no caller with an earlier step is waiting;
        evaluations have earlier steps than training.
        """
        with self.lock:
            self.wanted[caller] = step
            if not self.free or step > min(self.wanted.values()):
                return None
            place = min(self.free)
            self.free.remove(place)
            return place

    def claim_all(self) -> list[int]:
        """Every idle replica."""
        with self.lock:
            places, self.free = sorted(self.free), set()
            return places

    def stop_waiting(self, caller: object) -> None:
        """Note that a caller has no work for a replica at the moment."""
        with self.lock:
            self.wanted.pop(caller, None)

    def give_back(self, places: Iterable[int]) -> None:
        """Return replicas that are idle again."""
        with self.lock:
            self.free |= set(places)

    def leave(self, place: int) -> None:
        """Note that a replica was lost; `give_back` returns its replacement."""
        with self.lock:
            self.free.discard(place)


class Starting:
    """Replacements of lost replicas that do not answer yet.

    Args:
        cluster: the connection to Ray.
        count: of replicas.
    """

    def __init__(self, cluster: Any, count: int) -> None:
        self.cluster, self.count = cluster, count
        self.calls: dict[int, tuple[Any, float]] = {}
        self.checked, self.said = 0.0, False

    def add(self, place: int, actor: Any) -> None:
        """Wait for the replacement at a place."""
        self.calls[place] = self.cluster.asked(actor), time.monotonic()

    def started(self) -> list[int]:
        """The places whose replacements have started, or died; those that remain are checked.

        Raises:
            RunError: no replica is left, and there was no room for another one in time; or one did
                not start in time.
        """
        ray, now = self.cluster.ray, time.monotonic()
        found = [n for n, (call, _) in self.calls.items() if ray.wait([call], timeout=0)[0]]
        for place in found:
            del self.calls[place]
        if self.calls and now - self.checked > CHECK_S:
            self.checked = now
            self._check(now - min(since for _, since in self.calls.values()))
        self.said &= bool(self.calls)
        return found

    def _check(self, waited_s: float) -> None:
        if waited_s < CHECK_S:
            return
        names = f"replica {', '.join(map(str, sorted(self.calls)))}"
        limit_s, of = self.cluster.config.distributed.timeout_s, self.cluster.settings
        if there := self.cluster.without_room():
            each = connection.listed({"CPU": of.replica_cpus, "GPU": of.replica_gpus})
            lost = f"{names}: lost, and the cluster has no room for another ({each}; {there})"
            left = self.count - len(self.calls)
            if not left and waited_s > connection.ROOM_S:
                raise RunError(
                    f"{lost}, and no replica is left. Add nodes, or lower cluster.replicas, and "
                    "continue with --resume."
                )
            if left and not self.said:
                self.said = True
                warn(
                    f"{lost}. The run continues with {left} of {self.count} replicas, and takes "
                    "another as soon as there is room."
                )
        elif waited_s > limit_s:
            raise RunError(
                f"{names}: lost, and another did not start within {limit_s:.0f} s "
                "(distributed.timeout_minutes). Continue with --resume."
            )


class _Call(NamedTuple):
    """What a replica is doing.

    Attributes:
        renewed: the call that gives it the weights of these requests.
        begun: when, in seconds since 1970.
    """

    place: int
    actor: Any
    given: list[Request]
    renewed: list[Any]
    ref: Any
    begun: float


class ClusterEngine:
    """An `Engine` that gives requests to replicas and replaces those that die.

    The newest versions of the weights are kept, as many as `ahead` needs. A replica takes over a
    version when it is idle, or before the first request that names it, so one that is busy with a
    long completion holds up neither the learner nor the others. Several threads may sample.

    Args:
        cluster: the connection to Ray.
        weights: that the replicas begin with.
    """

    def __init__(self, cluster: Any, weights: Stored) -> None:
        self.cluster = cluster
        self.kept: deque[Stored] = deque([weights], maxlen=versions_kept(cluster.config.ahead))
        count, config = cluster.settings.replicas, cluster.config
        self.chunk = max(1, config.engine.max_rows // config.group_size)
        self.writing = 0 if config.streaming is None else 2 * self.chunk
        self.replicas = [self._new() for _ in range(count)]
        self.holds: list[tuple[Stored, Any] | None] = [None] * count
        self.idle, self.lock = Idle(count), threading.Lock()
        self.starting = Starting(cluster, count)
        self.losses: Counter[int] = Counter()  # of each place, since its last completions
        self.faulty: set[int] = set()  # places that a transfer failed at since then
        self.spans = Spans(apart=True)
        self.transfers: list[tuple[int, Any, list[Any], float]] = []
        cluster.compare({f"replica {i}": actor for i, actor in enumerate(self.replicas)})
        begun = [self.renew(place, weights) for place in range(count)]
        for place, (actor, refs) in enumerate(begun):
            self._await(place, actor, refs)
        exact = self.replicas[0].exact_continuation.remote()
        self.exact_continuation = bool(cluster.answer("replica 0", exact))

    @property
    def current(self) -> Stored:
        """The newest weights."""
        return self.kept[-1]

    def _new(self) -> Any:
        of = self.cluster.settings
        return self.cluster.actor(
            Replica, cpus=of.replica_cpus, gpus=of.replica_gpus, writing=self.writing
        )

    def renew(self, place: int, weights: Stored | None = None) -> tuple[Any, list[Any]]:
        """Make a replica load weights, the newest by default, unless it has already been told to;
        it checks what arrives. Returns the replica, as another thread may replace it at any time,
        and the calls to wait for.
        """
        with self.lock:
            weights = weights or self.current
            held = self.holds[place]
            if held is None or held[0] is not weights:
                call = self.replicas[place].publish.remote(weights.ref, weights.version)
                held = self.holds[place] = weights, call
            return self.replicas[place], [held[1]]

    def _weights(self, version: int | None) -> Stored:
        """The version if it is still kept, else the newest: no caller waits for completions of a
        dropped version.
        """
        found = [each for each in list(self.kept) if each.version == version]
        return found[-1] if found else self.current

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield groups as replicas finish them."""
        source, over, caller = iter(requests), False, object()
        waiting: deque[Request] = deque()
        running: dict[Any, _Call] = {}
        asked: dict[int, Any] = {}
        ray = self.cluster.ray
        try:
            while not over or waiting or running:
                self.admit()
                over = over or self._look_ahead(source, waiting)
                while waiting and (call := self._begin(caller, waiting, sampling)):
                    running[call.ref] = call
                if not waiting:
                    self.idle.stop_waiting(caller)
                if not running:
                    if waiting or not over:
                        time.sleep(PAUSE_S)
                    continue
                alone = over and not waiting
                done, _ = ray.wait(list(running), num_returns=1, timeout=1.0 if alone else LOOK_S)
                if not done:
                    self.end_silent({call.place: call.actor for call in running.values()}, asked)
                for call in [running.pop(ref) for ref in done]:
                    self.spans.add(f"replica {call.place}", "sampling", call.begun)
                    try:
                        *_, groups = self.cluster.get([*call.renewed, call.ref])
                    except (*self.cluster.lost, TransferError) as error:
                        self.replace(call.place, call.actor, error)
                        waiting.extendleft(reversed(call.given))
                        continue
                    self.answered(call.place)
                    self.idle.give_back([call.place])
                    yield from groups
        finally:
            self.idle.stop_waiting(caller)
            self.idle.give_back(call.place for call in running.values())

    def _begin(self, caller: object, waiting: deque[Request], sampling: Sampling) -> _Call | None:
        """Give an idle replica its share of the requests, if there is one."""
        place = self.idle.claim(caller, waiting[0].stream.step)
        if place is None:
            return None
        given = self._share(waiting)
        actor, renewed = self.renew(place, self._weights(given[0].version))
        ref = actor.generate.remote(given, sampling)
        return _Call(place, actor, given, renewed, ref, time.time())

    def _look_ahead(self, source: Iterator[Request | None], waiting: deque[Request]) -> bool:
        """Take requests until every replica can be filled; whether the requests have ended."""
        while len(waiting) < self.chunk * len(self.replicas):
            try:
                request = next(source)
            except StopIteration:
                return True
            if request is None:
                break
            waiting.append(request)
        return False

    def _share(self, waiting: deque[Request]) -> list[Request]:
        """The requests of one replica, all for one version of the weights."""
        share = max(1, min(self.chunk, -(-len(waiting) // len(self.replicas))))
        given = [waiting.popleft()]
        while waiting and len(given) < share and waiting[0].version == given[0].version:
            given.append(waiting.popleft())
        return given

    def answered(self, place: int) -> None:
        """Note that a replica has returned completions."""
        self.losses.pop(place, None)
        self.faulty.discard(place)

    def replace(self, place: int, lost: Any, error: Exception) -> None:
        """A new replica for a lost one, unless another thread has made it already. It gets requests
        once it has started (`admit`), and takes over weights with the first of them.

        Args:
            error: the reason.

        Raises:
            RunError: the replica in this place was lost too often, or weights did not arrive at its
                replacement either.
        """
        with self.lock:
            if self.replicas[place] is lost:
                if isinstance(error, TransferError):
                    if place in self.faulty:
                        raise error
                    self.faulty.add(place)
                    warn(f"replica {place}: {error} Another replica takes its place.")
                self.losses[place] += 1
                if self.losses[place] > REPLACEMENTS:
                    raise RunError(
                        f"replica {place}: was lost {self.losses[place]} times in a row without "
                        "completions in between."
                    )
                self.cluster.ray.kill(lost)  # Ray may take one for lost that still has its room.
                self.idle.leave(place)
                self.replicas[place], self.holds[place] = self._new(), None
                self.starting.add(place, self.replicas[place])

    def admit(self) -> None:
        """Give requests to replacements from the time they have started.

        Raises:
            RunError: there is no replica, and none in sight.
        """
        with self.lock:
            self.idle.give_back(self.starting.started())

    def end_silent(self, actors: Mapping[int, Any], asked: dict[int, Any]) -> None:
        """End replicas that show no sign of life, so that calls to them fail.

        Args:
            asked: as for `Cluster.silent`.
        """
        for place in self.cluster.silent(actors, asked):
            self.cluster.ray.kill(actors[place])

    def _await(self, place: int, actor: Any, refs: list[Any]) -> list[Any]:
        """The results of calls to a replica, waited for as long as it shows signs of life."""
        asked: dict[int, Any] = {}
        ray, count = self.cluster.ray, len(refs)
        while len(ray.wait(refs, num_returns=count, timeout=CHECK_S)[0]) < count:
            self.end_silent({place: actor}, asked)
        return self.cluster.get(refs)

    def publish(self, weights: WeightsRef) -> Metrics:
        """Keep new weights for the requests to come, and send them to the idle replicas.

        The call does not wait for them: the requests of a replica come after its transfer, and a
        replica whose transfer failed returns no completion.

        Raises:
            RunError: weights of the version before did not arrive as they were sent, twice.
        """
        assert isinstance(weights, Stored)
        self.settle()
        self.kept.append(weights)
        at, places = time.time(), self.idle.claim_all()
        self.transfers = [(place, *self.renew(place, weights), at) for place in places]
        self.idle.give_back(places)
        return {}

    def settle(self) -> None:
        """Wait for the transfers of the last `publish`; a replica that was lost, or that did not
        get what was sent, is replaced.

        Raises:
            RunError: its replacement did not get it either.
        """
        transfers, self.transfers = self.transfers, []
        for place, actor, refs, at in transfers:
            try:
                (found,) = self._await(place, actor, refs)
            except (*self.cluster.lost, TransferError) as error:
                self.replace(place, actor, error)
            else:
                end = at + found["seconds.weights"]
                self.spans.add(f"replica {place}", "transferring", at, end)

    def close(self) -> None:
        """Stop ranks, replicas, and a cluster that was started here."""
        self.cluster.close()
