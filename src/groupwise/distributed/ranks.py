"""A run under `torchrun`: rank 0 runs the loop and writes the run directory, the others follow."""

from __future__ import annotations

import copy
import json
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.config import Config
from groupwise.config.connect import (
    Connected,
    configured_learner,
    load_configured,
    second_learner,
    second_model,
    select_device,
)
from groupwise.distributed.asked import AskedLearner
from groupwise.distributed.engine import SpreadEngine
from groupwise.distributed.learner import DistributedLearner, Sharding
from groupwise.distributed.replies import sampling_engine
from groupwise.distributed.surroundings import compare, received, surroundings
from groupwise.distributed.team import Leader, Member, follow
from groupwise.distributed.world import World
from groupwise.models import Policy, is_adapted

BYTES_PER_PARAMETER = 16
"""float32 weights, gradients and both moments."""
SHARE_OF_CARD = 0.5
"""Weights and optimizer are sharded if they would fill more than this fraction of a card."""


def lead(config: Config, algorithm: BoundAlgorithm, *, policy: Policy) -> Connected:
    """Make the other ranks join a run, and connect the policy to the distributed learner and
    engine. Closing the engine releases them.
    """
    world = World.call(config.to_json(), timeout_s=config.distributed.timeout_s)
    try:
        member = make_member(config, algorithm, policy, world=world, samples=True)
    except BaseException as error:
        world.failed(error)
        world.close()
        raise
    leader = Leader(member)
    assert member.engine is not None
    engine = SpreadEngine(leader, member.engine, spreads=_spreads(config))
    name = algorithm.second_learner

    def second(config: Config, model: Policy, **settings: Any) -> AskedLearner:
        assert name is not None, "the algorithm has no second learner"
        member.second_model = model
        return leader.second(name, **settings)

    return Connected(policy=policy, engine=engine, learner=leader.policy, second=second)


def serve(policy: Policy | None = None) -> tuple[Config, Policy]:
    """Follow rank 0 until its run has ended; returns its configuration and this rank's policy.

    Args:
        policy: a loaded model, which receives rank 0's weights; None loads the configured one.

    Raises:
        RunError: rank 0 or another rank was lost.
    """
    world, text = World.called(lambda text: json.loads(text)["distributed"]["timeout_minutes"] * 60)
    # Ctrl-C and SIGTERM reach every rank; rank 0 finishes its step and lets the others go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        try:
            config = received(text)
            algorithm = bind(config.algorithm.name, config.algorithm.overrides())
            policy = policy or load_configured(config)
            samples, name = _spreads(config), algorithm.second_learner
            second = None if name is None else second_model(config, policy, name)
            member = make_member(config, algorithm, policy, world=world, samples=samples)
            member.second_model = second
        except BaseException as error:
            world.failed(error)
            raise
        follow(member)
    finally:
        world.close()
    return config, policy


def make_member(
    config: Config, algorithm: BoundAlgorithm, policy: Policy, *, world: World, samples: bool
) -> Member:
    """This rank's learner and engine, with the weights of rank 0.

    Args:
        samples: whether this rank has an engine.

    Raises:
        UsageError: a rank has other packages or functions than rank 0.
    """
    found = world.gather(surroundings(), "all ranks to load the model")
    compare(found[0], {f"rank {r}": each for r, each in enumerate(found)}, here="rank 0")
    select_device(config, policy)
    sharding = _sharding(config, policy)
    sampler = None
    if sharding == "full" and samples:
        sampler = replace(policy, model=copy.deepcopy(policy.model))
    make = partial(DistributedLearner, world=world, sharding=sharding)
    learner = configured_learner(config, algorithm, policy, make=make)
    engine = sampling_engine(config, sampler or policy) if samples else None
    second = partial(second_learner, config, make=make)
    member = Member(world, learner, engine, sampler=sampler, second=second)
    if sharding == "full":
        member.renew()
    return member


def _spreads(config: Config) -> bool:
    """Whether every rank samples; with a vLLM server, only rank 0 does."""
    return config.engine.name != "vllm"


def _sharding(config: Config, policy: Policy) -> Sharding:
    """What "auto" means for this model on this machine."""
    wanted = config.distributed.sharding
    if wanted != "auto":
        return wanted
    if is_adapted(policy.model) or not torch.cuda.is_available():
        return "none"
    size = BYTES_PER_PARAMETER * sum(p.numel() for p in policy.model.parameters())
    memory = torch.cuda.get_device_properties(0).total_memory
    return "full" if size > SHARE_OF_CARD * memory else "none"
