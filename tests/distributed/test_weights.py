"""Whatever happens to weights on their way is found before a token is sampled from them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from groupwise.distributed.weights import Shipment, accept, shipment
from groupwise.errors import RunError
from groupwise.models.weights import PublishedWeights
from tiny_models import SHAPE, random_model

DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"
OTHER = "model.layers.2.mlp.down_proj.weight"


def sender() -> Any:
    return random_model(Qwen2Config(**SHAPE, tie_word_embeddings=True))


def sent(model: Any, version: int) -> Shipment:
    weights = PublishedWeights(version=version, named=dict(model.named_parameters()))
    return pickle.loads(pickle.dumps(shipment(weights)))


def stepped(model: Any) -> Any:
    """The model after a step that changes every weight."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    return model


def missing(new: Shipment, old: Shipment, model: Any) -> Shipment:
    return replace(new, named={n: t for n, t in new.named.items() if n != DOWN})


def swapped(new: Shipment, old: Shipment, model: Any) -> Shipment:
    return replace(new, named={**new.named, DOWN: new.named[OTHER], OTHER: new.named[DOWN]})


def stale(new: Shipment, old: Shipment, model: Any) -> Shipment:
    return replace(new, named={**new.named, DOWN: old.named[DOWN]})


def stale_shard(new: Shipment, old: Shipment, model: Any) -> Shipment:
    half = new.named[DOWN].clone()
    half[: len(half) // 2] = old.named[DOWN][: len(half) // 2]
    return replace(new, named={**new.named, DOWN: half})


def flipped(new: Shipment, old: Shipment, model: Any) -> Shipment:
    bits = new.named[NORM].clone()
    bits.view(torch.int32)[3] ^= 1
    return replace(new, named={**new.named, NORM: bits})


def sent_again(new: Shipment, old: Shipment, model: Any) -> Shipment:
    return old


def wrong_type(new: Shipment, old: Shipment, model: Any) -> Shipment:
    return replace(new, named={**new.named, DOWN: new.named[DOWN].bfloat16()})


def untied(new: Shipment, old: Shipment, model: Any) -> Shipment:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return new


FAULTS: dict[Callable[..., Shipment], str] = {
    missing: f"{DOWN} missing",
    swapped: "different bytes",
    stale: "different bytes",
    stale_shard: "different bytes",
    flipped: "different bytes",
    sent_again: "version 1: arrived where version 2 was announced",
    wrong_type: "bfloat16",
    untied: "head is tied",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[..., Shipment]) -> None:
    learner = sender()
    receiver = copy.deepcopy(learner)
    old = sent(stepped(learner), 1)
    accept(receiver, old, version=1)
    new = sent(stepped(learner), 2)
    with pytest.raises(RunError, match=FAULTS[fault]):
        accept(receiver, fault(new, old, receiver), version=2)


def test_clean_weights_are_never_refused() -> None:
    learner = sender()
    receiver = copy.deepcopy(learner)
    for version in range(1, 21):
        accept(receiver, sent(stepped(learner), version), version=version)
    for name, parameter in receiver.named_parameters():
        assert torch.equal(parameter, learner.get_parameter(name))
