"""Rank 0 leads: same completions as one engine, and whoever is lost is named."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from batches import batch_of
from groupwise.algorithms.losses import FunctionObjective
from groupwise.distributed.engine import SpreadEngine
from groupwise.distributed.learner import DistributedLearner
from groupwise.distributed.team import Leader, Member, follow
from groupwise.distributed.world import World
from groupwise.errors import RunError, UsageError
from groupwise.rollouts import GroupEngine
from groupwise.types import Completion, Prompt, Request, Sampling, Stream
from groupwise.updates import OptimizerSettings
from ranks import run_ranks
from tiny_models import tiny_model, tiny_policy

LOSS = FunctionObjective(loss=lambda outputs, batch: -batch.advantage * outputs["logp"])
SAMPLING = Sampling(max_tokens=10)
REQUESTS = [
    Request(
        prompt=Prompt(id=str(place), text=""),
        tokens=[20 + place, 30, 41],
        group=3,
        stream=Stream(seed=5, place=place),
    )
    for place in range(5)
]


def member_of(world: World) -> Member:
    policy = tiny_policy(tiny_model("llama"), ends=(1, 7, 8))
    settings = OptimizerSettings(learning_rate=1e-2)
    learner = DistributedLearner(policy, world=world, optimizer=settings)
    return Member(world, learner, GroupEngine(policy), sampler=None, objectives={"policy": LOSS})


def sampled(engine: Any) -> dict[str, list[Completion]]:
    made = engine.generate(iter(REQUESTS), SAMPLING)
    return {group.prompt.id: list(group.completions) for group in made}


def spread(world: World) -> dict[str, list[Completion]] | str:
    member = member_of(world)
    if not world.leads:
        follow(member)
        return "followed"
    leader = Leader(member)
    with pytest.raises(UsageError, match="Known: policy"):
        leader.update(None, object())  # type: ignore[arg-type]
    engine = SpreadEngine(leader, GroupEngine(member.learner.policy))
    found = sampled(engine)
    engine.close()
    return found


def test_spread_prompts_give_the_completions_of_one_engine() -> None:
    first, *others = run_ranks(3, spread)
    assert others == ["followed"] * 2
    alone = sampled(GroupEngine(tiny_policy(tiny_model("llama"), ends=(1, 7, 8))))
    assert first == alone


def losing(world: World, how: str) -> str | tuple[str, float]:
    """Rank 1 is lost while rank 0 works with it; what rank 0 says, twice."""
    member = member_of(world)
    if not world.leads:
        if world.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            member.objectives = {}
        follow(member)
    leader = Leader(member)
    start = time.monotonic()
    said = []
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            leader.set_trained(leader.trained())
            leader.update(batch_of(2, dtype=torch.float32), LOSS)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0], time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", r"rank 1 \(process \d+\) has ended without a word"),
        ("broken", "rank 1 failed: KeyError"),
        pytest.param("stopped", "within 2 s .* from rank 1", marks=pytest.mark.cluster),
    ],
)
def test_the_lost_rank_is_named(how: str, message: str) -> None:
    first = run_ranks(2, losing, how, timeout_s=2.0, limit_s=14.0)[0]
    assert isinstance(first, tuple), first
    said, seconds = first
    assert seconds < 15
    assert "waited for" in said and "--resume" in said
    assert re.search(message, said), said
