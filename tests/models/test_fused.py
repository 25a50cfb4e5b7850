"""Fused layers: the numbers of the model's own, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from groupwise.kernels import GroupCache, Reference, active, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.models import (
    AdapterSettings,
    Backbone,
    FusedBackbone,
    can_use_fused,
    fused,
    only_known_parts,
    with_adapter,
)
from groupwise.models.backbone import TwoRows
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts import GroupEngine
from groupwise.rollouts.engines.attention import Decode, Prefill
from groupwise.testing.engines import make_requests
from groupwise.types import Sampling
from groupwise.updates.learner import recompute_activations
from tiny_models import CONFIGS, SHAPE, letter_tokenizer, random_model, tiny_model, tiny_policy

pytestmark = pytest.mark.skipif(
    not isinstance(active(), Auto) or compiled() is None, reason="there are no CPU kernels here"
)
MADE_LIKE_LLAMA = sorted(set(CONFIGS) - {"gemma2"})


def model_of(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose layers, biases and norms included, all show in what it computes."""
    model = random_model(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def turned(rope_type: str, **rope: object) -> PreTrainedModel:
    """A model with a rotation of its own."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **rope}
    return model_of(LlamaConfig(**SHAPE, rope_parameters=parameters))


@torch.inference_mode()
def both(model: PreTrainedModel, *, tokens: int = 24, first: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states of two sequences: by fused layers and by the model's own."""
    backbone = Backbone.of(model)
    calls = can_use_fused(backbone)
    assert calls is not None
    ids, places = torch.arange(2 * tokens) % 97, (first + torch.arange(tokens)).repeat(2)
    made = FusedBackbone(backbone, calls, positions=first + tokens)
    return made.hidden(ids, places, TwoRows()), backbone.hidden(ids, places, TwoRows())


@pytest.mark.parametrize("name", MADE_LIKE_LLAMA)
def test_hidden_states_are_those_of_the_model(name: str) -> None:
    found, wanted = both(model_of(CONFIGS[name]()))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MADE_LIKE_LLAMA)
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_in_16_bits_what_layers_store_is_rounded_as_theirs(name: str, tokens: int) -> None:
    """Only sums in another order differ, and few of them after rounding; but one that is rounded
    the other way may reach all later tokens of its sequence."""
    found, wanted = both(model_of(CONFIGS[name](), dtype=torch.bfloat16), tokens=tokens)
    assert found.dtype == wanted.dtype == torch.bfloat16
    changed = (found != wanted).unflatten(0, (2, tokens)).float().mean((1, 2))
    assert changed.min() < 0.05
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def test_in_16_bits_another_rotation_is_found_under_small_weights() -> None:
    """It turns pairs of neighbours. Where queries and keys are small, rounding changes more."""
    model = model_of(HeliumConfig(**SHAPE, head_dim=8), dtype=torch.bfloat16)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(0.2)
    backbone = Backbone.of(model)
    assert only_known_parts(backbone)
    assert can_use_fused(backbone) is None


@pytest.mark.parametrize("sizes", [1, 15, 16, 17, 31, 150])
def test_any_number_of_rows(sizes: int) -> None:
    """Rows that fill up a product reach neither attention nor what is returned."""
    found, wanted = both(model_of(CONFIGS["qwen2"]()), tokens=sizes)
    assert len(found) == 2 * sizes
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    model, before, found = model_of(CONFIGS[name]()), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(both(model, tokens=300)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    "part", ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm"]
)
def test_a_part_of_another_size_is_refused(part: str) -> None:
    """The kernels would read beyond its end."""
    model = model_of(CONFIGS["qwen3"]())
    backbone = Backbone.of(model)
    calls = can_use_fused(backbone)
    assert calls is not None
    norm = backbone.decoder.layers[1].get_submodule(part)
    norm.weight = torch.nn.Parameter(norm.weight[:-1].clone())
    with pytest.raises(ValueError, match="do not fit together"):
        FusedBackbone(backbone, calls, positions=5)


@pytest.mark.parametrize("part", ["o_proj", "up_proj", "down_proj"])
def test_a_product_of_another_size_is_refused(part: str) -> None:
    backbone = Backbone.of(model_of(CONFIGS["llama"]()))
    calls = can_use_fused(backbone)
    assert calls is not None
    layer = backbone.decoder.layers[0]
    linear = getattr(layer.self_attn if part == "o_proj" else layer.mlp, part)
    linear.weight = torch.nn.Parameter(torch.cat([linear.weight] * 2, 1))
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        FusedBackbone(backbone, calls, positions=5)


