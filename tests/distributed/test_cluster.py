"""A run on Ray is the run of one process, also while its processes are killed."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from pathlib import Path

import pytest

import kills
from cluster_runs import assert_survives, kill_driver, train_command
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.rundir.files import read_lines
from kills import (
    KILLS_PER_RUN,
    KINDS,
    differing,
    kills_of,
    resumable,
    settings_of,
    steps_done,
    undisturbed_run,
)
from small_runs import settings, tiny
from vllm_peer import interpreter

pytest.importorskip("ray")

STEPS = 5


def run_settings(folder: Path, *more: str) -> list[str]:
    return kills.run_settings(folder, *more, steps=STEPS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    command = train_command("word-problems", run_settings(folder))
    subprocess.run(command, check=True, capture_output=True)
    return folder


def killed(folder: Path, kind: str, *more: str) -> str:
    """A run on Ray in which a process is killed after the second step; what it printed."""
    command = train_command("word-problems-ray", run_settings(folder, *more))
    return assert_survives(command, kind, when=lambda: steps_done(folder) >= 2)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["", "Replica", "LearnerRank"])
def test_weights_are_those_of_one_process(alone: Path, tmp_path: Path, kind: str) -> None:
    said = killed(tmp_path / "run", kind)
    assert ("lost rank 0" in said) is (kind == "LearnerRank")
    assert steps_done(tmp_path / "run") == STEPS
    assert differing(alone, tmp_path / "run") == []
    memory = [row["memory_mb"] for row in read_lines(tmp_path / "run" / "timeline.jsonl")]
    assert memory[-1].keys() == {"rank 0", "replica 0", "replica 1"}
    assert min(memory[-1].values()) > 100.0


@pytest.mark.cluster
def test_a_killed_driver_is_resumed_elsewhere(alone: Path, tmp_path: Path) -> None:
    """Killed on the cluster, resumed in one process: the run directory is the same."""
    folder = tmp_path / "run"
    command = train_command("word-problems-ray", run_settings(folder))
    alive = kill_driver(command, when=lambda: steps_done(folder) >= 3)
    # Ray's own daemons may outlive a killed driver; processes that hold a model may not.
    left = [" ".join(each.cmdline()) for each in alive]
    assert [line for line in left if "Replica" in line or "LearnerRank" in line] == []
    given = resumable(run_settings(folder))
    again = train_command("word-problems", given, "--resume", str(folder))
    subprocess.run(again, check=True, capture_output=True)
    assert differing(alone, folder) == []


@pytest.mark.cluster
def test_replicas_sample_with_a_vllm_of_their_own(tmp_path: Path) -> None:
    """One of whose servers is killed; the server of this test speaks vLLM's protocol and draws by
    the seed of each request."""
    python = interpreter(tmp_path)
    engine = f"engine={{name='vllm', python='{python}', weights='shared_memory'}}"
    given = (engine, "algorithm.correction={name='tis'}")
    own = train_command("word-problems", run_settings(tmp_path / "own", *given))
    subprocess.run(own, check=True, capture_output=True)
    killed(tmp_path / "run", "vllm_peer", *given)
    assert differing(tmp_path / "own", tmp_path / "run") == []


@pytest.mark.cluster
def test_what_a_cluster_lacks_is_said(tmp_path: Path) -> None:
    from groupwise.distributed.connection import Cluster

    config = load("word-problems-ray", settings(tmp_path / "run", "cluster.rank_gpus=4"))
    with pytest.raises(UsageError, match="too little .*GPU: 0 of 4"):
        Cluster(config)


@pytest.mark.timeout(60)
def test_a_dead_address_is_said_at_once(tmp_path: Path) -> None:
    from groupwise.distributed.connection import Cluster

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        config = load("word-problems-ray", settings(tmp_path, f"cluster.address={address}"))
        with pytest.raises(
            UsageError, match=f"'{address}': no Ray cluster answers there .*refused"
        ):
            Cluster(config)


def test_what_a_cluster_cannot_do_is_refused_before_it_starts(tmp_path: Path) -> None:
    from groupwise.training.run import train_config

    given = settings(tmp_path / "run")
    with pytest.raises(UsageError, match="replicas of .cluster. cannot share a server"):
        load("word-problems-ray", [*given, "engine={name='vllm', server='http://localhost:8000'}"])
    with pytest.raises(UsageError, match="a loaded model cannot be sent to a cluster"):
        train_config(load("word-problems-ray", given), policy=tiny())


KILLS = int(os.environ.get("GROUPWISE_TEST_KILLS", "1"))
"""How often a process of each kind is killed."""


@pytest.mark.verify
@pytest.mark.cluster
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_after_kills_at_random_moments(tmp_path: Path, kind: str) -> None:
    """The moments follow from the kind's name; `tests/support/kills.py` has a log of many."""
    more = settings_of(kind, tmp_path)
    undisturbed = undisturbed_run(tmp_path / "undisturbed", *more)
    chance, recovered = random.Random(kind), list[float]()
    while len(recovered) < KILLS:
        folder = tmp_path / f"run-{len(recovered)}"
        at_most = min(KILLS_PER_RUN, KILLS - len(recovered))
        found = kills_of(folder, kind, chance, *more, at_most=at_most)
        recovered += found["recovered"]
        assert found["left"] == 0 and differing(undisturbed, folder) == [], folder
        print(f"{kind}: {len(recovered)} kills, recovered within {max(recovered):.1f} s")
