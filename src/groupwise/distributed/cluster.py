"""A run on a Ray cluster: the driver runs the loop and holds no weights, ranks learn, replicas
sample.

Ray places processes, transfers objects and reports which have died; ranks compute with
`torch.distributed`. Actors do not restart automatically, because a restarted one would have old
weights. A lost replica is replaced and receives its requests again; the completions are the same
because their random streams are named. A lost rank ends the group, and the run continues from its
last checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.config import Config
from groupwise.config.connect import Connected
from groupwise.distributed.actors import LearnerRank
from groupwise.distributed.connection import LIFE, Cluster
from groupwise.distributed.lost import RankLost
from groupwise.distributed.objectives import named
from groupwise.distributed.replicas import ClusterEngine, Stored
from groupwise.distributed.scorers import ScorerProcesses
from groupwise.errors import RunError, UsageError, first_line
from groupwise.models import Policy
from groupwise.rewards.scoring.pool import Setups
from groupwise.types import Batch, Objective, Update, WeightsRef

LOOK_S = 2.0
"""Seconds between checks that the processes waited for are alive."""
ANSWER_S = 5.0
"""Seconds within which a live process must answer."""


def connect_cluster(config: Config, algorithm: BoundAlgorithm, *, policy: Policy) -> Connected:
    """Start ranks and replicas, and give them the policy's weights; the driver drops its own.

    Raises:
        UsageError: no cluster at the address, too few resources, other versions on a node, or a
            run directory that is not shared.
        RankLost: a process was killed before all of them were ready.
    """
    cluster = Cluster(config)
    try:
        weights = {name: p.detach().cpu() for name, p in policy.model.named_parameters()}
        learner = ClusterLearner(cluster, weights)
        engine = ClusterEngine(cluster, Stored(learner.version, learner.shipped))
    except BaseException as error:
        lost = isinstance(error, cluster.ray.exceptions.RayActorError)
        cluster.close()
        if lost:
            raise RankLost("a process was lost while the run started.") from error
        raise
    policy.model.to("meta")
    start = partial(cluster_workers, cluster) if cluster.settings.scorers else None
    return Connected(policy=policy, engine=engine, learner=learner, start_workers=start)


def cluster_workers(
    cluster: Cluster, setups: Setups, count: int
) -> dict[int | None, ScorerProcesses]:
    """The workers of a run's rewards: each scorer process has all kinds of them."""
    return dict.fromkeys(setups, ScorerProcesses(cluster, setups, count)) if setups else {}


class ClusterLearner:
    """A `Learner` whose ranks are actors.

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
        self.version = 0
        cluster.compare({f"rank {rank}": actor for rank, actor in enumerate(self.ranks)})
        self._check_shared()
        driver = cluster.ray.util.get_node_ip_address()
        address = cluster.get(self.ranks[0].address.remote(driver))
        given = [cluster.ray.put(dict(weights)), *[None] * (of.ranks - 1)]
        self._all("start", [(address, each) for each in given])
        self.shipped: Any = None
        self.publish()

    def _check_shared(self) -> None:
        """Whether rank 0, which writes models, has the folder of the run."""
        folder = Path(self.cluster.config.output).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as mark:
            if not self.cluster.get(self.ranks[0].sees.remote(mark.name)):
                raise UsageError(
                    f"output = {str(folder)!r}: rank 0 of the learner does not see this folder; "
                    "take one that all machines share."
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
                    result = self.cluster.get(waiting.pop(rank))
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

    def _check_alive(self, actors: Mapping[int, Any], asked: dict[int, Any]) -> None:
        if lost := self.cluster.silent(actors, asked):
            raise _Silent(lost)

    def _silent_now(self) -> list[int]:
        """Ranks that are dead, or do not answer within some seconds."""
        ray = self.cluster.ray
        calls = {
            actor.alive.options(concurrency_group=LIFE).remote(): rank
            for rank, actor in enumerate(self.ranks)
        }
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
        """Call a method of `Member` on all ranks; `local` arguments go to rank 0 alone."""
        own = dict(given or {})
        first = (name, {**own, **local})
        others = (name, {**own, **dict.fromkeys(local, {})})
        return self._all("call", [first, *[others] * (len(self.ranks) - 1)])

    # -- Learner -------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, names: Collection[str]) -> Mapping[str, Tensor]:
        """As `Learner.evaluate`."""
        return self.ask("evaluate", {"batch": batch, "names": set(names)}) if names else {}

    def update(self, batch: Batch, objective: Objective) -> Update:
        """As `Learner.update`."""
        self.version += 1  # Before the step: one that is interrupted counts as begun.
        update = self.ask("update", {"batch": batch, "objective": named(objective)})
        self.version = update.version
        return update

    def replace_reference(self) -> None:
        """As `TorchLearner.replace_reference`."""
        self.ask("replace_reference")

    def reset_optimizer(self) -> None:
        """As `TorchLearner.reset_optimizer`."""
        self.ask("reset_optimizer")

    def publish(self) -> WeightsRef:
        """As `Learner.publish`: the weights stay in the object store of the cluster."""
        calls = [actor.ship.options(num_returns=2).remote() for actor in self.ranks]
        self.version = self._awaited("ship", [version for version, _ in calls])
        self.shipped = calls[0][1]
        return Stored(self.version, self.shipped)

    def trained(self) -> Mapping[str, Tensor]:
        """As `Learner.trained`."""
        return self.ask("trained")

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """As `Learner.set_trained`."""
        self.ask("set_trained", weights=dict(weights))

    def state(self) -> dict[str, Any]:
        """As `Learner.state`."""
        return self.ask("state")

    def restore(self, state: Mapping[str, Any]) -> None:
        """As `Learner.restore`."""
        self.ask("restore", state=dict(state))
        self.version = int(state["version"])

    def movement(self) -> Callable[[], float]:
        """As `Learner.movement`."""
        self.ask("watch_movement")
        return lambda: self.ask("moved")

    def save(self, path: str) -> None:
        """As `Learner.save`."""
        self.ask("save", {"path": str(Path(path).resolve())})


class _Silent(Exception):
    """Ranks that died, or show no sign of life."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"no sign of life from rank {', '.join(map(str, ranks))}")
        self.ranks = ranks