def fused_backbone() -> tuple[Backbone, FusedBackbone]:
    backbone = Backbone.of(model_of(CONFIGS["llama"]()))
    calls = can_use_fused(backbone)
    assert calls is not None
    return backbone, FusedBackbone(backbone, calls, positions=6)


@pytest.mark.parametrize(
    "positions",
    [torch.arange(6).int(), torch.arange(5), torch.arange(1, 7), torch.arange(-1, 5)],
    ids=["type", "count", "late", "early"],
)
def test_positions_that_no_rotation_is_there_for_are_refused(positions: Tensor) -> None:
    with pytest.raises((ValueError, TypeError)):
        fused_backbone()[1].hidden(torch.arange(6), positions, TwoRows())


def test_states_of_another_type_are_refused() -> None:
    """They would be read, and written, as if they were as long as float32."""
    backbone, made = fused_backbone()
    backbone.model.get_input_embeddings().register_forward_hook(lambda *call: call[2].bfloat16())
    with pytest.raises(ValueError, match="float32"):
        made.hidden(torch.arange(6), torch.arange(6), TwoRows())
    assert can_use_fused(backbone) is None


def test_attention_of_another_type_is_refused() -> None:
    _, made = fused_backbone()
    rows = TwoRows()
    with pytest.raises(ValueError, match="attention"), torch.inference_mode():
        made.hidden(
            torch.arange(6), torch.arange(6), lambda *given, **call: rows(*given, **call).bfloat16()
        )


GROUP, STEPS = 3, 20


def grid() -> GroupCache:
    """Room for two prompts and their completions."""
    return GroupCache(
        slots=2, group=GROUP, prompt_capacity=7, suffix_capacity=STEPS, device=torch.device("cpu")
    )


def decoding_step(cache: GroupCache, clock: int, rows: Tensor) -> tuple[Decode, Tensor, Tensor]:
    """How it attends; its tokens and positions."""
    slot, time = rows // GROUP, torch.full_like(rows, clock)
    decode = Decode(
        cache=cache, slot=slot, sample=rows % GROUP, time=time, used=2, rows=rows, clock=clock,
        prompt=7, suffix=clock + 1, aligned=False,
    )  # fmt: skip
    return decode, (rows + 7 * clock) % 97, cache.prompt_length[slot] + time


@torch.inference_mode()
def written(made: FusedBackbone) -> tuple[list[Tensor], GroupCache]:
    """States of two prompts and of all steps, from which rows drop out; and the cache after it."""
    cache = grid()
    cache.prompt_length[:] = torch.tensor([7, 4])
    prefill = Prefill(cache=cache, slots=torch.arange(2), time=7)
    states = [made.hidden(torch.arange(14), torch.arange(7).repeat(2), prefill)]
    for clock in range(STEPS):
        rows = torch.tensor([0, 1, 2, 3, 4, 5] if clock < 9 else [1, 3, 4])
        attend, tokens, positions = decoding_step(cache, clock, rows)
        states.append(made.hidden(tokens, positions, attend))
    return states, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, head_dim=32),
        Qwen3Config(**{**SHAPE, "head_dim": 16}),  # pyright: ignore[reportArgumentType]
        MistralConfig(**SHAPE, head_dim=16, sliding_window=5),
    ],
    ids=["llama", "qwen3", "mistral"],
)
def test_a_step_in_one_call_is_that_of_its_layers(
    config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    backbone = Backbone.of(model_of(config, dtype=dtype))
    accuracy = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0, "rtol": 0}
    calls = can_use_fused(backbone)
    assert calls is not None
    made = FusedBackbone(backbone, calls, positions=7 + STEPS)
    assert made.decoder.attends
    made.decoder.attends = False
    wanted, kept = written(made)
    made.decoder.attends, caches = True, []  # which live on
    for _ in range(2):
        found, held = written(made)
        caches.append(held)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **accuracy)
        for layer, cached in kept.layers.items():
            for one, other in zip(held.layers[layer].tensors(), cached.tensors(), strict=True):
                torch.testing.assert_close(one, other, **accuracy)


def step_backbone(dim: int = 16) -> FusedBackbone:
    backbone = Backbone.of(model_of(LlamaConfig(**SHAPE, head_dim=dim)))
    calls = can_use_fused(backbone)
    assert calls is not None
    return FusedBackbone(backbone, calls, positions=6)


