"""A cluster that loses a node continues with the replicas left, and says what is missing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster_runs import processes
from groupwise.algorithms import bind
from groupwise.config import Config, load
from groupwise.config.connect import load_configured
from groupwise.distributed import connection
from groupwise.distributed.cluster import connect_cluster
from groupwise.distributed.lost import RankLost
from groupwise.distributed.replicas import ClusterEngine
from groupwise.errors import RunError
from groupwise.training.run import train_config
from groupwise.types import Prompt, Request, Stream
from kills import differing, run_settings, steps_done, undisturbed_run
from small_runs import Quiet, settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray")
PATIENCE = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000}
"""A node counts as lost after five checks that it does not answer."""


class Machines:
    """A cluster of a first node and others, with so many CPUs each."""

    def __init__(self, first: int, *others: int) -> None:
        from ray.cluster_utils import Cluster as Nodes

        os.environ.setdefault("RAY_worker_niceness", "0")
        given = {"num_cpus": first, "_system_config": PATIENCE}
        self.nodes = Nodes(initialize_head=True, head_node_args=given)
        self.others = [self.nodes.add_node(num_cpus=each) for each in others]
        self.second = self.others[0]
        self.connection: Any = None

    def node_of(self, title: str) -> Any:
        """The node, not the first, that has a process with this title."""
        for node in self.others:
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            if any(title in " ".join(each.cmdline()) for each in raylet.children()):
                return node
        raise LookupError(title)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the second node."""
        raylet = psutil.Process(self.second.all_processes["raylet"][0].process.pid)
        for each in [raylet, *raylet.children(recursive=True)]:
            each.send_signal(number)


@pytest.fixture
def machines() -> Iterator[Callable[..., Machines]]:
    """Makes a cluster."""
    started: list[Machines] = []

    def make(*cpus: int) -> Machines:
        started.append(Machines(*cpus))
        return started[-1]

    yield make
    ray.shutdown()
    for each in started:
        each.nodes.shutdown()


def config_of(folder: Path, machines: Machines, *more: str) -> Config:
    given = [f"cluster.address={machines.nodes.address}", "sampling.max_tokens=16", *more]
    return load("word-problems-ray", settings(folder, *given))


def connected(config: Config, machines: Machines) -> ClusterEngine:
    """The engine. The ranks, which nobody else refers to here, have to keep their room."""
    policy = load_configured(config)
    machines.connection = connect_cluster(config, bind(config.algorithm.name), policy=policy)
    engine = machines.connection.engine
    assert isinstance(engine, ClusterEngine)
    return engine


