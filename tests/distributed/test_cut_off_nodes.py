"""Runs on two machines that are network namespaces. If the network of one fails, the run on Ray
ends with the weights of one process, and nothing that was cut off stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster_runs import train_command
from groupwise.config import load
from groupwise.distributed.launch import Launch, script
from kills import differing, run_settings, steps_done, undisturbed_run
from namespaces import TwoMachines, emptied
from small_runs import settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
pytest.importorskip("ray")


@pytest.fixture
def own() -> Iterator[TwoMachines]:
    """Two machines."""
    made = TwoMachines()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    return undisturbed_run(tmp_path_factory.mktemp("alone") / "run")


class Training:
    """A run on the first machine, which has taken two steps."""

    def __init__(self, own: TwoMachines, folder: Path, *more: str) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        given = run_settings(folder, f"cluster.address={own.address}", *more)
        self.process = own.first.run(train_command("word-problems-ray", given), self.log)
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
    alone: Path, tmp_path: Path, own: TwoMachines
) -> None:
    own.start_ray(3, 1)
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
    tmp_path: Path, own: TwoMachines
) -> None:
    steps = 60  # Of a fifth of a second: the warning comes two seconds after the loss.
    alone = undisturbed_run(tmp_path / "alone", steps=steps)
    own.start_ray(3, 1)
    run = Training(own, tmp_path / "run", "cluster.rank_cpus=2", f"steps={steps}")
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
    alone: Path, tmp_path: Path, own: TwoMachines
) -> None:
    own.start_ray(0, 3)
    run = Training(own, tmp_path / "run")
    own.second.link("down")
    run.until(lambda: "lost rank 0" in run.said)
    own.second.link("up")
    assert emptied(own.second, "ray::")
    own.join()
    run.finish()
    assert differing(alone, run.folder) == []
    assert emptied(own.second, "ray::LearnerRank")


def test_ranks_of_torchrun_find_each_other_where_a_host_name_leads_nowhere(
    tmp_path: Path, own: TwoMachines
) -> None:
    """As in containers, and where a host name is an address of its own machine alone."""
    folder, path = tmp_path / "run", tmp_path / "run.sh"
    given = settings(folder, "steps=2")
    launch = Launch(
        config=load("word-problems", given), recipe="word-problems", overrides=given, nodes=2
    )
    path.write_text(script(launch))
    known = {
        "MASTER_ADDR": own.first.address,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    ranks = [
        each.run(["bash", str(path)], log, NODE_RANK=str(number), **known)
        for number, (each, log) in enumerate(zip((own.first, own.second), logs, strict=True))
    ]
    assert [rank.wait(240) for rank in ranks] == [0, 0], logs[1].read_text()[-2000:]
    assert (folder / "final" / "model.safetensors").exists()
