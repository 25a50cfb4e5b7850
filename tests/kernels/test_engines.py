"""Engines with and without kernels write the same."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from groupwise.kernels import Reference, active, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.models import Backbone, Policy, only_known_parts
from groupwise.rollouts import GroupEngine
from groupwise.testing.engines import check_logprobs, make_requests
from groupwise.types import Sampling
from tiny_models import SHAPE, random_model, tiny_policy

needs_kernels = pytest.mark.skipif(
    not isinstance(active(), Auto) or compiled() is None, reason="there are no CPU kernels here"
)


def wide_policy(config: PreTrainedConfig) -> Policy:
    """With heads of 16 dimensions, which kernels attend, where those of other tests have 8."""
    return tiny_policy(random_model(config), ends=(1, 5, 9))


CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=16),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "window": lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=7),
}
Written = list[tuple[list[int], list[float]]]


def written(policy: Policy, *, fused: bool) -> Written:
    """What an engine writes of which every token is the most probable; few rows, so that prompts
    wait for each other."""
    engine = GroupEngine(policy, max_rows=8)
    assert (engine.calls is not None) == fused
    groups = list(engine.generate(make_requests(), Sampling(max_tokens=16, temperature=0.0)))
    groups.sort(key=lambda group: group.prompt.id)
    return [(list(c.tokens), list(c.logprobs)) for group in groups for c in group.completions]


def check_alike(found: Written, wanted: Written) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@needs_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_writes_the_same_without_them(
    name: str,
) -> None:
    policy = wide_policy(CONFIGS[name]())
    found = written(policy, fused=True)
    with using(Reference()):
        check_alike(found, written(policy, fused=False))


@needs_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_completions_of_different_lengths(name: str) -> None:
    """Drawn, so that rows of one prompt end apart; a draw itself is not compared, which rounding
    may turn."""
    policy = wide_policy(CONFIGS[name]())
    check_logprobs(GroupEngine(policy, max_rows=8), policy)


@needs_kernels
def test_layers_of_a_model_are_attended_too() -> None:
    """Those that are not fused hand their heads to the kernel as well."""
    policy = wide_policy(LlamaConfig(**SHAPE, head_dim=16, hidden_act="gelu"))
    found = written(policy, fused=False)
    with using(Reference()):
        check_alike(found, written(policy, fused=False))


@pytest.mark.parametrize("part", ["embed_tokens", "norm"])
def test_parts_in_16_bits_are_left_to_the_models_own_layers(part: str) -> None:
    """Beside products in float32 they would be read as if they were as long."""
    policy = wide_policy(LlamaConfig(**SHAPE, head_dim=16))
    assert only_known_parts(Backbone.of(policy.model))
    getattr(policy.model.model, part).to(torch.bfloat16)
    assert not only_known_parts(Backbone.of(policy.model))
