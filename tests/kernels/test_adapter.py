"""The products of a low-rank adapter: those of its layers, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.kernels import add_low_rank, using
from groupwise.kernels.adapter import BLOCK
from groupwise.kernels.interface import BACKENDS


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
