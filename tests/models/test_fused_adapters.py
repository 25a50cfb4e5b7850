"""Fused layers under low-rank adapters: the numbers of PEFT's own layers, or none at all."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

import groupwise.testing.engines as contract
from groupwise.kernels import Reference, active, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.models import Backbone, FusedBackbone, Policy, can_use_fused, only_known_parts
from groupwise.models.backbone import TwoRows
from groupwise.models.low_rank import sum_low_rank
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts import GroupEngine
from groupwise.testing.engines import make_requests
from groupwise.types import Sampling
from tiny_models import SHAPE, random_model, tiny_policy

pytestmark = pytest.mark.skipif(
    not isinstance(active(), Auto) or compiled() is None, reason="there are no CPU kernels here"
)
TYPES = [torch.float32, torch.bfloat16]
BIASES = {"attention_bias": True, "mlp_bias": True}
CONFIGS = {
    "plain": LlamaConfig(**SHAPE, head_dim=16),
    "biases": LlamaConfig(**SHAPE, **BIASES, head_dim=16),  # pyright: ignore[reportArgumentType]
    "tied head": Qwen2Config(**{**SHAPE, "hidden_size": 64}, tie_word_embeddings=True),  # pyright: ignore[reportArgumentType]
    "norms of heads": Qwen3Config(**SHAPE, head_dim=16),
}
ENDS = tuple(range(40, 52))


def filled(model: Any, *, seed: int = 1) -> Any:
    """The model, with adapters that change what it computes, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def adapted(
    config: PreTrainedConfig = CONFIGS["plain"], *, dtype: torch.dtype = torch.float32, **lora: Any
) -> Any:
    """A model under a float32 adapter, with numbers in all its parts."""
    model = random_model(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    lora = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **lora}
    return filled(sum_low_rank(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))))


@torch.inference_mode()
def hidden_states(model: Any, *, tokens: int = 12) -> tuple[Tensor, Tensor]:
    """Of two sequences: by fused layers and by the model's own."""
    backbone = Backbone.of(model)
    calls = can_use_fused(backbone)
    assert calls is not None
    ids, places = torch.arange(2 * tokens) % 97, torch.arange(tokens).repeat(2)
    made = FusedBackbone(backbone, calls, positions=tokens)
    return made.hidden(ids, places, TwoRows()), backbone.hidden(ids, places, TwoRows())


def check_close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    absolute, relative = (2e-5, 1e-4) if found.dtype == torch.float32 else (5e-2, 5e-2)
    torch.testing.assert_close(found, wanted, atol=absolute, rtol=relative)


