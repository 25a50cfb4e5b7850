"""The products of a low-rank adapter: those of its layers, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.kernels import Reference, add_low_rank, using
from groupwise.kernels.interface import BACKENDS
from groupwise.kernels.reference import BLOCK


def plain(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """As PEFT writes it."""
    return (base + (x.to(a.dtype) @ a.t()) @ b.t() * scaling).to(base.dtype)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("rows", [(1,), (2, 5), (1, BLOCK), (3, BLOCK + 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_the_layers(
    dtype: torch.dtype, rows: tuple[int, ...], kernels: str
) -> None:
    torch.manual_seed(0)
    given = [torch.randn(*rows, 48), torch.randn(*rows, 40), torch.randn(8, 40), torch.randn(48, 8)]
    slope = torch.randn(*rows, 48)
    found = []
    for function in (add_low_rank, plain):
        base, x, a, b = (t.clone().requires_grad_() for t in given)
        with using(BACKENDS[kernels]()):
            out = function(base.to(dtype), x.to(dtype), a, b, scaling=0.3)
            (out.float() * slope).sum().backward()
        found.append([out.detach(), *(each.grad for each in (base, x, a, b))])
    rounding = 2e-6 if dtype == torch.float32 else 1e-2
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.dtype == other.dtype
        assert (one - other).norm() <= rounding * other.norm()


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "rank"), [(1, 1, 1, 1), (65, 300, 33, 17), (130, 15, 70, 65)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compute_what_their_definition_does(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, rank: int
) -> None:
    """In sizes that fill no tile, with and without what the product is added to."""
    torch.manual_seed(0)
    x, onto = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    a, b, inner = torch.randn(rank, inputs), torch.randn(outputs, rank), torch.randn(rows, rank)
    own, reference = BACKENDS["auto"](), Reference()
    for given in (onto, None):
        found = own.low_rank(x, a, b, onto=given, scaling=0.3)
        wanted = reference.low_rank(x, a, b, onto=given, scaling=0.3)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            rounding = 1e-5 if one.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(one, other, atol=1e-4, rtol=rounding)
    found = own.low_rank_gradient(inner, x, scaling=0.3)
    wanted = reference.low_rank_gradient(inner, x, scaling=0.3)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_depends_on_its_row_and_column_alone(dtype: torch.dtype) -> None:
    """Not on its place in a tile, where some multiplications and additions might be fused."""
    torch.manual_seed(0)
    x, onto = torch.randn(23, 40).to(dtype), torch.randn(23, 96).to(dtype)
    a, b, own = torch.randn(16, 40), torch.randn(96, 16), BACKENDS["auto"]()
    whole, _ = own.low_rank(x, a, b, onto=onto, scaling=0.37)
    for row in range(23):
        some = slice(row, row + 1)
        alone, _ = own.low_rank(x[some], a, b, onto=onto[some], scaling=0.37)
        assert torch.equal(alone, whole[some]), row
    for columns in (95, 81, 66, 33, 7):
        some, _ = own.low_rank(x, a, b[:columns], onto=onto[:, :columns], scaling=0.37)
        assert torch.equal(some, whole[:, :columns]), columns


def test_nothing_but_its_input_is_kept_of_the_size_of_the_rows() -> None:
    x, base = torch.randn(300, 64).bfloat16(), torch.randn(300, 512).bfloat16()
    a, b = torch.randn(4, 64, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        add_low_rank(base, x, a, b, scaling=2.0)
    large = [t for t in kept if t.numel() > 300 * 4]
    assert {t.data_ptr() for t in large} <= {x.data_ptr(), b.data_ptr()}


def test_what_needs_no_gradient_gets_none() -> None:
    x, base = torch.randn(3, 6), torch.randn(3, 5, requires_grad=True)
    a, b = torch.randn(2, 6, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    add_low_rank(base, x, a, b, scaling=1.0).sum().backward()
    assert x.grad is None and base.grad is not None
