"""A run on a Ray cluster: the driver runs the loop and holds no weights, ranks learn, replicas
sample.

Ray places processes, carries objects and tells who has died; ranks compute with
`torch.distributed`. No actor restarts itself: one that came back by itself would have old weights.
A lost replica is replaced and given its requests again, which have the same completions because
their random streams have names. A lost rank ends the group, and the run continues from its last
checkpoint.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.config import Config
from groupwise.config.connect import Connected
from groupwise.distributed import surroundings
from groupwise.distributed.actors import LearnerRank, Replica
from groupwise.distributed.lost import RankLost
from groupwise.distributed.objectives import named
from groupwise.errors import GroupwiseError, RunError, UsageError, first_line
from groupwise.models import Policy
from groupwise.types import (
    Batch,
    Group,
    Limits,
    Metrics,
    Objective,
    Request,
    Sampling,
    Update,
    WeightsRef,
)

STORE_MB = 256
"""Shared memory of a cluster that is started here."""
PAUSE_S = 0.01
REPLACEMENTS = 10
"""Replicas that may be lost one after the other before a rollout is given up."""


def connect_cluster(config: Config, algorithm: BoundAlgorithm, *, policy: Policy) -> Connected:
    """Start ranks and replicas, and give them the policy's weights; the driver drops its own.

    Raises:
        UsageError: no cluster at the address, too few resources, other versions on a node, or a
            run directory that is not shared.
    """
    cluster = Cluster(config)
    weights = {name: p.detach().cpu() for name, p in policy.model.named_parameters()}
    learner = ClusterLearner(cluster, weights)
    engine = ClusterEngine(cluster, learner)
    policy.model.to("meta")
    return Connected(policy=policy, engine=engine, learner=learner)


class Cluster:
    """The connection to Ray.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        assert config.cluster is not None
        self.settings, self.config = config.cluster, config
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise UsageError("[cluster]: needs Ray; pip install 'groupwise[ray]'.") from error
        self.ray: Any = ray
        needs = self._needs()
        given: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.settings.address is None:
            given |= {
                "num_cpus": needs["CPU"],
                "include_dashboard": False,
                "object_store_memory": STORE_MB << 20,
            }
        else:
            given |= {"address": self.settings.address}
        try:
            ray.init(**given)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"cluster.address = {self.settings.address!r}: no Ray cluster answers there "
                f"({first_line(error)}); start one by `ray start --head`, or leave the address out."
            ) from error
        there = ray.cluster_resources()
        lacking = [
            f"{name}: {there.get(name, 0):g} of {wanted:g}"
            for name, wanted in needs.items()
            if there.get(name, 0) < wanted
        ]
        if lacking:
            ray.shutdown()
            raise UsageError(
                f"[cluster]: the cluster has too little ({'; '.join(lacking)}); lower "
                "cluster.ranks or cluster.replicas, or add nodes."
            )

    def _needs(self) -> dict[str, float]:
        """CPUs and GPUs of all processes."""
        of = self.settings
        needs = {
            "CPU": of.ranks * of.rank_cpus + of.replicas * of.replica_cpus,
            "GPU": of.ranks * of.rank_gpus + of.replicas * of.replica_gpus,
        }
        return {name: amount for name, amount in needs.items() if amount}

    def actor(self, kind: type, *given: Any, cpus: int, gpus: float) -> Any:
        """A process of its own that holds an object; it ends with the driver."""
        made = self.ray.remote(kind).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0
        )
        return made.remote(self.config.to_json(), *given)

    def get(self, refs: Any) -> Any:
        """Results, or the error of the library itself where one was raised."""
        try:
            return self.ray.get(refs)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, GroupwiseError):
                raise cause from error
            raise RunError(f"{type(cause).__name__}: {str(cause)[:300]}") from error

    def compare(self, actors: Mapping[str, Any]) -> None:
        """Refuse processes with other packages than the driver's."""
        found = self.get([actor.surroundings.remote() for actor in actors.values()])
        others = dict(zip(actors, found, strict=True))
        surroundings.compare(surroundings.surroundings(), others, here="the driver")

    def close(self) -> None:
        """End all processes that were started here."""
        self.ray.shutdown()


