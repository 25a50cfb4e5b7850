"""An engine with other weights than its model is found before it samples for a run."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from groupwise.distributed.canary import LIMIT, canary_gap, check_canary
from groupwise.errors import RunError
from groupwise.rollouts import GenerateEngine, GroupEngine
from small_runs import tiny


@pytest.mark.parametrize("make", [GroupEngine, GenerateEngine], ids=lambda make: make.__name__)
def test_an_engine_of_its_model_is_never_refused(make: type) -> None:
    policy = tiny()
    engine = make(policy)
    for version in range(5):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        assert check_canary(engine, policy, version=version) < LIMIT / 10


def test_an_engine_with_older_weights_is_found() -> None:
    policy = tiny()
    older = replace(policy, model=copy.deepcopy(policy.model))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    with pytest.raises(
        RunError, match="version 7: the sampler does not compute with the weights that arrived"
    ):
        check_canary(GroupEngine(older), policy, version=7)


def test_weights_that_are_no_numbers_are_found() -> None:
    policy = tiny()
    older = replace(policy, model=copy.deepcopy(policy.model))
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(float("nan"))
    assert canary_gap(GroupEngine(older), policy) == float("inf")
