"""What `groupwise launch` prints: scripts for a shell, manifests with what the recipe needs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise.cli import main
from groupwise.config import load
from groupwise.distributed.launch import Launch, kuberay, script, slurm
from groupwise.errors import UsageError
from small_runs import settings


def launch_of(recipe: str, *overrides: str, **given: int) -> Launch:
    return Launch(config=load(recipe, overrides), recipe=recipe, overrides=list(overrides), **given)


def words_of(text: str, program: str) -> list[str]:
    """The words that a shell makes of the line that starts a program."""
    line = next(line for line in text.splitlines() if line.startswith(program))
    return shlex.split(line)


@pytest.mark.parametrize("make", [script, slurm], ids=lambda make: make.__name__)
@pytest.mark.parametrize("recipe", ["word-problems", "word-problems-ray"])
def test_a_shell_accepts_the_script(make: Any, recipe: str) -> None:
    hostile = "output=runs/$(touch x) 'a' \"b\" `c`"
    text = make(launch_of(recipe, hostile, nodes=3, per_node=2))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words = (
        words_of(text, "srun --kill" if "srun --kill" in text else "torchrun")
        if (recipe == "word-problems")
        else shlex.split(text.splitlines()[-1])
    )
    if words[0] == "srun" and "bash" in words:
        words = shlex.split(words[words.index("-c") + 1])
    assert hostile in words
    assert words[words.index("--resume") + 1] == hostile.removeprefix("output=")


def test_every_machine_gets_its_number() -> None:
    words = words_of(script(launch_of("word-problems", nodes=3, per_node=2)), "torchrun")
    assert words[words.index("--nnodes") + 1] == "3"
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert words[words.index("--node-rank") + 1] == "${NODE_RANK:-0}"


@pytest.mark.parametrize("make", [script, slurm], ids=lambda make: make.__name__)
def test_all_machines_of_a_cluster_agree_on_tokens(make: Any) -> None:
    """Otherwise, Ray decides on each machine by whether its user has a token."""
    lines = make(launch_of("word-problems-ray", nodes=2)).splitlines()
    first = next(number for number, line in enumerate(lines) if "ray start" in line)
    assert 'export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"' in lines[:first]
    assert "RAY_AUTH_MODE" not in make(launch_of("word-problems", nodes=2))


def test_slurm_is_asked_for_what_the_cluster_section_needs() -> None:
    given = (
        "cluster.ranks=2",
        "cluster.rank_gpus=1",
        "cluster.replicas=6",
        "cluster.replica_gpus=0.5",
    )
    text = slurm(launch_of("word-problems-ray", *given, nodes=2))
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=3\n" in text  # 2 · 1 + 6 · 0.5 on two machines
    assert "#SBATCH --cpus-per-task=5\n" in text  # 8 on two machines, and the driver
    assert 'ray start --address "$first:6379" --block &' in text


def test_a_manifest_has_a_pod_for_every_rank_and_replica() -> None:
    given = ("cluster.ranks=2", "cluster.rank_gpus=1", "cluster.replicas=3", "output=/runs/a")
    text = kuberay(launch_of("word-problems-ray", *given), image="mine:1", claim="disk")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    ranks, replicas = cluster["workerGroupSpecs"]
    assert (ranks["replicas"], replicas["replicas"]) == (2, 3)
    spec = ranks["template"]["spec"]
    assert spec["containers"][0]["image"] == "mine:1"
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "disk"
    entry = shlex.split(job["spec"]["entrypoint"])
    assert entry[:3] == ["groupwise", "train", "word-problems-ray"]
    assert "cluster.address=auto" in entry


def test_scorers_have_room_too() -> None:
    given = ("cluster.scorers=4", "cluster.scorer_cpus=3", "cluster.scorer_gpus=0.5")
    launch = launch_of("word-problems-ray", *given, "output=/runs/a")
    assert "#SBATCH --cpus-per-task=16\n" in slurm(launch)  # 1 rank, 2 replicas, 4 · 3, the driver
    assert "#SBATCH --gpus-per-node=2\n" in slurm(launch)
    job = yaml.safe_load(kuberay(launch, image="mine:1", claim="disk"))
    *_, scorers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (scorers["groupName"], scorers["replicas"]) == ("scorers", 4)


def test_what_a_manifest_cannot_start_is_refused() -> None:
    with pytest.raises(UsageError, match="a RayJob needs this section"):
        kuberay(launch_of("word-problems", "output=/runs/a"), image="a", claim="b")
    with pytest.raises(UsageError, match="must be under /runs"):
        kuberay(launch_of("word-problems-ray"), image="a", claim="b")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "word-problems", "--on", "slurm", "--nodes", "2"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=word-problems\n")


@pytest.mark.cluster
def test_the_script_trains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = settings(folder, "steps=2")
    path = tmp_path / "run.sh"
    path.write_text(script(launch_of("word-problems", *given, per_node=2)))
    programs = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(path)], check=True, capture_output=True, env=programs)
    assert (folder / "final" / "model.safetensors").exists()
