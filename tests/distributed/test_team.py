"""Rank 0 leads: same completions as one engine, and whoever is lost is named."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from batches import batch_of
from groupwise.algorithms import bind
from groupwise.algorithms.losses import VALUE_LOSSES, FunctionObjective, ValueObjective
from groupwise.config import build
from groupwise.config.connect import second_learner
from groupwise.distributed.engine import SpreadEngine
from groupwise.distributed.learner import DistributedLearner
from groupwise.distributed.team import Leader, Member, follow
from groupwise.distributed.world import World
from groupwise.errors import RunError, UsageError
from groupwise.models import score_layer, scorer_of
from groupwise.registry import spec
from groupwise.rollouts import GroupEngine
from groupwise.types import Completion, Prompt, Request, Sampling, Stream
from groupwise.updates import OptimizerSettings
from ranks import run_ranks
from tiny_models import tiny_model, tiny_policy

LOSS = bind("grpo").objective
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
    return Member(world, learner, GroupEngine(policy), sampler=None)


def sampled(engine: Any) -> dict[str, list[Completion]]:
    made = engine.generate(iter(REQUESTS), SAMPLING)
    return {group.prompt.id: list(group.completions) for group in made}


def spread(world: World) -> dict[str, list[Completion]] | str:
    member = member_of(world)
    if not world.leads:
        follow(member)
        return "followed"
    leader = Leader(member)
    with pytest.raises(UsageError, match="cannot be sent to other processes"):
        leader.policy.update(
            batch_of(2), FunctionObjective(loss=lambda outputs, batch: outputs["logp"])
        )
    engine = SpreadEngine(leader, GroupEngine(member.learner.policy))
    found = sampled(engine)
    engine.close()
    return found


def test_spread_prompts_give_the_completions_of_one_engine() -> None:
    first, *others = run_ranks(3, spread)
    assert others == ["followed"] * 2
    engine = GroupEngine(tiny_policy(tiny_model("llama"), ends=(1, 7, 8)))
    alone = sampled(engine)
    assert isinstance(first, dict) and first.keys() == alone.keys()
    atol = 0.0 if engine.exact_continuation else 1e-4  # a row's bits may depend on the others
    for prompt, wanted in alone.items():
        for found, one in zip(first[prompt], wanted, strict=True):
            assert found.logprobs == pytest.approx(one.logprobs, rel=0, abs=atol)
            assert replace(found, logprobs=one.logprobs) == one


def with_critic(world: World) -> tuple[float, float]:
    """Sum of the weights of a critic's head on this rank, and version of its learner, after an
    update, a new optimizer and another update."""
    member = member_of(world)
    member.second = partial(
        second_learner, build({}), make=partial(DistributedLearner, world=world)
    )
    member.second_model = scorer_of(tiny_policy(tiny_model("llama")), kind="token")
    weight = score_layer(member.second_model.model).weight
    if world.leads:
        leader = Leader(member)
        settings = OptimizerSettings(learning_rate=1e-2)
        critic = leader.second("critic", optimizer=settings, total_steps=2)
        batch = batch_of(3, dtype=torch.float32)
        batch = replace(batch, columns={"returns": batch.mask.float()})
        loss = ValueObjective(loss=VALUE_LOSSES.bind(spec("squared")))
        critic.update(batch, loss)
        critic.restart(settings, total_steps=1)
        assert critic.version == 0 and leader.policy.version == 0
        critic.update(batch, loss)
        leader.close()
    else:
        follow(member)
    assert len(member.learners) == 2 and weight.any()
    return float(weight.detach().double().sum()), float(member.learners["critic"].version)


def test_a_second_learner_is_trained_on_every_rank() -> None:
    first, second = run_ranks(2, with_critic)
    assert isinstance(first, tuple), first
    assert first == second and first[1] == 1


def losing(world: World, how: str) -> str | tuple[str, float]:
    """Rank 1 is lost while rank 0 works with it; what rank 0 says, twice."""
    member = member_of(world)
    if not world.leads:
        if world.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            member.learners.clear()
        follow(member)
    leader = Leader(member)
    start = time.monotonic()
    said = []
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            leader.policy.set_trained(leader.policy.trained())
            leader.policy.update(batch_of(2, dtype=torch.float32), LOSS)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0], time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", r"rank 1 \(process \d+\) ended without an error message"),
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


class Late:
    """An engine that takes its time before the first group on rank 1, or stops its process."""

    def __init__(self, world: World, engine: GroupEngine, how: str) -> None:
        self.world, self.engine, self.how = world, engine, how
        self.exact_continuation = engine.exact_continuation

    def generate(self, *given: Any) -> Any:
        if self.world.rank == 1:
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3.5)
        return self.engine.generate(*given)

    def close(self) -> None:
        self.engine.close()


def sampled_late(world: World, how: str) -> Any:
    member = member_of(world)
    late: Any = Late(world, GroupEngine(member.learner.policy), how)
    member.engine = late
    if not world.leads:
        return follow(member)
    leader = Leader(member)
    engine = SpreadEngine(leader, late)
    try:
        return sampled(engine)
    except RunError as error:
        return str(error)
    finally:
        engine.close()


def test_sampling_may_take_longer_than_ranks_wait_for_each_other() -> None:
    found = run_ranks(2, sampled_late, "slow", timeout_s=1.5)[0]
    assert isinstance(found, dict), found
    assert len(found) == len(REQUESTS)


@pytest.mark.cluster
def test_a_rank_that_stops_while_sampling_is_named() -> None:
    said = run_ranks(2, sampled_late, "stopped", timeout_s=1.5, limit_s=12.0)[0]
    assert "waited for completions of the other ranks: no sign of life within 2 s" in said
    assert "from rank 1. Continue with --resume." in said


def drifting(world: World) -> None:
    """Rank 1 has one bit of one weight that rank 0 has not."""
    member = member_of(world)
    if not world.leads:
        weight = dict(member.learner.reader.named())["model.norm.weight"]
        weight.data.view(torch.int32)[3] ^= 1
        return follow(member)
    leader = Leader(member)
    SpreadEngine(leader, GroupEngine(member.learner.policy)).publish(leader.policy.publish())


def test_ranks_with_different_weights_sample_nothing() -> None:
    for result in run_ranks(2, drifting):
        assert isinstance(result, RunError)
        assert "rank 1 has other weights than rank 0 at version 0 (model.norm.weight)" in str(
            result
        )
