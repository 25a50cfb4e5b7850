"""Rewards in processes of a cluster: the reward workers of `PoolScorer`, on other machines.

The driver composes totals and keeps the order; a scorer process judges the completions of one group
at a time in worker processes of its machine, which have the limits of local ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.distributed.actors import go_to
from groupwise.distributed.connection import LIFE
from groupwise.distributed.surroundings import received, surroundings
from groupwise.errors import RewardError
from groupwise.rewards.scoring.pipeline import Call, CallResult
from groupwise.rewards.scoring.pool import ATTEMPTS, Setups, local_workers

LOOK_S = 2.0
"""Seconds between checks that a scorer that is waited for is alive."""


class ScorerProcess:
    """What runs in a scorer process.

    Args:
        settings: the configuration as JSON.
        folder: where the driver runs, for relative paths.
        setups: see `Setups`.
        count: of workers.
    """

    def __init__(self, settings: str, folder: str, setups: Setups, count: int) -> None:
        go_to(folder)
        received(settings)
        self.workers = local_workers(setups, count)

    async def surroundings(self) -> dict[str, str]:
        """As `surroundings.surroundings`."""
        return surroundings()

    async def alive(self) -> int:
        """Answer while calls run: signs of progress of workers that get ready."""
        return sum(workers.signs for workers in self.workers.values())

    async def prepare(self) -> None:
        """Make rewards that load a model ready."""
        own = [workers for stage, workers in self.workers.items() if stage is not None]
        await asyncio.gather(*(workers.prepare() for workers in own))

    async def judge(self, names: str, calls: Sequence[Call], timeout_s: float) -> list[CallResult]:
        """As `Workers.ask`."""
        workers = self.workers.get(calls[0].stage, self.workers.get(None))
        assert workers is not None
        return await workers.ask(names, calls, timeout_s=timeout_s)


class ScorerProcesses:
    """All scorer processes of a run, as the workers of a `PoolScorer`. Each group goes to the least
    busy one. One that dies is replaced, and what it was asked is asked again.

    Args:
        cluster: the connection to Ray.
        setups, count: see `ScorerProcess`.

    Raises:
        UsageError: a process has other packages than the driver.
        RunError: a process did not start.
    """

    def __init__(self, cluster: Any, setups: Setups, count: int) -> None:
        self.cluster, self.given = cluster, (setups, count)
        self.signs = 0
        self.actors = [self._new() for _ in range(cluster.settings.scorers)]
        self.busy = [0] * len(self.actors)
        cluster.compare({f"scorer {i}": actor for i, actor in enumerate(self.actors)})

    async def ask(self, names: str, calls: Sequence[Call], *, timeout_s: float) -> list[CallResult]:
        """As `Workers.ask`."""
        place = min(range(len(self.actors)), key=self.busy.__getitem__)
        self.busy[place] += 1
        try:
            return await self._result(
                place, lambda actor: actor.judge.remote(names, calls, timeout_s)
            )
        except _Lost as lost:
            return [CallResult(failure=("error", f"{names}: {lost}"))] * len(calls)
        finally:
            self.busy[place] -= 1

    async def prepare(self) -> None:
        """As `Workers.prepare`."""
        try:
            asked = [self._result(n, lambda a: a.prepare.remote()) for n in range(len(self.actors))]
            await asyncio.gather(*asked)
        except _Lost as lost:
            raise RewardError(f"the rewards could not be prepared: {lost}.") from None

    def end(self) -> None:
        """Processes end with the cluster."""

    def close(self) -> None:
        """Processes end with the cluster."""

    def _new(self) -> Any:
        of = self.cluster.settings
        return self.cluster.actor(
            ScorerProcess, *self.given, cpus=of.scorer_cpus, gpus=of.scorer_gpus
        )

    async def _result(self, place: int, call: Callable[[Any], Any]) -> Any:
        """The result of a call to the process at a place, or to the ones that replace it.

        Raises:
            _Lost: they die one after the other.
        """
        for _ in range(ATTEMPTS):
            actor = self.actors[place]
            try:
                return await self._answer(actor, call(actor))
            except (self.cluster.ray.exceptions.RayActorError, TimeoutError):
                if self.actors[place] is actor:
                    self.cluster.ray.kill(actor)
                    self.actors[place] = self._new()
        raise _Lost(f"scorer {place} was lost {ATTEMPTS} times")

    async def _answer(self, actor: Any, ref: Any) -> Any:
        """The result of a call.

        Raises:
            TimeoutError: the process shows no sign of life for `distributed.timeout_minutes`.
        """
        answer, limit_s = _future(ref), self.cluster.config.distributed.timeout_s
        seen: int | None = None
        while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
            alive = actor.alive.options(concurrency_group=LIFE).remote()
            signs = await asyncio.wait_for(_future(alive), limit_s)
            if signs != seen:  # Every process counts for itself.
                self.signs, seen = self.signs + 1, signs
        answer.exception()
        return self.cluster.get(ref)  # As this library's error, if one was raised.


def _future(ref: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(ref.future())


class _Lost(Exception):
    """Scorer processes died one after the other."""
