"""A node whose network fails, on two machines that are network namespaces: the run on Ray ends with
the weights of one process, and nothing that was cut off stays."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster_runs import train_command
from kills import differing, run_settings, steps_done, undisturbed_run
from namespaces import TwoMachines, emptied

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
pytest.importorskip("ray")


@pytest.fixture
def machines() -> Iterator[Callable[..., TwoMachines]]:
    """Makes a cluster."""
    made: list[TwoMachines] = []

    def make(*cpus: int) -> TwoMachines:
        made.append(TwoMachines(*cpus))
        return made[-1]

    yield make
    for each in made:
        each.remove()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    return undisturbed_run(tmp_path_factory.mktemp("alone") / "run")


class Training:
    """A run on the first machine, which has taken two steps."""

    def __init__(self, own: TwoMachines, folder: Path, *more: str) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        given = run_settings(folder, f"cluster.address={own.address}", *more)
        self.process = own.run(train_command("word-problems-ray", given), self.log)
        self.until(lambda: steps_done(folder) >= 2)

    @property
    def said(self) -> str:
        return " ".join(self.log.read_text().split())  # Lines are broken at the screen's width.

    def until(self, condition: Callable[[], object], *, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.said[-3000:]
            time.sleep(0.05)

    def finish(self) -> None:
        try:
            self.process.wait(240)
        except subprocess.TimeoutExpired:
            self.process.kill()
        assert self.process.returncode == 0, self.said[-3000:]


def test_a_replica_whose_network_fails_for_two_seconds_is_waited_for(
    alone: Path, tmp_path: Path, machines: Callable[..., TwoMachines]
) -> None:
    own = machines(3, 1)
    run = Training(own, tmp_path / "run", "cluster.rank_cpus=2")
    (replica,) = own.second.processes("ray::Replica")
    own.second.link("down")
    before = steps_done(run.folder)
    time.sleep(2.0)
    assert steps_done(run.folder) <= before + 1  # Every step needs both replicas.
    own.second.link("up")
    run.until(lambda: steps_done(run.folder) > before + 1)
    assert own.second.processes("ray::Replica") == [replica]
    run.finish()
    assert "lost" not in run.said
    assert differing(alone, run.folder) == []


def test_a_replica_that_is_cut_off_is_lost_and_replaced_when_its_node_is_back(
    alone: Path, tmp_path: Path, machines: Callable[..., TwoMachines]
) -> None:
    own = machines(3, 1)
    run = Training(own, tmp_path / "run", "cluster.rank_cpus=2")
    own.second.link("down")
    run.until(lambda: "The run continues with 1 of 2 replicas" in run.said)
    driver = psutil.Process(run.process.pid)
    driver.suspend()  # Otherwise, the run may end before the node is back.
    own.second.link("up")
    assert emptied(own.second, "ray::Replica")
    own.join()
    run.until(lambda: own.second.processes("ray::Replica"))
    driver.resume()
    run.finish()
    assert differing(alone, run.folder) == []
    assert emptied(own.second, "ray::Replica")


def test_a_run_whose_rank_is_cut_off_continues_when_its_node_is_back(
    alone: Path, tmp_path: Path, machines: Callable[..., TwoMachines]
) -> None:
    own = machines(0, 3)
    run = Training(own, tmp_path / "run")
    own.second.link("down")
    run.until(lambda: "lost rank 0" in run.said)
    own.second.link("up")
    assert emptied(own.second, "ray::")
    own.join()
    run.finish()
    assert differing(alone, run.folder) == []
    assert emptied(own.second, "ray::LearnerRank")
