"""Objectives cross processes as names and settings."""

from __future__ import annotations

import pickle

import pytest
import torch

from batches import batch_of
from groupwise.algorithms import ALGORITHMS, bind
from groupwise.algorithms.losses import (
    VALUE_LOSSES,
    FunctionObjective,
    OutcomeObjective,
    ValueObjective,
)
from groupwise.distributed.objectives import built, named
from groupwise.errors import UsageError
from groupwise.registry import spec
from groupwise.types import Objective, Outputs


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_the_objective_that_arrives_is_the_one_that_was_sent(name: str) -> None:
    sent = bind(name, {"entropy": {"coefficient": 0.25}}).objective
    found = built(pickle.loads(pickle.dumps(named(sent))))
    assert found == sent


@pytest.mark.parametrize(
    "sent",
    [ValueObjective(loss=VALUE_LOSSES.bind(spec("clipped", clip=0.3))), OutcomeObjective()],
)
def test_objectives_of_second_learners_arrive(sent: Objective) -> None:
    assert built(pickle.loads(pickle.dumps(named(sent)))) == sent


def test_settings_of_a_schedule_arrive() -> None:
    batch = batch_of(3)
    outputs = Outputs(logp=batch.old_logp + 1.0)  # type: ignore[operator]
    one, other = (
        built(named(bind("grpo", {"surrogate": {"high": high}}).objective))(outputs, batch)
        for high in (0.2, 0.4)
    )
    assert not torch.equal(one, other)


def test_an_objective_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="consist of registered functions"):
        named(FunctionObjective(loss=lambda outputs, batch: outputs["logp"]))
