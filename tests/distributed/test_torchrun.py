"""`torchrun -m groupwise train`: two ranks with a critic give the metrics of one process, and a
checkpoint of theirs is continued by one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from groupwise.cli import main

RECIPE = [
    "steps=2",
    "threads=1",
    "prompts_per_step=4",
    "group_size=4",
    "data.limit=40",
    "sampling.max_tokens=24",
    "critic.pretraining.batches=1",
    "checkpoint.every_steps=1",
    "evaluation.every_steps=100",
    "evaluation.prompts=2",
]
SAME = ("reward", "grad_norm", "value_loss", "explained_variance", "critic.grad_norm")


def trained(output: Path, *arguments: str, ranks: int = 1) -> list[dict[str, Any]]:
    """The metrics of a run; of a single rank in this process."""
    command = ["train", *arguments]
    if ranks == 1:
        assert main(command) == 0
    else:
        ended = subprocess.run(
            [*launcher(ranks), *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    return metrics(output)


def launcher(ranks: int) -> list[str]:
    per_node = ["--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *per_node, "-m", "groupwise"]


def metrics(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def recipe(output: Path, *more: str) -> list[str]:
    given = [*RECIPE, f"output={output}", *more]
    return ["word-problems-ppo", *(word for each in given for word in ("--set", each))]


NOTING = """
from groupwise.environments import ENVIRONMENTS, Reply


class Noting:
    stops = ("=",)

    def begin(self, prompt, *, stream):
        return stream.step

    def reply(self, step, text):
        with open(__file__ + ".asked", "a") as file:
            file.write(f"{step}\\n")
        return Reply(text="[ok]", frame=(1, 1))


@ENVIRONMENTS.register
def noting():
    return Noting()
"""


@pytest.mark.cluster
def test_two_ranks_that_are_killed_recall_the_replies_of_their_environment(tmp_path: Path) -> None:
    """The run ends after its third step, and is resumed from its second."""
    tool, run = tmp_path / "tool.py", tmp_path / "run"
    tool.write_text(NOTING)
    code = f"imports=['{tool}']"
    own = ("environment.name=noting", "guards.silent_rewards='say'", "steps=100", f"output={run}")
    given = [*(each for each in RECIPE if not each.startswith(("critic.", "steps="))), code, *own]
    words = [word for each in given for word in ("--set", each)]
    first = subprocess.Popen(
        [*launcher(2), "train", "word-problems", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while len(metrics(run)) < 3:
            assert first.poll() is None
            time.sleep(0.1)
    finally:
        for process in [launched := psutil.Process(first.pid), *launched.children(recursive=True)]:
            process.kill()
        first.wait()
    wanted, asked = metrics(run)[2], Path(f"{tool}.asked").read_text().split()
    writers = {path.stem.rpartition("-")[0] for path in (run / "journal").glob("replies.*.jsonl")}
    assert len(writers) == 2 and wanted["calls"] > 0 and "2" in asked
    again = trained(run, "--resume", str(run), "--set", "steps=3", "--set", code, ranks=2)[2]
    assert again["calls"] == wanted["calls"] and again["reward"] == wanted["reward"]
    assert Path(f"{tool}.asked").read_text().split().count("2") == asked.count("2")


@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.cluster)])
def test_two_ranks_with_a_critic_train_as_one_process(sharding: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    wanted = trained(one, *recipe(one))
    found = trained(two, *recipe(two, f"distributed.sharding={sharding}"), ranks=2)
    assert len(found) == len(wanted) == 2
    for theirs, own in zip(found, wanted, strict=True):
        assert [theirs[n] for n in SAME] == pytest.approx([own[n] for n in SAME], rel=2e-3)
    for folder in (two / "checkpoints" / "step-000002", two / "final"):
        shutil.rmtree(folder)
    (again,) = trained(two, "--resume", str(two))[1:]
    assert [again[n] for n in SAME] == pytest.approx([found[1][n] for n in SAME], rel=2e-3)
    assert (two / "critic" / "model.safetensors").is_file()
