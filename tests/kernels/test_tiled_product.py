"""Products of bfloat16 in the tiles of AMX, and the gradient of a linear layer's weight by them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.kernels import active
from groupwise.kernels.auto import Auto
from groupwise.kernels.cpu import DEEP, can_multiply_in_tiles, matmul, multiplies_tiles
from groupwise.kernels.layers import use_kernels

pytestmark = pytest.mark.skipif(
    not isinstance(active(), Auto) or not multiplies_tiles(), reason="this processor has no AMX"
)
SHAPES = [
    (1, 1, 1),
    (17, 70, 37),
    (32, 32, 32),
    (300, 33, 129),
    (31, 290, 64),
    (520, 48, 31),
    (97, 130, 64),  # panels of the left factor are read in place
    (130, 97, 512),
    (64, 64, 4200),  # in two parts
    (40, 70, 9001),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def narrow(rows: int, columns: int, *, turned: bool = False, seed: int = 0) -> Tensor:
    """A matrix, by rows or by columns, within a larger one of NaNs: what is read beyond its edges
    shows."""
    shape = (columns, rows) if turned else (rows, columns)
    whole = torch.full((shape[0] + 40, shape[1] + 40), torch.nan).bfloat16()
    inside = whole[3 : 3 + shape[0], 5 : 5 + shape[1]]
    inside.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return inside.t() if turned else inside


def factors(rows: int, columns: int, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two factors in each layout."""
    for left in (False, True):
        for right in (False, True):
            yield (
                narrow(rows, depth, turned=left),
                narrow(depth, columns, turned=right, seed=1),
            )


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_a_product_in_any_layout(rows: int, columns: int, depth: int) -> None:
    """Rounded once, or added to float32 without rounding. Memory that was freed holds NaNs."""
    for left, right in factors(rows, columns, depth):
        wanted = left.double() @ right.double()
        size = wanted.abs().max().item()
        torch.full((1 << 18,), torch.nan)
        found = matmul(left, right)
        assert found.dtype == torch.bfloat16
        assert (found != wanted.bfloat16()).double().mean() < 0.01
        total = torch.randn(rows, columns)
        exact = total + wanted
        assert matmul(left, right, onto=total) is total
        torch.testing.assert_close(total.double(), exact, atol=2e-6 * size, rtol=2e-6)
        rounded = torch.ones(rows, columns).bfloat16()
        matmul(left, right, onto=rounded)
        assert (rounded != (wanted + 1).bfloat16()).double().mean() < 0.01


def test_a_product_of_nothing() -> None:
    for rows, columns, depth in ((0, 40, 40), (40, 0, 40), (40, 40, 0)):
        left, right = narrow(rows, depth, turned=True), narrow(depth, columns)
        assert torch.equal(matmul(left, right), torch.zeros(rows, columns).bfloat16())
        total = torch.ones(rows, columns)
        assert torch.equal(matmul(left, right, onto=total), torch.ones(rows, columns))


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    left, right = narrow(40, 70, turned=True), narrow(70, 50)
    left[35, 69], right[0, 49] = torch.nan, torch.inf
    found = matmul(left, right).isfinite()
    assert not found[35].any() and not found[:, 49].any()
    assert found[torch.arange(40) != 35][:, :49].all()


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1500, 300, 700), (300, 1500, 90)])
def test_a_product_is_the_same_with_any_number_of_threads(
    rows: int, columns: int, depth: int
) -> None:
    for left, right in factors(rows, columns, depth):
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(matmul(left, right))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_product_is_as_accurate_as_pytorchs_which_finds_its_registers_unchanged() -> None:
    dy, x = narrow(700, 400), narrow(700, 300)
    exact = dy.double().t() @ x.double()
    before = dy.t() @ x
    found = matmul(dy.t(), x)
    assert torch.equal(dy.t() @ x, before)
    assert (found - exact).norm() <= 1.001 * (before - exact).norm()


def test_a_product_without_memory_is_refused() -> None:
    one = torch.ones(4100).bfloat16()  # too many sums for a product in parts
    left, right = one.as_strided((4100, 2**40), (1, 0)), one.as_strided((2**40, 4100), (0, 1))
    with pytest.raises(MemoryError, match="out of memory"):
        matmul(left, right)


