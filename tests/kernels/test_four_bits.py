"""Weights in 4 bits: the numbers of bitsandbytes, and the products of the whole matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import groupwise.testing.engines as contract
from groupwise.integrations.trl import GRPOConfig
from groupwise.integrations.trl.loading import policy as policy_of
from groupwise.kernels import Affine, FourBits, LowRank, active, is_four_bit_linear
from groupwise.kernels import layers as training
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.kernels.layers import use_kernels
from groupwise.kernels.packed import PackedLinear
from groupwise.models import (
    AdapterSettings,
    Backbone,
    FusedBackbone,
    can_use_fused,
    load_policy,
    save_policy,
)
from groupwise.models.backbone import TwoRows
from groupwise.rollouts import GroupEngine
from groupwise.training.stages.base_model import small_policy

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
pytestmark = pytest.mark.skipif(
    not isinstance(active(), Auto) or compiled() is None, reason="there are no CPU kernels here"
)
TYPES = [torch.float32, torch.bfloat16]
SIZES = [(32, 64), (50, 192), (129, 128), (300, 320)]


def layer_of(
    outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False, **how: Any
) -> Any:
    """A layer with random weights in 4 bits, laid out for training."""
    how = {"quant_type": "nf4", "compress_statistics": True, **how}
    made = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=bias, compute_dtype=dtype).to(dtype)
    weight = torch.randn(outputs, inputs, dtype=dtype) * 0.1
    made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **how)
    made = made.to("cpu")
    made.support_avx512bf16_for_cpu = False
    return made


def whole(layer: Any) -> Tensor:
    """The matrix by bitsandbytes."""
    found = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return found.as_subclass(Tensor)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", [{}, {"compress_statistics": False}, {"quant_type": "fp4"}])
def test_the_numbers_are_those_of_bitsandbytes(how: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = layer_of(50, 192, dtype, **how)
    assert is_four_bit_linear(layer)
    assert torch.equal(FourBits.of(layer).whole(), whole(layer))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 7, 16, 150])
def test_products_have_the_bits_of_those_with_the_whole_matrix(
    rows: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    outputs, inputs = size
    layer, gate = layer_of(*size, dtype, bias=True), layer_of(*size, dtype)
    a, b = torch.randn(5, inputs), torch.randn(outputs, 5)
    added, x = LowRank(a=a, b=b, scaling=0.5), torch.randn(rows, inputs).to(dtype)
    small, large = (
        (
            PackedLinear(weight(layer), layer.bias)(x),
            PackedLinear(weight(layer), layer.bias, added)(x),
            PackedLinear(weight(layer), layer.bias, gate=Affine(weight(gate), None))(x),
        )
        for weight in (FourBits.of, whole)
    )
    for found, wanted in zip(small, large, strict=True):
        assert wanted.abs().max() > 0 and torch.equal(found, wanted)


def test_one_matrix_above_the_other() -> None:
    parts = [layer_of(rows, 64, torch.float32) for rows in (16, 48, 3)]
    found = FourBits.joined([FourBits.of(each) for each in parts])
    assert found.shape == (67, 64)
    assert torch.equal(found.whole(), torch.cat([whole(each) for each in parts]))


def test_other_storage_is_left_to_bitsandbytes() -> None:
    assert not is_four_bit_linear(nn.Linear(64, 64))
    assert not is_four_bit_linear(layer_of(64, 128, torch.float32, blocksize=128))
    assert not is_four_bit_linear(layer_of(64, 96, torch.float32))
    packed = layer_of(64, 64, torch.bfloat16)
    packed.weight.quant_state.packing_format_for_cpu = True
    assert not is_four_bit_linear(packed)
    routed: Any = layer_of(64, 64, torch.bfloat16)
    routed.forward = lambda x: x
    assert not is_four_bit_linear(routed)
    mixed = layer_of(64, 64, torch.bfloat16)
    mixed.compute_dtype = torch.float32
    with pytest.raises(ValueError, match=r"weights of torch\.bfloat16 are multiplied in"):
        FourBits.of(mixed)


def test_parts_that_do_not_fit_are_refused() -> None:
    small = FourBits.of(layer_of(64, 64, torch.float32))
    with pytest.raises(ValueError, match="as many bits"):
        PackedLinear(small, None, gate=Affine(small.whole(), None))
    others = [
        replace(small, scales=torch.zeros(64, 2)),
        replace(small, codes=torch.zeros(64, 20, dtype=torch.uint8)),
        replace(small, codes=torch.zeros(32, 64, dtype=torch.uint8).t()),
    ]
    for other in others:
        with pytest.raises(ValueError, match="a scale per 64"):
            PackedLinear(other, None)
    fp4 = FourBits.of(layer_of(64, 64, torch.float32, quant_type="fp4"))
    with pytest.raises(ValueError, match="same levels"):
        PackedLinear(small, None, gate=Affine(fp4, None))
    with pytest.raises(ValueError, match="same levels"):
        FourBits.joined([small, fp4])


# Updates


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_an_update(
    bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor on which the kernels multiply this dtype."""
    monkeypatch.setattr(training, "multiplies_in_updates", lambda *_, **__: True)
    torch.manual_seed(2)
    layer = layer_of(300, 320, dtype, bias=bias)
    x, grad = torch.randn(2, 9, 320).to(dtype), torch.randn(2, 9, 300).to(dtype)
    found = []
    for own in (True, False):
        given = x.clone().requires_grad_()
        with use_kernels(layer if own else nn.Identity()):
            assert ("forward" in vars(layer)) is own
            out = layer(given)
        out.backward(grad)
        assert given.grad is not None and out.dtype == dtype
        found.append((out, given.grad))
    for own, wanted in zip(*found, strict=True):
        scale = float(wanted.detach().abs().max())
        limit = scale * (1e-5 if dtype == torch.float32 else 1e-2)
        torch.testing.assert_close(own, wanted, atol=limit, rtol=0)
    if dtype == torch.bfloat16:  # rounded once, with the bias
        exact = x.double() @ whole(layer).double().t() + (0 if layer.bias is None else layer.bias)
        near, far = ((out.double() - exact).norm() for out, _ in found)
        assert near <= 1.05 * far


