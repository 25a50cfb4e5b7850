"""A run on a Ray cluster: the driver runs the loop and holds no weights, ranks learn, replicas
sample.

Ray places processes, transfers objects and reports which have died; ranks compute with
`torch.distributed`. Actors do not restart automatically, because a restarted one would have old
weights. A lost replica is replaced and receives its requests again; the completions are the same
because their random streams are named. A lost rank ends the group, and the run continues from its
last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.binding import POLICY
from groupwise.config import Config
from groupwise.config.connect import Connected
from groupwise.distributed.connection import Cluster
from groupwise.distributed.learner_group import LearnerGroup
from groupwise.distributed.lost import RankLost
from groupwise.distributed.objectives import named
from groupwise.distributed.replicas import ClusterEngine, Stored
from groupwise.distributed.scorers import ScorerProcesses
from groupwise.models import Policy
from groupwise.rewards.scoring.pool import Setups
from groupwise.settings import OptimizerSettings
from groupwise.types import Batch, Objective, Update


def connect_cluster(
    config: Config, algorithm: BoundAlgorithm, *, policy: Policy, fewer: bool = False
) -> Connected:
    """Start ranks and replicas, and give them the policy's weights; the driver drops its own.

    Args:
        fewer: as for `Cluster`.

    Raises:
        UsageError: no cluster at the address, too few resources, other versions on a node, or a
            run directory that is not shared.
        RankLost: a process was killed before all of them were ready.
    """
    cluster = Cluster(config, fewer=fewer)
    try:
        weights = {name: p.detach().cpu() for name, p in policy.model.named_parameters()}
        group = LearnerGroup(cluster, weights)
        learner = ClusterLearner(group, POLICY)
        engine = ClusterEngine(cluster, learner.publish())
    except BaseException as error:
        lost = isinstance(error, cluster.ray.exceptions.RayActorError)
        cluster.close()
        if lost:
            raise RankLost("a process was lost while the run started.") from error
        raise
    policy.model.to("meta")
    start = partial(cluster_workers, cluster) if cluster.settings.scorers else None
    name = algorithm.second_learner

    def second(config: Config, model: Policy, **settings: Any) -> ClusterLearner:
        assert name is not None, "the algorithm has no second learner"
        weights = {name: p.detach().cpu() for name, p in model.model.named_parameters()}
        group.make_second(name, weights, settings)
        model.model.to("meta")
        return ClusterLearner(group, name)

    return Connected(
        policy=policy, engine=engine, learner=learner, second=second, start_workers=start
    )


def cluster_workers(
    cluster: Cluster, setups: Setups, count: int
) -> dict[int | None, ScorerProcesses]:
    """The workers of a run's rewards: each scorer process has all kinds of them."""
    return dict.fromkeys(setups, ScorerProcesses(cluster, setups, count)) if setups else {}


class ClusterLearner:
    """A `Learner` whose ranks are actors.

    Args:
        group: the ranks.
        name: of the learner among those that they train.
    """

    def __init__(self, group: LearnerGroup, name: str) -> None:
        self.group, self.name = group, name
        self.version = 0

    def evaluate(self, batch: Batch, names: Collection[str]) -> Mapping[str, Tensor]:
        """As `Learner.evaluate`."""
        return self._ask("evaluate", {"batch": batch, "names": set(names)}) if names else {}

    def update(self, batch: Batch, objective: Objective) -> Update:
        """As `Learner.update`."""
        self.version += 1  # Before the step: one that is interrupted counts as begun.
        update = self._ask("update", {"batch": batch, "objective": named(objective)})
        self.version = update.version
        return update

    def restart(self, optimizer: OptimizerSettings, *, total_steps: int) -> None:
        """As `TorchLearner.restart`."""
        self._ask("restart", {"optimizer": optimizer, "total_steps": total_steps})
        self.version = 0

    def replace_reference(self) -> None:
        """As `TorchLearner.replace_reference`."""
        self._ask("replace_reference")

    def reset_optimizer(self) -> None:
        """As `TorchLearner.reset_optimizer`."""
        self._ask("reset_optimizer")

    def publish(self) -> Stored:
        """As `Learner.publish`: the weights stay in the object store of the cluster, and engines
        sample from the policy alone."""
        assert self.name == POLICY, f"{self.name!r} is not what engines sample from"
        self.version, shipped = self.group.ship()
        return Stored(self.version, shipped)

    def trained(self) -> Mapping[str, Tensor]:
        """As `Learner.trained`."""
        return self._ask("trained")

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """As `Learner.set_trained`."""
        self._ask("set_trained", weights=dict(weights))

    def state(self) -> dict[str, Any]:
        """As `Learner.state`."""
        return self._ask("state")

    def restore(self, state: Mapping[str, Any]) -> None:
        """As `Learner.restore`."""
        self._ask("restore", state=dict(state))
        self.version = int(state["version"])

    def movement(self) -> Callable[[], float]:
        """As `Learner.movement`."""
        self._ask("watch_movement")
        return lambda: self._ask("moved")

    def save(self, path: str) -> None:
        """As `Learner.save`."""
        self._ask("save", {"path": str(Path(path).resolve())})

    def _ask(self, method: str, given: Mapping[str, Any] | None = None, /, **local: Any) -> Any:
        return self.group.ask(method, {**(given or {}), "of": self.name}, **local)