def test_heads_that_the_kernel_does_not_attend_are_attended_apart() -> None:
    assert step_backbone(16).decoder.attends
    assert not step_backbone(8).decoder.attends


@pytest.mark.parametrize(
    "like", [torch.zeros(1, 2, 32), torch.zeros(1, 1, 16), torch.zeros(1, 2, 16).double()]
)
def test_a_step_refuses_keys_of_another_kind(like: Tensor) -> None:
    """It would read and write beyond them."""
    made, cache = step_backbone(), grid()
    assert (made.decoder.layers[0].key_heads, made.decoder.layers[0].dim) == (2, 16)
    for index in range(len(made.decoder.layers)):
        cache.layer(index, like)
    attend, tokens, positions = decoding_step(cache, 0, torch.arange(6))
    with pytest.raises(ValueError, match="must have the heads"), torch.inference_mode():
        made.hidden(tokens, positions, attend)


@pytest.mark.parametrize("part", ["slot", "time"])
def test_a_step_refuses_places_of_another_kind(part: str) -> None:
    made, cache = step_backbone(), grid()
    for index in range(len(made.decoder.layers)):
        cache.layer(index, torch.zeros(1, 2, 16))
    attend, tokens, positions = decoding_step(cache, 0, torch.arange(6))
    with torch.inference_mode():
        made.hidden(tokens, positions, attend)
    for changed in (getattr(attend, part)[:5], getattr(attend, part).int()):
        with pytest.raises((ValueError, TypeError)), torch.inference_mode():
            made.hidden(tokens, positions, replace(attend, **{part: changed}))
    with pytest.raises(ValueError, match="rows"), torch.inference_mode():
        made.hidden(tokens[:5], positions[:5], attend)


@pytest.mark.parametrize("part", ["norm", "rotation"])
def test_parts_of_another_type_are_refused(part: str) -> None:
    backbone = Backbone.of(model_of(CONFIGS["llama"]()))
    calls = can_use_fused(backbone)
    assert calls is not None
    if part == "norm":
        backbone.decoder.layers[0].input_layernorm.to(torch.bfloat16)
    else:
        backbone.decoder.norm.to(torch.float64)  # whose type the rotation has
    with pytest.raises(ValueError, match="one dtype|no kernel computes a decoder"):
        FusedBackbone(backbone, calls, positions=5)


def test_weights_that_move_away_are_still_there() -> None:
    """What a kernel was told of lies in memory of its own."""
    backbone, made = fused_backbone()
    ids, places = torch.arange(6), torch.arange(6)
    wanted = made.hidden(ids, places, TwoRows())
    embedding = backbone.model.get_input_embeddings().weight
    for parameter in backbone.decoder.parameters():
        if parameter is not embedding:
            parameter.untyped_storage().resize_(0)
    assert torch.equal(made.hidden(ids, places, TwoRows()), wanted)


@pytest.mark.parametrize("dim", [2, 6, 24, 80])
def test_heads_of_any_size_are_turned(dim: int) -> None:
    found, wanted = both(model_of(LlamaConfig(**{**SHAPE, "head_dim": dim})))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)


def test_biases_of_every_product() -> None:
    config = LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)  # pyright: ignore[reportArgumentType]
    found, wanted = both(model_of(config))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_positions_far_from_those_of_the_trial(rope: dict[str, object]) -> None:
    found, wanted = both(turned(**rope), first=300)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)


