"""A cluster that cannot run what is asked for says so, and what it has is found before a run."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster_runs import processes
from groupwise.algorithms import bind
from groupwise.algorithms.binding import POLICY
from groupwise.config import Config, load
from groupwise.config.connect import load_configured
from groupwise.distributed import connection
from groupwise.distributed.asked import AskedLearner
from groupwise.distributed.cluster import cluster_learner, connect_cluster
from groupwise.distributed.connection import Cluster
from groupwise.distributed.learner_group import LearnerGroup
from groupwise.distributed.lost import RankLost
from groupwise.distributed.probe import probe
from groupwise.distributed.replicas import ClusterEngine, Starting
from groupwise.errors import RunError, UsageError
from groupwise.training.run import train_config
from small_runs import Quiet, settings

pytestmark = pytest.mark.cluster
ray = pytest.importorskip("ray")


@pytest.fixture
def three_nodes() -> Iterator[str]:
    """The address of a cluster of three nodes with a CPU each."""
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    try:
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()


def config_of(folder: Path, *more: str) -> Config:
    return load("word-problems-ray", settings(folder, "cluster.replicas=1", *more))


def test_nodes_that_are_too_small_are_listed(
    tmp_path: Path, three_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ROOM_S", 3.0)
    config = config_of(tmp_path, f"cluster.address={three_nodes}", "cluster.rank_cpus=2")
    with pytest.raises(UsageError, match="found no room for 2 processes of 2 CPU.* has 1 CPU"):
        Cluster(config)


def test_a_cluster_that_is_started_here_has_room_for_large_weights(tmp_path: Path) -> None:
    """Ray writes to the disk what does not fit, with every update."""
    if shutil.disk_usage("/dev/shm").total < 1 << 30:
        pytest.skip("shared memory is small here")
    cluster = Cluster(config_of(tmp_path))
    try:
        room = cluster.ray.cluster_resources()["object_store_memory"]
        assert room > min(shutil.disk_usage("/dev/shm").free, psutil.virtual_memory().total) / 5
    finally:
        cluster.close()


def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    class Broken:
        def __init__(self, *given: Any) -> None:
            raise ValueError("the disk is missing")

        def surroundings(self) -> dict[str, str]:
            return {}

    cluster = Cluster(config_of(tmp_path))
    try:
        actor = cluster.actor(Broken, cpus=1, gpus=0)
        with pytest.raises(RunError, match="^rank 0: did not start: .*the disk is missing"):
            cluster.compare({"rank 0": actor})
    finally:
        cluster.close()


def test_a_process_that_does_not_become_ready_is_named(tmp_path: Path) -> None:
    """At the start, and in the place of a lost replica."""

    class Late:
        def __init__(self, *given: Any) -> None:
            time.sleep(60)

        def surroundings(self) -> dict[str, str]:
            return {}

        def alive(self) -> None:
            """Never answered."""

    cluster = Cluster(config_of(tmp_path, "distributed.timeout_minutes=0.05"))
    try:
        late = [cluster.actor(Late, cpus=1, gpus=0) for _ in range(2)]
        with pytest.raises(RunError, match="^rank 0: did not respond within 3 s"):
            cluster.compare({"rank 0": late[0]})
        starting = Starting(cluster, 2)
        starting.add(1, late[1])
        end = time.monotonic() + 30
        with pytest.raises(RunError, match="^replica 1: lost, and another did not start within 3"):
            while time.monotonic() < end:
                starting.started()
                time.sleep(0.1)
    finally:
        cluster.close()


@pytest.mark.parametrize(("kind", "name"), [("LearnerRank", "rank 0"), ("Replica", "replica 0")])
def test_a_process_that_stands_still_while_the_run_starts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """Stopped as soon as its packages have been compared, or it has taken over its weights."""

    def stop(*given: Any) -> None:
        for each in processes(os.getpid(), f"ray::{kind}"):
            each.suspend()

    def after(owner: type, method: str) -> None:
        own = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *given: (own(*given), stop())[0])

    config = config_of(tmp_path / "run", "distributed.timeout_minutes=0.3")
    after(*((Cluster, "compare") if kind == "LearnerRank" else (ClusterEngine, "_await")))
    with pytest.raises(RunError, match=f"^{name}: did not respond within 18 s"):
        connect_cluster(config, bind(config.algorithm.name), policy=load_configured(config))


def test_a_run_starts_again_where_a_process_was_lost_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the process itself starts, and while others do."""

    class Killed:
        def __init__(self, *given: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def surroundings(self) -> dict[str, str]:
            return {}

    cluster = Cluster(config_of(tmp_path))
    try:
        actor = cluster.actor(Killed, cpus=1, gpus=0)
        with pytest.raises(RankLost, match="^replica 0 was lost while it started"):
            cluster.compare({"replica 0": actor})
    finally:
        cluster.close()
    check, often = LearnerGroup._check_shared, []

    def killed_once(group: LearnerGroup) -> None:
        check(group)
        if not often:
            often.append(1)
            ray.kill(group.ranks[0])

    monkeypatch.setattr(LearnerGroup, "_check_shared", killed_once)
    progress = Quiet()
    train_config(config_of(tmp_path / "run", "steps=1"), progress=progress)
    assert "rank 0 was lost while it started. Starting again." in progress.said
    assert (tmp_path / "run" / "final").exists()


def test_a_probe_stands_where_each_process_will_be(tmp_path: Path) -> None:
    found = probe(config_of(tmp_path / "run"))
    assert found.offsets.keys() == found.bandwidths.keys() == {"rank 0", "replica 0"}
    assert found.blind == ()
    assert len(found.nodes) == 1
    assert max(map(abs, found.offsets.values())) < 1.0
    assert min(found.bandwidths.values()) > 0


def started(cluster: Cluster) -> tuple[LearnerGroup, AskedLearner]:
    policy = load_configured(cluster.config)
    group = LearnerGroup(cluster, dict(policy.model.named_parameters()))
    return group, cluster_learner(group, POLICY)


def test_a_lost_rank_is_named_wherever_it_is_lost(tmp_path: Path) -> None:
    """While nothing runs, before weights are sent; stopped; and after an error of its own, which
    leaves a group that nothing more is asked of."""
    patient = config_of(tmp_path, "cluster.ranks=2")
    cluster = Cluster(patient)
    try:
        group, learner = started(cluster)
        ray.kill(group.ranks[1])
        with pytest.raises(RankLost, match="lost rank 1 in 'ship'"):
            learner.publish()
        group, learner = started(cluster)
        cluster.config = config_of(tmp_path, "cluster.ranks=2", "distributed.timeout_minutes=0.1")
        children = psutil.Process().children(recursive=True)
        os.kill(
            next(p.pid for p in children if "ray::LearnerRank" in " ".join(p.cmdline())),
            signal.SIGSTOP,
        )
        with pytest.raises(RankLost, match="lost rank [01] in 'trained'"):
            learner.trained()
        cluster.config = patient
        group, learner = started(cluster)
        with pytest.raises(RunError, match="no_such_method"):
            group.ask("no_such_method", {"of": POLICY})
        with pytest.raises(RunError, match="the learner ended .* in 'no_such_method'"):
            learner.state()
    finally:
        cluster.close()