def test_large_gradients_of_weights_are_for_tiles() -> None:
    dy, x = narrow(DEEP, 256), narrow(DEEP, 256)
    assert can_multiply_in_tiles(dy.t(), x)
    for left, right in (
        (dy.t()[:, :-1], x[:-1]),
        (dy.t()[:-1], x),
        (narrow(256, DEEP), x),
        (dy.t(), narrow(DEEP, 256, turned=True)),
        (dy.t().half(), x.half()),
    ):
        assert not can_multiply_in_tiles(left, right)


def test_other_large_products_are_for_tiles_on_several_threads() -> None:
    x, weight = narrow(DEEP, 256), narrow(256, 256)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for right in (weight, weight.t()):
            assert can_multiply_in_tiles(x, right) == (threads > 1)
            assert not can_multiply_in_tiles(x[:-1], right)
            assert not can_multiply_in_tiles(x, right[:, :-1])
        assert not can_multiply_in_tiles(x[:, ::2], weight[::2])


def test_gradients_of_a_head_are_added_in_tiles() -> None:
    dy, x = narrow(DEEP, 512), narrow(DEEP, 256)
    backend, exact = Auto(), dy.double().t() @ x.double()
    total = backend.add_matmul(None, dy.t(), x)
    assert total.dtype == torch.float32
    assert backend.add_matmul(total, dy.t(), x) is total
    assert (total - 2 * exact).norm() <= 1e-6 * exact.norm()  # rounded nowhere
    assert torch.equal(backend.matmul(dy.t(), x), matmul(dy.t(), x))


def layer(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 300, bias=bias).bfloat16()


def own(part: nn.Linear) -> AbstractContextManager[None]:
    return use_kernels(nn.ModuleList([part]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("shape", [(200, 256), (2, 150, 256), (3, 256), (256,), (0, 256)])
def test_a_layer_is_as_accurate_as_pytorchs(
    learns: bool, bias: bool, shape: tuple[int, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    part, x = layer(bias=bias), torch.randn(shape).bfloat16()
    part.weight.requires_grad_(learns)
    grad, found = torch.randn(*shape[:-1], 300).bfloat16(), []
    for module, context in (
        (part, own(part)), (copy.deepcopy(part), nullcontext()),
        (copy.deepcopy(part).double(), nullcontext()),
    ):  # fmt: skip
        given = x.to(module.weight.dtype, copy=True).requires_grad_()
        with context:
            assert ("forward" in vars(module)) == (module is part)
            out = module(given)
            out.backward(grad.to(out.dtype))
        trained = [p for p in module.parameters() if p.requires_grad]
        found.append([out.detach(), given.grad, *(p.grad for p in trained)])
    for mine, theirs, exact in zip(*found, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine - exact).norm() <= 1.01 * (theirs - exact).norm()


def test_the_input_of_a_frozen_layer_is_not_saved() -> None:
    part, x = layer().requires_grad_(False), torch.randn(200, 256).bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with own(part), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: x):
        part(x)
    assert not saved


def test_gradients_are_added_to_those_that_a_weight_has() -> None:
    part, x = layer(), torch.randn(200, 256).bfloat16()
    seen: list[Tensor] = []
    part.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with own(part):
        for _ in range(2):
            part(x).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[1], 2 * seen[0])


def test_gradients_through_checkpoints_and_hooks_of_saved_tensors() -> None:
    part, x = layer(), torch.randn(200, 256).bfloat16().requires_grad_()
    grad, found = torch.randn(200, 300).bfloat16(), []

    def gradients(out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out, [x, *part.parameters()], grad))

    with own(part):
        found.append(gradients(part(x)))
        found.append(gradients(checkpoint(part, x, use_reentrant=False)))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            found.append(gradients(part(x)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_small_layers_and_other_types_are_left_to_pytorch() -> None:
    small, large = nn.Linear(64, 64).bfloat16(), layer()
    with use_kernels(nn.ModuleList([small, large])):
        assert ["forward" in vars(each) for each in (small, large)] == [False, True]
        with pytest.raises(RuntimeError):
            large(torch.randn(4, 256))
        large.requires_grad_(False)  # since
        x = torch.randn(4, 256).bfloat16().requires_grad_()
        large(x).sum().backward()
        assert large.weight.grad is None and x.grad is not None