class ClusterLearner:
    """A `Learner` whose ranks are actors.

    Args:
        weights: of the policy as the run begins.
    """

    def __init__(self, cluster: Cluster, weights: Mapping[str, Tensor]) -> None:
        self.cluster = cluster
        of = cluster.settings
        self.ranks = [
            cluster.actor(LearnerRank, rank, of.ranks, cpus=of.rank_cpus, gpus=of.rank_gpus)
            for rank in range(of.ranks)
        ]
        self.version = 0
        cluster.compare({f"rank {rank}": actor for rank, actor in enumerate(self.ranks)})
        self._check_shared()
        address = cluster.get(self.ranks[0].address.remote())
        given = [cluster.ray.put(dict(weights)), *[None] * (of.ranks - 1)]
        self._all("start", [(address, each) for each in given])
        self.shipped: Any = None
        self.publish()

    def _check_shared(self) -> None:
        folder = Path(self.cluster.config.output).resolve()
        if folder.exists() and not self.cluster.get(self.ranks[0].sees.remote(str(folder))):
            raise UsageError(
                f"output = {str(folder)!r}: rank 0 of the learner does not see this folder; take "
                "one that all machines share."
            )

    def _all(self, method: str, given: list[tuple[Any, ...]]) -> Any:
        """Call a method of all ranks; the result of rank 0."""
        ray = self.cluster.ray
        refs = [
            getattr(actor, method).remote(*each)
            for actor, each in zip(self.ranks, given, strict=True)
        ]
        waiting = list(refs)
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                self.cluster.get(done[0])
            return self.cluster.get(refs[0])
        except ray.exceptions.RayActorError as error:
            raise self._lost(refs, method) from error
        except RunError as error:
            raise self._lost(refs, method, said=str(error)) from error

    def _lost(self, refs: list[Any], method: str, said: str = "") -> RunError:
        """The error that names the ranks that have died, and the end of the others: they may wait
        for the dead one. An error of a rank that is alive is left as it is."""
        ray, dead = self.cluster.ray, []
        for rank, actor in enumerate(self.ranks):
            try:
                ray.get(actor.surroundings.remote(), timeout=2)
            except ray.exceptions.RayActorError:
                dead.append(rank)
            except ray.exceptions.GetTimeoutError:
                pass
        if not dead:
            return RunError(said)
        for actor in self.ranks:
            ray.kill(actor)
        names = ", ".join(map(str, dead))
        return RankLost(f"the learner lost rank {names} in {method!r}; continue with --resume.")

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
        ranks = self.ranks
        self.shipped = ranks[0].ship.remote()
        others = [actor.ship.remote() for actor in ranks[1:]]
        self.cluster.ray.wait([self.shipped, *others], num_returns=len(ranks))
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


class Stored:
    """Published weights in the object store; replicas read them, the driver does not."""

    def __init__(self, version: int, ref: Any) -> None:
        self.version, self.ref = version, ref
        self.manifest: Mapping[str, Any] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """None are here."""
        return iter(())

    def digest(self, name: str) -> int:
        """None are here."""
        raise KeyError(name)


class ClusterEngine:
    """An `Engine` that gives requests to replicas and replaces those that die.

    Args:
        learner: whose weights the replicas begin with.
    """

    def __init__(self, cluster: Cluster, learner: ClusterLearner) -> None:
        self.cluster = cluster
        self.current = Stored(learner.version, learner.shipped)
        self.replicas = [self._new() for _ in range(cluster.settings.replicas)]
        cluster.compare({f"replica {i}": actor for i, actor in enumerate(self.replicas)})
        self._renew(self.replicas)
        self.exact_continuation = bool(cluster.get(self.replicas[0].exact_continuation.remote()))
        slots = max(1, cluster.config.engine.max_rows // cluster.config.group_size)
        self.chunk = slots

    def _new(self) -> Any:
        of = self.cluster.settings
        return self.cluster.actor(Replica, cpus=of.replica_cpus, gpus=of.replica_gpus)

    def _renew(self, replicas: list[Any]) -> Metrics:
        """Give replicas the current weights; each checks what arrives."""
        current = self.current
        refs = [actor.publish.remote(current.ref, current.version) for actor in replicas]
        return self.cluster.get(refs)[0]

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        limits: Limits | None = None,
    ) -> Iterator[Group]:
        """Yield groups as replicas finish them."""
        source, over = iter(requests), False
        waiting: deque[Request] = deque()
        running: dict[Any, tuple[int, list[Request]]] = {}
        lost = 0
        while not over or waiting or running:
            while not over and len(waiting) < self.chunk * len(self.replicas):
                try:
                    request = next(source)
                except StopIteration:
                    over = True
                    break
                if request is None:
                    break
                waiting.append(request)
            idle = set(range(len(self.replicas))) - {place for place, _ in running.values()}
            share = max(1, min(self.chunk, -(-len(waiting) // max(1, len(self.replicas)))))
            for place in sorted(idle):
                if waiting:
                    given = [waiting.popleft() for _ in range(min(share, len(waiting)))]
                    ref = self.replicas[place].generate.remote(given, sampling)
                    running[ref] = place, given
            if not running:
                time.sleep(PAUSE_S)
                continue
            done, _ = self.cluster.ray.wait(list(running), num_returns=1, timeout=1.0)
            for ref in done:
                place, given = running.pop(ref)
                try:
                    yield from self.cluster.get(ref)
                except self.cluster.ray.exceptions.RayActorError as error:
                    lost += 1
                    if lost > REPLACEMENTS:
                        raise RunError(
                            f"replica {place}: {lost} replicas were lost in one rollout."
                        ) from error
                    self._replace(place)
                    waiting.extendleft(reversed(given))

    def _replace(self, place: int) -> None:
        """A new replica for a lost one, with the weights of the others."""
        self.replicas[place] = self._new()
        self._renew([self.replicas[place]])

    def publish(self, weights: WeightsRef) -> Metrics:
        """Have every replica sample from new weights; one that was lost meanwhile is replaced.

        Raises:
            RunError: what arrived is not what was sent.
        """
        assert isinstance(weights, Stored)
        self.current, start = weights, time.perf_counter()
        for place, actor in enumerate(self.replicas):
            try:
                self._renew([actor])
            except self.cluster.ray.exceptions.RayActorError:
                self._replace(place)
        return {"seconds.weights": time.perf_counter() - start}

    def close(self) -> None:
        """End ranks, replicas, and a cluster that was started here."""
        self.cluster.close()
