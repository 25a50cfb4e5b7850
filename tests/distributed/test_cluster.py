"""A run on Ray is the run of one process, also while its processes are killed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from cluster_runs import assert_survives, kill_driver, processes, train_command
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.rundir.files import read_lines
from small_runs import settings, tiny

pytest.importorskip("ray")

STEPS = 5


def run_settings(folder: Path, *more: str) -> list[str]:
    return settings(
        folder,
        f"steps={STEPS}",
        "sampling.max_tokens=32",
        "optimizer.learning_rate=1e-4",
        "checkpoint.every_steps=1",
        *more,
    )


def resumable(given: list[str]) -> list[str]:
    """Without the folder, which `--resume` names."""
    return [each for each in given if not each.startswith("output=")]


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "final" / "model.safetensors"))


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(list(read_lines(path))) if path.exists() else 0


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
    one, other = trained(alone), trained(tmp_path / "run")
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    left = [p for p in psutil.process_iter(["cmdline"]) if "ray::Replica" in str(p.info["cmdline"])]
    assert left == []


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
    one, other = trained(alone), trained(folder)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.cluster
def test_what_a_cluster_lacks_is_said(tmp_path: Path) -> None:
    from groupwise.distributed.connection import Cluster

    config = load("word-problems-ray", settings(tmp_path / "run", "cluster.rank_gpus=4"))
    with pytest.raises(UsageError, match="too little .*GPU: 0 of 4"):
        Cluster(config)


def test_what_a_cluster_cannot_do_is_refused_before_it_starts(tmp_path: Path) -> None:
    from groupwise.training.run import train_config

    given = settings(tmp_path / "run")
    with pytest.raises(UsageError, match="cannot sample in the replicas"):
        load("word-problems-ray", [*given, "engine.name='vllm'"])
    with pytest.raises(UsageError, match="a loaded model cannot be sent to a cluster"):
        train_config(load("word-problems-ray", given), policy=tiny())


LONG = ("steps=12", "reward_pool.workers=1")
KILLS = int(os.environ.get("GROUPWISE_TEST_KILLS", "1"))
"""How often a process of each kind is killed."""
KILLS_PER_RUN = 4
PAUSE_S = 2.0
"""Longest time between a recovery and the next kill."""
MODELS = ("ray::Replica", "ray::LearnerRank", "ray::ScorerProcess", "scoring.worker")
"""Processes that may not outlive a run; Ray's own daemons may."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longer run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    given = run_settings(folder, *LONG)
    subprocess.run(train_command("word-problems", given), check=True, capture_output=True)
    return folder


def victims(run: int, kind: str) -> list[psutil.Process]:
    """The processes of a kind that a run has at the moment."""
    return [psutil.Process(run)] if kind == "driver" else processes(run, kind)


def kills_of(folder: Path, kind: str, chance: random.Random, *, at_most: int) -> list[float]:
    """Kill processes of a run until it ends; seconds from each kill to the next finished step."""
    scorers = f"cluster.scorers={int('Scorer' in kind)}"
    given = run_settings(folder, *LONG, "cluster.restarts=10", scorers)
    recovered: list[float] = []
    log, every = folder.with_suffix(".err"), set[psutil.Process]()

    def start(given: list[str], *more: str) -> subprocess.Popen[str]:
        line = train_command("word-problems-ray", given, *more)
        return subprocess.Popen(line, stderr=log.open("a"), text=True)

    run = start(given)
    while run.poll() is None:
        time.sleep(PAUSE_S * chance.random())
        there: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            every |= {each for name in MODELS for each in processes(run.pid, name)}
            there = victims(run.pid, kind)
        if not there or not steps_done(folder) or len(recovered) == at_most:
            continue
        begun, before = time.monotonic(), steps_done(folder)
        with contextlib.suppress(psutil.NoSuchProcess):
            chance.choice(there).kill()
        if kind == "driver":
            run.wait()
            run = start(resumable(given), "--resume", str(folder))
        while steps_done(folder) <= before and run.poll() is None:
            time.sleep(0.02)
        recovered.append(time.monotonic() - begun)
    assert run.returncode == 0, log.read_text()[-2000:]
    assert psutil.wait_procs(every, timeout=60)[1] == []
    return recovered


@pytest.mark.verify
@pytest.mark.cluster
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [*MODELS, "driver"])
def test_weights_after_kills_at_random_moments(
    undisturbed: Path, tmp_path: Path, kind: str
) -> None:
    """The moments follow from the kind's name."""
    chance, recovered = random.Random(kind), []
    while len(recovered) < KILLS:
        folder = tmp_path / f"run-{len(recovered)}"
        at_most = min(KILLS_PER_RUN, KILLS - len(recovered))
        recovered += kills_of(folder, kind, chance, at_most=at_most)
        one, other = trained(undisturbed), trained(folder)
        assert [name for name in one if not torch.equal(one[name], other[name])] == [], folder
        print(f"{kind}: {len(recovered)} kills, recovered within {max(recovered):.1f} s")