def check_as_exact(model: Any, *, tokens: int = 12) -> None:
    """The hidden states are those of the model's own layers, and in 16 bits as near to those in
    double precision, however each adds up."""
    found, wanted = hidden_states(model, tokens=tokens)
    check_close(found, wanted)
    if found.dtype == torch.float32:
        return
    ids, places = torch.arange(2 * tokens) % 97, torch.arange(tokens).repeat(2)
    with torch.no_grad():
        exact = Backbone.of(deepcopy(model).double()).hidden(ids, places, TwoRows())
    error, usual = ((each - exact).square().mean().sqrt() for each in (found, wanted))
    assert error < 1.03 * usual


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_those_of_the_adapted_model(name: str, dtype: torch.dtype) -> None:
    check_as_exact(adapted(CONFIGS[name], dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rank", [1, 16, 33])
@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_any_rank_and_any_number_of_rows(rank: int, tokens: int, dtype: torch.dtype) -> None:
    check_as_exact(adapted(r=rank, lora_alpha=rank, dtype=dtype), tokens=tokens)


@pytest.mark.parametrize(
    "targets",
    [["q_proj"], ["k_proj", "down_proj"], ["v_proj", "up_proj"], ["gate_proj"], ["o_proj"]],
    ids=lambda targets: "-".join(targets),
)
def test_adapters_of_some_layers_only(targets: list[str]) -> None:
    model = adapted(target_modules=targets, layers_to_transform=[0, 2])
    with model.disable_adapter():
        _, plain = hidden_states(model)
    found, wanted = hidden_states(model)
    check_close(found, wanted)
    assert not torch.allclose(plain, wanted, atol=1e-2)


def test_ranks_and_scales_of_every_layer() -> None:
    pattern = {"q_proj": 2, "v_proj": 7, "up_proj": 1, "layers.1.mlp.down_proj": 19}
    scales = {"k_proj": 1, "gate_proj": 9}
    check_close(*hidden_states(adapted(rank_pattern=pattern, alpha_pattern=scales)))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    model, before, found = adapted(r=33), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(hidden_states(model, tokens=150)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


def test_dropout_is_off_in_rollouts() -> None:
    check_close(*hidden_states(adapted(lora_dropout=0.5)))


@pytest.mark.parametrize("how", ["merged", "disabled", "another beside it"])
def test_only_active_adapters_are_added(how: str) -> None:
    model = adapted()
    if how == "merged":
        model.merge_adapter()
    elif how == "disabled":
        model.base_model.disable_adapter_layers()
    else:
        model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
        filled(model, seed=2)
    check_close(*hidden_states(model))


def second_active(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "second"])
    return filled(model)


REFUSED = {
    "DoRA": lambda: adapted(use_dora=True),
    "bias": lambda: adapted(CONFIGS["biases"], lora_bias=True),
    "two at once": lambda: second_active(adapted()),
    "16 bits": lambda: adapted(dtype=torch.bfloat16).bfloat16(),
    "IA3": lambda: get_peft_model(
        random_model(CONFIGS["plain"]),
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    ),
    "embeddings": lambda: adapted(target_modules=["embed_tokens"]),
    "whole norms": lambda: adapted(modules_to_save=["norm"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_left_to_the_models_own_layers(name: str) -> None:
    model = REFUSED[name]()
    assert not only_known_parts(Backbone.of(model))
    assert can_use_fused(Backbone.of(model)) is None
    policy = tiny_policy(model, ends=ENDS)
    atol = 1e-4 if model.dtype == torch.float32 else 0.25
    contract.check_logprobs(GroupEngine(policy), policy, atol=atol)


# Rollouts


def ragged(**lora: Any) -> Policy:
    """An adapted model of which several tokens end completions."""
    return tiny_policy(adapted(**lora), ends=ENDS)


def written(
    engine: GroupEngine, *, temperature: float = 1.0
) -> list[tuple[list[int], list[float]]]:
    sampling = Sampling(max_tokens=16, temperature=temperature)
    groups = sorted(engine.generate(make_requests(), sampling), key=lambda group: group.stream)
    return [(list(one.tokens), list(one.logprobs)) for g in groups for one in g.completions]


@pytest.mark.parametrize("rank", [1, 16])
def test_an_engine_writes_the_same_without_kernels(rank: int) -> None:
    policy = ragged(r=rank, lora_alpha=2 * rank)
    engine = GroupEngine(policy, max_rows=8)
    assert engine.calls is not None
    found = written(engine, temperature=0.0)
    with using(Reference()):
        wanted = written(GroupEngine(policy, max_rows=8), temperature=0.0)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_log_probabilities_are_those_of_the_learner() -> None:
    policy = ragged()
    contract.check_logprobs(GroupEngine(policy, max_rows=8), policy)


def test_completions_continue_bit_for_bit() -> None:
    engine = GroupEngine(ragged(), max_rows=9)
    assert engine.exact_continuation
    contract.check_continuation(engine, Sampling(max_tokens=10))


def test_requests_may_come_late_and_in_pieces() -> None:
    engine = GroupEngine(ragged(), max_rows=9)
    contract.check_lazy_requests(engine)
    contract.check_pieces(engine)


def test_published_versions() -> None:
    policy = ragged()
    contract.check_versions(GroupEngine(policy, max_rows=9), policy)


def test_an_engine_follows_the_adapter() -> None:
    policy = ragged()
    engine = GroupEngine(policy, max_rows=8)
    before = written(engine)
    filled(policy.model, seed=5)
    engine.publish(PublishedWeights(version=1, named={}))
    after = written(engine)
    assert before != after
    assert after == written(GroupEngine(policy, max_rows=8))