def test_a_layer_computes_in_another_dtype_by_itself() -> None:
    """bitsandbytes converts what it is given."""
    layer = layer_of(300, 320, torch.float32)
    x = torch.randn(3, 320, dtype=torch.float16)
    with use_kernels(layer):
        assert torch.equal(layer(x), type(layer).forward(layer, x))


def test_a_layer_that_was_laid_out_anew_is_left_to_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In evaluation on a processor with AVX512-BF16, after it was recognised."""
    monkeypatch.setattr(training, "multiplies_in_updates", lambda *_, **__: True)
    layer, x = layer_of(512, 256, torch.float32), torch.randn(5, 256)
    routed = use_kernels(layer)
    layer.weight.quant_state.packing_format_for_cpu = True
    monkeypatch.setattr(type(layer), "forward", lambda _, given: given)
    with routed:
        assert "forward" in vars(layer) and layer(x) is x


@pytest.mark.parametrize("shape", [(256,), (0, 256), (2, 0, 256), (1, 3, 256)])
def test_inputs_of_any_shape_and_biases_of_another_dtype(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "multiplies_in_updates", lambda *_, **__: True)
    layer, x = layer_of(320, 256, torch.float32, bias=True), torch.randn(shape)
    layer.bias.data = torch.randn(320).bfloat16()
    with use_kernels(layer):
        found = layer(x)
    assert found.dtype == torch.float32 and found.shape == (*shape[:-1], 320)
    torch.testing.assert_close(found, x @ whole(layer).t() + layer.bias.float())


# Rollouts


def four_bit_policy(folder: Path, dtype: str, **shape: Any) -> Any:
    """A model with an adapter that changes what it computes."""
    shape = {"hidden": 128, "layers": 2, "heads": 4, "key_value_heads": 2, **shape}
    save_policy(small_policy(**shape, feed_forward=192), folder)
    how = AdapterSettings(rank=3, alpha=6)
    policy = load_policy(folder, dtype=dtype, quantization="nf4", adapter=how)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_fused_layers_read_4_bits(dtype: str, tmp_path: Path) -> None:
    policy = four_bit_policy(tmp_path, dtype)
    backbone = Backbone.of(policy.model.eval())
    calls = can_use_fused(backbone)
    assert calls is not None
    ids, places = torch.arange(24) % 47, torch.arange(12).repeat(2)
    made = FusedBackbone(backbone, calls, positions=12)
    found, wanted = made.hidden(ids, places, TwoRows()), backbone.hidden(ids, places, TwoRows())
    limit = 1e-4 if dtype == "float32" else 2e-2
    assert (found - wanted).norm() <= limit * wanted.norm()
    with policy.model.disable_adapter():
        assert (backbone.hidden(ids, places, TwoRows()) - wanted).norm() > 0.05 * wanted.norm()


def test_sampled_log_probabilities_are_those_of_the_4_bit_model(tmp_path: Path) -> None:
    policy = replace(four_bit_policy(tmp_path, "float32"), end_tokens=frozenset(range(0, 500, 10)))
    engine = GroupEngine(policy)
    assert engine.calls is not None and engine.exact_continuation
    contract.check_logprobs(engine, policy)


def test_a_model_at_hand_stays_in_the_layout_of_training(tmp_path: Path) -> None:
    """Otherwise its first rollout may lay it out anew, and no gradient passes."""
    made = four_bit_policy(tmp_path / "model", "float32")
    small = [x for x in made.model.modules() if hasattr(x, "support_avx512bf16_for_cpu")]
    for layer in small:
        layer.support_avx512bf16_for_cpu = True
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    assert policy_of(made.model, args, tokenizer=made.tokenizer).model is made.model
    assert len(small) == 14 and not any(x.support_avx512bf16_for_cpu for x in small)
