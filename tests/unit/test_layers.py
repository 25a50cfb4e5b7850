"""Linear layers of an update by products of our own: the numbers and gradients of PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from groupwise.models import layers, own_products
from groupwise.models.kernels import compiled, multiply
from groupwise.stages.base_model import small_policy
from groupwise.types import Batch
from groupwise.updates import OptimizerSettings, TorchLearner

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no g++")


def turned(x: Tensor) -> Tensor:
    """The same matrix, laid out by columns."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("rows", [1, 8, 17])
@pytest.mark.parametrize("columns", [1, 32, 70])
@pytest.mark.parametrize("depth", [1, 16, 37])
def test_a_product_of_any_size_in_any_layout(rows: int, columns: int, depth: int) -> None:
    left, right = torch.randn(rows, depth), torch.randn(depth, columns)
    wanted = (left.double() @ right.double()).float()
    for one in (left, turned(left), torch.randn(rows, 2 * depth)[:, ::2].copy_(left)):
        for other in (right, turned(right)):
            torch.testing.assert_close(multiply(one, other), wanted, atol=1e-5, rtol=1e-5)


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of x and of the parameters that learn."""
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = [p for p in layer.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *weights])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_output_and_gradients_are_those_of_the_layer(bias: bool, learns: bool) -> None:
    layer = nn.Sequential(nn.Linear(300, 260, bias=bias), nn.Tanh(), nn.Linear(260, 300))
    layer[0].requires_grad_(learns)
    x = torch.randn(2, 37, 300)
    with own_products(layer):
        found = gradients(layer, x)
    wanted = gradients(copy.deepcopy(layer).double(), x.double())
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_layers_are_used_where_they_suit_and_given_back() -> None:
    inside = [nn.Linear(300, 300), nn.Linear(8, 8), nn.Linear(300, 300).to(torch.bfloat16)]
    model = nn.ModuleList(inside)
    with pytest.raises(KeyError), own_products(model):
        assert ["forward" in vars(layer) for layer in model] == [True, False, False]
        raise KeyError
    assert not any("forward" in vars(layer) for layer in model)


def test_without_a_compiler_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "compiled", lambda: None)
    model = nn.Sequential(nn.Linear(300, 300))
    with own_products(model):
        assert "forward" not in vars(model[0])


def test_an_update_uses_them_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy(hidden=256, layers=2, heads=2, key_value_heads=2, feed_forward=384)
    learner = TorchLearner(policy, optimizer=OptimizerSettings())
    tokens = torch.randint(12, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        prompts=(tokens[0, :5],),
        group=torch.tensor([0, 0]),
        tokens=tokens,
        length=torch.tensor([9, 9]),
        mask=torch.ones(2, 9, dtype=torch.bool),
        advantage=torch.ones(2, 9),
        weight=torch.ones(2, 9),
    )
    calls: list[int] = []

    def counted(left: Tensor, right: Tensor) -> Tensor:
        calls.append(len(left))
        return multiply(left, right)

    def gradient() -> Tensor:
        return learner.gradient(batch, lambda logp, entropy, batch: -logp)

    monkeypatch.setattr(layers, "multiply", counted)
    own = gradient()
    products = 7 * 2  # of a layer; layers
    assert len(calls) == 3 * products
    monkeypatch.setattr(layers, "compiled", lambda: None)
    plain = gradient()
    assert len(calls) == 3 * products
    assert (own - plain).norm() <= 1e-5 * plain.norm()
