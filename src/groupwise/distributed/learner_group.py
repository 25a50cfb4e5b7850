"""The ranks of a learner as actors of Ray: they are started, called together, and end together."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.distributed.actors import LearnerRank
from groupwise.distributed.connection import Cluster
from groupwise.distributed.lost import RankLost
from groupwise.distributed.messages import packed, unpacked
from groupwise.errors import RunError, UsageError, first_line

LOOK_S = 2.0
"""Seconds between checks that the processes waited for are alive."""
ANSWER_S = 5.0
"""Seconds within which a live process must answer."""


class LearnerGroup:
    """All ranks of the learners of a run.

    Args:
        weights: of the policy as the run begins.
    """

    def __init__(self, cluster: Cluster, weights: Mapping[str, Tensor]) -> None:
        self.cluster = cluster
        self.broken = ""
        of = cluster.settings
        self.ranks = [
            cluster.actor(LearnerRank, rank, of.ranks, cpus=of.rank_cpus, gpus=of.rank_gpus)
            for rank in range(of.ranks)
        ]
        cluster.compare({f"rank {rank}": actor for rank, actor in enumerate(self.ranks)})
        self._check_shared()
        driver = cluster.ray.util.get_node_ip_address()
        address = cluster.answer("rank 0", self.ranks[0].address.remote(driver))
        given = [cluster.ray.put(dict(weights)), *[None] * (of.ranks - 1)]
        self._all("start", [(address, each) for each in given])

    def _check_shared(self) -> None:
        """Whether rank 0, which writes models, has the folder of the run."""
        folder = Path(self.cluster.config.output).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as mark:
            if not self.cluster.answer("rank 0", self.ranks[0].sees.remote(mark.name)):
                raise UsageError(
                    f"output = {str(folder)!r}: rank 0 of the learner does not see this folder; "
                    "choose one that all machines share, with --set output=FOLDER."
                )

    def _all(self, method: str, given: list[tuple[Any, ...]]) -> Any:
        """Call a method of all ranks; the result of rank 0."""
        calls = [
            getattr(actor, method).remote(*each)
            for actor, each in zip(self.ranks, given, strict=True)
        ]
        return self._awaited(given[0][0] if method == "call" else method, calls)

    def _awaited(self, method: str, calls: list[Any]) -> Any:
        """The result of rank 0, once all ranks are done. After an error the ranks are out of sync,
        so they are stopped, and every later call fails.

        Raises:
            RankLost: a rank died, or shows no sign of life.
        """
        if self.broken:
            raise RunError(self.broken)
        ray, waiting, asked = self.cluster.ray, dict(enumerate(calls)), {}
        found: Any = None
        try:
            while waiting:
                done, _ = ray.wait(list(waiting.values()), num_returns=1, timeout=LOOK_S)
                for rank in [rank for rank, call in waiting.items() if call in done]:
                    result = self._result(rank, waiting.pop(rank))
                    found = result if rank == 0 else found
                if not done:
                    self._check_alive({rank: self.ranks[rank] for rank in waiting}, asked)
            return found
        except BaseException as error:
            # A rank whose peer has died may say so before Ray does.
            lost = error.ranks if isinstance(error, _Silent) else self._silent_now()
            self._end(method, lost, error)
            if not lost or not isinstance(error, Exception):
                raise
            raise RankLost(self.broken) from error

    def _result(self, rank: int, call: Any) -> Any:
        """The result of one rank.

        Raises:
            UsageError: what the rank needs is missing on its machine; the message names the rank.
        """
        try:
            return self.cluster.get(call)
        except UsageError as error:
            raise UsageError(f"rank {rank}: {error}") from error

    def _check_alive(self, actors: Mapping[int, Any], asked: dict[int, Any]) -> None:
        if lost := self.cluster.silent(actors, asked):
            raise _Silent(lost)

    def _silent_now(self) -> list[int]:
        """Ranks that are dead, or do not answer within some seconds."""
        ray = self.cluster.ray
        calls = {self.cluster.asked(actor): rank for rank, actor in enumerate(self.ranks)}
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)
        lost = [calls[call] for call in late]
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                lost.append(calls[call])
        return sorted(lost)

    def _end(self, method: str, lost: list[int], error: BaseException) -> None:
        names = ", ".join(map(str, lost))
        said = f"lost rank {names}" if lost else f"ended ({first_line(error)})"
        self.broken = f"the learner {said} in {method!r}; continue with --resume."
        for actor in self.ranks:
            self.cluster.ray.kill(actor)

    def ask(self, name: str, given: Mapping[str, Any] | None = None, /, **local: Any) -> Any:
        """As `Member.perform`, on all ranks; `local` arguments go to rank 0 alone."""
        own = dict(given or {})
        first = packed({**own, **local})
        others = packed({**own, **dict.fromkeys(local, {})}) if local else first
        every = [(name, first), *[(name, others)] * (len(self.ranks) - 1)]
        return unpacked(self._all("call", every))

    def ship(self) -> tuple[int, Any]:
        """The version of the policy's weights, and where in the object store they are."""
        calls = [actor.ship.options(num_returns=2).remote() for actor in self.ranks]
        version = self._awaited("ship", [version for version, _ in calls])
        return version, calls[0][1]

    def make_second(
        self, name: str, weights: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
        """Make the second learner on all ranks.

        Args:
            weights: of its model.
            settings: as for `second_learner`.
        """
        given = [self.cluster.ray.put(dict(weights)), *[None] * (len(self.ranks) - 1)]
        self._all("make_second", [(name, each, dict(settings)) for each in given])


class _Silent(Exception):
    """Ranks that died, or show no sign of life."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"no sign of life from rank {', '.join(map(str, ranks))}")
        self.ranks = ranks
