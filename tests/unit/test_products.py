"""oneDNN's products in place of PyTorch's: the same numbers, gradients included, and a model that
is as before after them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from groupwise.models import differentiable_products, laid_out_weights, product
from groupwise.models import products as module

pytestmark = pytest.mark.skipif(
    not module._types(), reason="this build of PyTorch has no oneDNN for the CPU"
)
TYPES = [t for t in (torch.float32, torch.bfloat16) if t in module._types()]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers that are large enough, with and without a bias, and one that is not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 384), nn.SiLU(), nn.Linear(384, 256, bias=False), nn.Linear(256, 8)
    ).to(dtype)


def gap(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_a_product_is_the_product(rows: int, dtype: torch.dtype) -> None:
    left, weight = numbers(rows, 256, dtype=dtype), numbers(512, 256, dtype=dtype, seed=1)
    found = product(left, weight)
    assert found.dtype == dtype
    exact = left.double() @ weight.double().t()
    assert gap(found, exact) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_a_product_with_a_transposed_factor() -> None:
    left, weight = numbers(300, 512), numbers(512, 256, seed=1)
    assert gap(product(left, weight.t()), left.double() @ weight.double()) < 1e-6


def test_a_product_is_differentiated_where_gradients_are_recorded() -> None:
    left, weight = numbers(7, 256), numbers(512, 256, seed=1).requires_grad_()
    product(left, weight).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, left.sum(0).expand(512, -1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_are_left_to_pytorch(dtype: torch.dtype) -> None:
    left, weight = numbers(7, 256, dtype=dtype), numbers(512, 256, dtype=dtype, seed=1)
    assert torch.equal(product(left, weight), left @ weight.t())


@pytest.mark.parametrize("dtype", TYPES)
def test_laid_out_weights_give_the_same_numbers(dtype: torch.dtype) -> None:
    model, x = layers(dtype), numbers(5, 256, dtype=dtype)
    with torch.inference_mode():
        plain = model(x)
        with laid_out_weights(model, rows=64):
            assert [("forward" in vars(layer)) for layer in model] == [True, False, True, False]
            assert gap(model(x[None])[0], plain) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not any("forward" in vars(layer) for layer in model)


def test_gradients_flow_through_a_model_whose_weights_are_laid_out() -> None:
    model, x = layers(), numbers(5, 256)
    with laid_out_weights(model, rows=64):
        model(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_weights_are_laid_out_anew_for_every_block() -> None:
    model, x = layers(), numbers(5, 256)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(2)
            plain = model(x)
            with laid_out_weights(model, rows=64):
                assert gap(model(x), plain) < 1e-5


def test_a_model_is_as_before_after_an_error() -> None:
    model = layers()
    with pytest.raises(KeyError), laid_out_weights(model, rows=64), differentiable_products(model):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in model)


def test_weights_beyond_the_room_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    monkeypatch.setattr(module, "ROOM", model[0].weight.nbytes)
    with laid_out_weights(model, rows=64):
        assert [("forward" in vars(layer)) for layer in model] == [True, False, False, False]


def test_gradients_are_those_of_pytorch() -> None:
    model, x = layers(), numbers(3, 40, 256).requires_grad_()
    grads = []
    for fast in (False, True):
        model.zero_grad()
        x.grad = None
        if fast:
            with differentiable_products(model):
                assert "forward" in vars(model[0])
                loss = model(x).square().sum()
        else:
            loss = model(x).square().sum()
        loss.backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, fast in zip(*grads, strict=True):
        assert gap(fast, plain) < 1e-5


def test_a_frozen_weight_gets_no_gradient_and_its_input_does() -> None:
    model, x = layers().requires_grad_(requires_grad=False), numbers(3, 256).requires_grad_()
    with differentiable_products(model):
        model(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())
