"""On Ray, the ranks train a critic, and the driver holds no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import load
from groupwise.training.prepare import Prepared
from groupwise.training.run import train_config
from small_runs import Quiet, timeless

pytest.importorskip("ray")

GIVEN = [
    "steps=3",
    "prompts_per_step=4",
    "group_size=4",
    "data.limit=40",
    "sampling.max_tokens=24",
    "critic.pretraining.batches=3",
    "checkpoint.every_steps=2",
    "evaluation.every_steps=0",
    "evaluation.prompts=2",
    "threads=1",
]


def trained(folder: Path, *more: str, resume: bool = False) -> Path:
    config = load("word-problems-ppo", [*GIVEN, f"output={folder}", *more])
    train_config(config, progress=Quiet(), resume=resume)
    return folder


def differing(one: Path, other: Path) -> list[str]:
    """Tensors of policy and critic that differ in a bit."""
    found = []
    for name in ("final", "critic"):
        a, b = (load_file(str(each / name / "model.safetensors")) for each in (one, other))
        assert a.keys() == b.keys()
        found += [f"{name}: {key}" for key in a if not torch.equal(a[key], b[key])]
    return found


@pytest.mark.cluster
def test_a_critic_on_ray_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process continues the checkpoint."""
    alone = trained(tmp_path / "alone")
    devices: list[str] = []
    close = Prepared.close

    def closed(prepared: Prepared) -> None:
        devices.extend(str(p.device) for p in prepared.policy.model.parameters())
        own: Any = prepared.trainer.learners["critic"]
        devices.append(type(own).__name__)
        close(prepared)

    with monkeypatch.context() as watched:
        watched.setattr(Prepared, "close", closed)
        cluster = trained(tmp_path / "cluster", "cluster.replicas=1")
    assert set(devices) == {"meta", "AskedLearner"}
    assert timeless(cluster) == timeless(alone) or len(timeless(cluster)) == 3
    assert differing(alone, cluster) == []
    sharded = trained(
        tmp_path / "sharded", "cluster.replicas=1", "cluster.ranks=2", "distributed.sharding=full"
    )
    for one, other in zip(timeless(alone), timeless(sharded), strict=True):
        for name in ("value_loss", "critic.grad_norm", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=2e-3)
