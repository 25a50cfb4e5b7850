"""Replicas that never drain: requests enter and groups leave one by one, while weights change."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from groupwise.distributed.connection import WRITING
from groupwise.distributed.lost import TransferError
from groupwise.distributed.replicas import LOOK_S, PAUSE_S, ClusterEngine
from groupwise.types import Group, Limits, Metrics, Request, Requests, Sampling, WeightsRef


class ContinuousEngine:
    """An `Engine` that keeps the replicas of a cluster busy.

    Completions of a replica that was lost, or whose weights did not arrive, are sampled again by
    others.

    Args:
        engine: of the cluster; evaluations use it beside this one.
    """

    def __init__(self, engine: ClusterEngine) -> None:
        self.engine, self.cluster = engine, engine.cluster
        self._running: dict[Any, tuple[int, Any, Request, float]] = {}
        self._ready: dict[int, tuple[Any, list[Any]]] = {}

    @property
    def exact_continuation(self) -> bool:
        """As that of the replicas."""
        return self.engine.exact_continuation

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield groups as replicas finish them."""
        source, over = iter(requests), False
        waiting: deque[Request] = deque()
        asked: dict[int, Any] = {}
        while not over or waiting or self._running:
            self.engine.admit()
            while (place := self._free()) is not None and (waiting or not over):
                if not waiting:
                    over = _take(source, waiting)
                if not waiting:
                    break
                self._give(place, waiting.popleft(), sampling, limits)
            if not self._running:
                time.sleep(PAUSE_S)
                continue
            done, _ = self.cluster.ray.wait(list(self._running), num_returns=1, timeout=LOOK_S)
            if not done:
                actors = {place: actor for place, actor, *_ in self._running.values()}
                self.engine.end_silent(actors, asked)
            for ref in done:
                place, actor, request, start = self._running.pop(ref)
                try:
                    group = self.cluster.get(ref)
                except (*self.cluster.lost, TransferError) as error:
                    waiting.appendleft(request)
                    self.engine.replace(place, actor, error)
                    continue
                self.engine.answered(place)
                self.engine.spans.add(f"replica {place}", "sampling", start)
                yield group

    def _give(self, place: int, request: Request, sampling: Sampling, limits: Any) -> None:
        actor = self._ready[place][0]
        write = actor.write.options(concurrency_group=WRITING)
        ref = write.remote(request, sampling, limits)
        self._running[ref] = place, actor, request, time.time()

    def _free(self) -> int | None:
        """The replica with the fewest requests, if it may have another one. A new replica gets none
        before it has the newest weights."""
        load = Counter(place for place, *_ in self._running.values())
        free = [place for place in range(len(self.engine.replicas)) if self._is_ready(place)]
        place = min(free, key=lambda each: load[each], default=None)
        return place if place is not None and load[place] < self.engine.writing else None

    def _is_ready(self, place: int) -> bool:
        known = self._ready.get(place)
        if known is None or known[0] is not self.engine.replicas[place]:
            known = self._ready[place] = self.engine.renew(place)
        actor, renewed = known
        if not renewed:
            return True
        done, _ = self.cluster.ray.wait(renewed, num_returns=len(renewed), timeout=0)
        if len(done) < len(renewed):
            return False
        try:
            self.cluster.get(renewed)
        except (*self.cluster.lost, TransferError) as error:
            self.engine.replace(place, actor, error)
            return False
        self._ready[place] = actor, []
        return True

    def publish(self, weights: WeightsRef) -> Metrics:
        """Have every replica take over new weights between two tokens. The call waits for them,
        because the completions in progress continue with what arrived."""
        metrics = self.engine.publish(weights)
        self.engine.settle()
        return metrics

    def close(self) -> None:
        """End the cluster."""
        self.engine.close()


def _take(source: Iterator[Request | None], waiting: deque[Request]) -> bool:
    """Take the next request, if there is one now; whether there will be no other."""
    try:
        request = next(source)
    except StopIteration:
        return True
    if request is not None:
        waiting.append(request)
    return False
