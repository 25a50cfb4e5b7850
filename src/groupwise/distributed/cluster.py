"""A run on a Ray cluster: the driver runs the loop and holds no weights, ranks learn, replicas
sample.

Ray places processes, transfers objects and reports which have died; ranks compute with
`torch.distributed`. Actors do not restart automatically, because a restarted one would have old
weights. A lost replica is replaced and receives its requests again; the completions are the same
because their random streams are named. A lost rank ends the group, and the run continues from its
last checkpoint.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.binding import POLICY
from groupwise.config import Config
from groupwise.config.connect import Connected
from groupwise.distributed.asked import AskedLearner
from groupwise.distributed.connection import Cluster
from groupwise.distributed.learner_group import LearnerGroup
from groupwise.distributed.lost import RankLost
from groupwise.distributed.memory import ProcessMemory
from groupwise.distributed.replicas import ClusterEngine, Stored
from groupwise.distributed.scorers import ScorerProcesses
from groupwise.models import Policy
from groupwise.rewards.scoring.pool import Setups


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
        learner = cluster_learner(group, POLICY)
        engine = ClusterEngine(cluster, stored(group))
        engine.spans.memory = ProcessMemory(cluster, partial(_models, group, engine))
    except BaseException as error:
        lost = isinstance(error, cluster.ray.exceptions.RayActorError)
        cluster.close()
        if lost:
            raise RankLost("a process was lost while the run started.") from error
        raise
    policy.model.to("meta")
    start = partial(cluster_workers, cluster) if cluster.settings.scorers else None
    name = algorithm.second_learner

    def second(config: Config, model: Policy, **settings: Any) -> AskedLearner:
        assert name is not None, "the algorithm has no second learner"
        weights = {name: p.detach().cpu() for name, p in model.model.named_parameters()}
        group.make_second(name, weights, settings)
        model.model.to("meta")
        return cluster_learner(group, name)

    return Connected(
        policy=policy, engine=engine, learner=learner, second=second, start_workers=start
    )


def _models(group: LearnerGroup, engine: ClusterEngine) -> dict[str, Any]:
    """The processes that hold a model, by name."""
    ranks = {f"rank {rank}": actor for rank, actor in enumerate(group.ranks)}
    return ranks | {f"replica {place}": actor for place, actor in enumerate(engine.replicas)}


def cluster_workers(
    cluster: Cluster, setups: Setups, count: int
) -> dict[int | None, ScorerProcesses]:
    """The workers of a run's rewards: each scorer process has all kinds of them."""
    return dict.fromkeys(setups, ScorerProcesses(cluster, setups, count)) if setups else {}


def cluster_learner(group: LearnerGroup, name: str) -> AskedLearner:
    """A learner whose ranks are actors."""
    return AskedLearner(name, ask=group.ask, publish=partial(stored, group))


def stored(group: LearnerGroup) -> Stored:
    """The policy's weights, which stay in the object store of the cluster."""
    return Stored(*group.ship())