LONG: dict[str, object] = {
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


def late_scale() -> PreTrainedModel:
    """Queries are scaled from position 256 on."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.3,
    }
    return model_of(Ministral3Config(**SHAPE, head_dim=8, rope_parameters=rope))


def hooked() -> PreTrainedModel:
    model = model_of(CONFIGS["llama"]())
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out)
    return model


def hooked_before() -> PreTrainedModel:
    model = model_of(CONFIGS["llama"]())
    model.model.norm.register_forward_pre_hook(lambda module, args: args)
    return model


def gated() -> PreTrainedModel:
    """A norm that learns a shift, which is still nothing."""
    model = model_of(CONFIGS["llama"]())
    model.model.norm.bias = torch.nn.Parameter(torch.zeros(32))
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: model_of(CONFIGS["gemma2"]()), id="other norms"),
        pytest.param(lambda: model_of(LlamaConfig(**SHAPE, hidden_act="gelu")), id="activation"),
        pytest.param(
            lambda: model_of(GraniteConfig(**SHAPE, residual_multiplier=0.5)), id="residual"
        ),
        pytest.param(lambda: turned("dynamic", factor=2.0), id="rotation"),
        pytest.param(lambda: turned("longrope", **LONG), id="long rotation"),
        pytest.param(late_scale, id="late scale"),
        pytest.param(hooked, id="hook"),
        pytest.param(hooked_before, id="hook before"),
        pytest.param(gated, id="gate"),
    ],
)
def test_models_that_are_made_in_another_way_stay_what_they_are(
    make: Callable[[], PreTrainedModel],
) -> None:
    assert can_use_fused(Backbone.of(make())) is None
    assert can_use_fused(Backbone.of(make().bfloat16())) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_so_do_models_of_other_types(dtype: torch.dtype) -> None:
    assert can_use_fused(Backbone.of(model_of(CONFIGS["llama"](), dtype=dtype))) is None


def test_so_do_models_beyond_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone.of(model_of(CONFIGS["llama"]()))
    linear = [m for m in backbone.model.modules() if isinstance(m, torch.nn.Linear)]
    held = sum(m.weight.nbytes for m in linear)
    monkeypatch.setattr(fused, "COPY_LIMIT", held)
    assert can_use_fused(backbone) is not None
    monkeypatch.setattr(fused, "COPY_LIMIT", held - 1)
    assert can_use_fused(backbone) is None


def test_logits_are_those_of_the_head() -> None:
    backbone = replace(Backbone.of(model_of(CONFIGS["llama"]())), softcap=2.0)
    calls = can_use_fused(backbone)
    assert calls is not None
    states = torch.randn(5, SHAPE["hidden_size"])

    def check() -> None:
        made = FusedBackbone(backbone, calls, positions=5)
        with torch.inference_mode():
            torch.testing.assert_close(
                made.logits(states), backbone.logits(states), atol=1e-5, rtol=1e-5
            )

    check()
    backbone.head.register_forward_hook(lambda module, args, out: out * 2)
    check()


def test_checkpointing_does_not_hinder() -> None:
    """It lets the embeddings' output be differentiated, by a hook that concerns no rollout."""
    model = model_of(CONFIGS["llama"]())
    recompute_activations(model)
    assert model.get_input_embeddings()._forward_hooks
    assert can_use_fused(Backbone.of(model)) is not None


def test_an_engine_follows_the_weights() -> None:
    """New weights are used as soon as the engine is told of them, and nothing is kept between
    rollouts."""
    policy = tiny_policy(tiny_model("qwen2"))
    assert policy.tokenizer.vocab_size == len(letter_tokenizer())
    engine, sampling = GroupEngine(policy), Sampling(max_tokens=6)
    assert engine.calls is not None

    def written() -> list[tuple[float, ...]]:
        return [
            tuple(one.logprobs)
            for group in sorted(engine.generate(make_requests(3), sampling), key=lambda g: g.stream)
            for one in group.completions
        ]

    before = written()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    engine.publish(PublishedWeights(version=1, named={}))
    after = written()
    assert before != after
    engine = GroupEngine(policy)
    assert written() == after


def test_an_adapter_that_is_added_later_is_not_passed_over() -> None:
    policy = tiny_policy(model_of(CONFIGS["llama"]()))
    engine, sampling = GroupEngine(policy), Sampling(max_tokens=6)
    assert engine.calls is not None
    adapted = with_adapter(policy, AdapterSettings(rank=2)).model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    found = [c.tokens for g in engine.generate(make_requests(3), sampling) for c in g.completions]
    with using(Reference()):
        again = list(GroupEngine(policy).generate(make_requests(3), sampling))
    wanted = [c.tokens for group in again for c in group.completions]
    assert found == wanted


def test_a_model_that_is_changed_later_is_computed_by_its_own_layers() -> None:
    policy = tiny_policy(model_of(CONFIGS["llama"]()))
    engine, sampling = GroupEngine(policy), Sampling(max_tokens=6)
    assert engine.calls is not None
    policy.model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    policy.model.model.layers[1].mlp = torch.nn.Sequential(policy.model.model.layers[1].mlp)
    found = [c.tokens for g in engine.generate(make_requests(3), sampling) for c in g.completions]
    again = GroupEngine(policy)
    wanted = [c.tokens for g in again.generate(make_requests(3), sampling) for c in g.completions]
    assert found == wanted
