"""`torchrun -m groupwise train`: two ranks with a critic give the metrics of one process, and a
checkpoint of theirs is continued by one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "groupwise"]
        ended = subprocess.run(
            [sys.executable, *launch, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def recipe(output: Path, *more: str) -> list[str]:
    given = [*RECIPE, f"output={output}", *more]
    return ["word-problems-ppo", *(word for each in given for word in ("--set", each))]


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