class Writing:
    """Requests to an engine, for as long as the test wants."""

    def __init__(self, engine: ClusterEngine, config: Config) -> None:
        self.engine, self.config, self.over = engine, config, False
        self.asked = self.written = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _requests(self) -> Iterator[Request | None]:
        while not self.over:
            self.asked += 1
            prompt = Prompt(id=str(self.asked), text="?")
            yield Request(prompt=prompt, tokens=[1, 2, 3], group=4, stream=Stream(0, self.asked))

    def _work(self) -> None:
        try:
            for _ in self.engine.generate(self._requests(), self.config.sampling):
                self.written += 1
        except BaseException as error:
            self.error = error

    def until(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.error is None and time.monotonic() < end
            time.sleep(0.1)

    def more(self) -> None:
        """Wait for groups that were asked for from now on."""
        asked = self.asked
        self.until(lambda: self.written > asked)

    def finish(self) -> None:
        self.over = True
        self.thread.join(120)
        assert self.error is None and self.written == self.asked


def test_a_lost_node_leaves_the_run_with_fewer_replicas_until_another_comes(
    tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    own = machines(3, 1)
    config = config_of(tmp_path, own, "cluster.rank_cpus=2")
    engine = connected(config, own)
    with pytest.warns(UserWarning, match="lost, and the cluster has no room for another") as said:
        writing = Writing(engine, config)
        writing.until(lambda: writing.written > 20)
        own.nodes.remove_node(own.second, allow_graceful=False)
        writing.until(lambda: engine.starting.said)
        (place,) = engine.starting.calls
        writing.more()
    assert "1 CPU, 0 GPU" in str(said[0].message)
    assert "The run continues with 1 of 2 replicas" in str(said[0].message)
    own.nodes.add_node(num_cpus=1)
    writing.until(lambda: not engine.starting.calls)
    writing.until(lambda: engine.holds[place] is not None)  # It has been given weights to sample.
    writing.finish()
    engine.close()


def test_a_run_without_any_replica_ends_and_says_what_is_missing(
    tmp_path: Path, machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = machines(2, 1)
    config = config_of(tmp_path, own, "cluster.rank_cpus=2", "cluster.replicas=1")
    engine = connected(config, own)
    monkeypatch.setattr(connection, "ROOM_S", 5.0)
    writing = Writing(engine, config)
    writing.until(lambda: writing.written > 5)
    own.nodes.remove_node(own.second, allow_graceful=False)
    writing.thread.join(60)
    engine.close()
    assert isinstance(writing.error, RunError)
    said = str(writing.error)
    assert "replica 0: lost, and the cluster has no room for another (1 CPU, 0 GPU; " in said
    assert "no replica is left" in said and "--resume" in said


def test_weights_that_are_lost_with_the_rank_and_every_replica_end_the_attempt(
    tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    """Another node has room for a replica, but nobody has weights for it: the run has to continue
    from its checkpoint, as after the loss of a rank."""
    own = machines(0, 2, 2)
    config = config_of(tmp_path, own, "cluster.replicas=1")
    engine = connected(config, own)
    writing = Writing(engine, config)
    writing.until(lambda: writing.written > 5)
    own.nodes.remove_node(own.node_of("ray::LearnerRank"), allow_graceful=False)
    writing.thread.join(90)
    engine.close()
    assert isinstance(writing.error, RankLost), writing.error
    assert str(writing.error) == "lost the weights with the node of rank 0."


def test_a_node_that_is_cut_off_and_comes_back_loses_no_completion(
    tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    """Shorter than the cluster waits for a node."""
    own = machines(3, 1)
    config = config_of(tmp_path, own, "cluster.rank_cpus=2")
    engine = connected(config, own)
    before = list(engine.replicas)
    writing = Writing(engine, config)
    writing.until(lambda: writing.written > 20)
    own.signal(signal.SIGSTOP)
    writing.more()
    time.sleep(1.0)
    own.signal(signal.SIGCONT)
    writing.more()
    writing.finish()
    assert engine.replicas == before
    engine.close()


def test_a_node_that_is_cut_off_for_good_counts_as_lost(
    tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    own = machines(3, 1)
    config = config_of(tmp_path, own, "cluster.rank_cpus=2")
    engine = connected(config, own)
    with pytest.warns(UserWarning, match="The run continues with 1 of 2 replicas"):
        writing = Writing(engine, config)
        writing.until(lambda: writing.written > 20)
        own.signal(signal.SIGSTOP)
        writing.until(lambda: engine.starting.said)
        writing.finish()
    own.signal(signal.SIGKILL)
    engine.close()


def test_a_replica_that_stands_still_is_replaced(
    tmp_path: Path, machines: Callable[..., Machines]
) -> None:
    own = machines(3, 1)
    config = config_of(tmp_path, own, "cluster.rank_cpus=2")
    engine = connected(config, own)
    limited = config.distributed.model_copy(update={"timeout_minutes": 0.2})
    before = list(engine.replicas)
    writing = Writing(engine, config)
    writing.until(lambda: writing.written > 20)
    there = processes(os.getpid(), "ray::Replica")
    node = psutil.Process(own.second.all_processes["raylet"][0].process.pid)
    (stopped,) = [each for each in there if node in each.parents()]
    stopped.suspend()
    engine.cluster.config = config.model_copy(update={"distributed": limited})
    writing.until(lambda: engine.replicas != before)
    engine.cluster.config = config
    writing.until(lambda: not engine.starting.calls)
    writing.finish()
    engine.close()


def test_a_run_whose_rank_is_lost_with_its_node_continues_with_fewer_replicas(
    tmp_path: Path, machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the weights of the run in one process."""
    own = machines(0, 2, 2)
    monkeypatch.setattr(connection, "ROOM_S", 10.0)
    folder = tmp_path / "run"
    given = run_settings(folder, f"cluster.address={own.nodes.address}", "cluster.replicas=3")
    progress, lost = Quiet(), list[Any]()

    def lose() -> None:
        while steps_done(folder) < 2:
            time.sleep(0.1)
        lost.append(own.node_of("ray::LearnerRank"))
        own.nodes.remove_node(lost[0], allow_graceful=False)

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    with pytest.warns(UserWarning, match="Trying with 1 of 3 replicas"):
        train_config(load("word-problems-ray", given), progress=progress)
    thread.join()
    assert len(lost) == 1 and any("lost rank 0" in line for line in progress.said)
    assert differing(undisturbed_run(tmp_path / "alone"), folder) == []
