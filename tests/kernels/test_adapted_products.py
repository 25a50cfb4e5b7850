"""Products with packed weights, and the low-rank products that adapters add to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.kernels import Affine, LowRank, active, cpu
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.kernels.packed import PackedLinear

pytestmark = pytest.mark.skipif(
    not isinstance(active(), Auto) or compiled() is None, reason="there are no CPU kernels here"
)
SIZES = [(1, 1, 1), (15, 3, 2), (33, 7, 40), (96, 600, 33)]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(columns: int, depth: int, rank: int, *, seed: int) -> Affine:
    """A layer with a bias and an adapter."""
    weight, bias = numbers(columns, depth, seed=seed), numbers(columns, seed=seed + 1)
    a, b = numbers(rank, depth, seed=seed + 2), numbers(columns, rank, seed=seed + 3)
    return Affine(weight, bias, LowRank(a=a, b=b, scaling=1.5))


def product(x: Tensor, of: Affine) -> Tensor:
    """x · Wᵀ + b + s · (x · Aᵀ) · Bᵀ in float64."""
    weight, bias, added = of
    assert bias is not None
    out = F.linear(x.double(), weight.double(), bias.double())
    if added is None:
        return out
    return out + added.scaling * (x.double() @ added.a.double().t() @ added.b.double().t())


def check_close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= 3e-6 * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 2, 9, 129])
@pytest.mark.parametrize(("columns", "depth", "rank"), SIZES)
def test_an_adapter_is_added(rows: int, columns: int, depth: int, rank: int) -> None:
    """To the product, to its gate, to both and to neither; sizes that fill no tile."""
    x, onto = numbers(rows, depth, seed=9), numbers(rows, columns, seed=10)
    up, gate = layer(columns, depth, rank, seed=1), layer(columns, depth, rank + 1, seed=20)
    check_close(PackedLinear(*up)(x, onto=onto), product(x, up) + onto)
    for one in (up, up._replace(added=None)):
        for other in (gate, gate._replace(added=None)):
            wanted = F.silu(product(x, other)) * product(x, one)
            check_close(PackedLinear(*one, gate=other)(x), wanted)


@pytest.mark.parametrize(("rows", "columns", "depth", "rank"), [(1, 5, 6, 1), (9, 33, 520, 40)])
def test_in_16_bits_the_product_is_rounded_before_and_after(
    rows: int, columns: int, depth: int, rank: int
) -> None:
    """The adapter stays in float32, as beside a layer of the model."""
    x = numbers(rows, depth, seed=9).bfloat16()
    weight, bias, added = layer(columns, depth, rank, seed=1)
    assert bias is not None and added is not None
    weight, bias = weight.bfloat16(), bias.bfloat16()
    found = PackedLinear(weight, bias, added)(x)
    base = product(x, Affine(weight, bias)).bfloat16()
    low_rank = added.scaling * (x.double() @ added.a.double().t() @ added.b.double().t())
    wanted = (base.double() + low_rank).bfloat16()
    assert found.dtype == torch.bfloat16 and (found != wanted).float().mean() < 0.02
    torch.testing.assert_close(found, wanted, atol=0.06, rtol=0.02)


@pytest.mark.parametrize("sizes", [(32, 16, 16), (5, 40, 9), (16, 0, 50), (1, 1, 1)])
def test_what_stands_beside_the_blocks_of_adapters_is_not_stored(sizes: tuple[int, ...]) -> None:
    """Layers with the same inputs are one product, whose B has a block for each."""
    ranks = [4, 3, 7][: len(sizes)]
    parts = [layer(size, 300, rank, seed=size) for size, rank in zip(sizes, ranks, strict=True)]
    x, added = numbers(19, 300, seed=9), [each.added for each in parts]
    joined = LowRank(
        a=torch.cat([each.a for each in added if each]),
        b=torch.block_diag(*(each.b for each in added if each)),
        scaling=1.5,
    )
    weight = torch.cat([each.weight for each in parts])
    packed = PackedLinear(weight, torch.cat([b for _, b, _ in parts if b is not None]), joined)
    check_close(packed(x), torch.cat([product(x, each) for each in parts], 1))
    if sizes[0] == 32:  # Every 16 columns are of one layer.
        assert packed.adapter is not None and packed.adapter.b.shape[1] == max(ranks)


def test_an_adapter_that_adds_zeros_costs_nothing() -> None:
    weight, bias, added = layer(40, 64, 16, seed=1)
    assert added is not None
    assert PackedLinear(weight, bias, replace(added, b=torch.zeros(40, 16))).adapter is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_with_an_adapter_is_the_same_beside_others_and_on_more_threads(
    dtype: torch.dtype, gated: bool
) -> None:
    """Sums over parts of the depth have one order."""
    first, second = (layer(48, 700, 20, seed=seed) for seed in (1, 20))
    up, gate = (each._replace(weight=each.weight.to(dtype)) for each in (first, second))
    own = PackedLinear(*up, gate=gate if gated else None)
    x, threads = numbers(150, 700, seed=9).to(dtype), torch.get_num_threads()
    found = own(x)
    assert torch.equal(torch.cat([own(rows) for rows in x.split(29)]), found)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(own(x), found)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wrong", ["inputs", "outputs", "rank", "dtype"])
def test_adapters_that_do_not_fit_are_refused(wrong: str) -> None:
    """Their numbers would be read beyond the end, or as if they were as long as float32."""
    a, b = torch.zeros(3, 8 + (wrong == "inputs")), torch.zeros(4 + (wrong == "outputs"), 3)
    if wrong == "rank":
        b = b[:, :2]
    if wrong == "dtype":
        a, b = a.bfloat16(), b.bfloat16()
    with pytest.raises((ValueError, TypeError)):
        PackedLinear(torch.zeros(4, 8), None, LowRank(a=a, b=b, scaling=1.0))


@pytest.mark.parametrize("wrong", ["inputs", "outputs", "dtype"])
def test_a_gate_that_does_not_fit_is_refused(wrong: str) -> None:
    """It is packed by a kernel, which would read beyond its end."""
    gate = torch.zeros(4 - (wrong == "outputs"), 8 - (wrong == "inputs"))
    gate = gate.bfloat16() if wrong == "dtype" else gate
    with pytest.raises(ValueError, match="gate"):
        PackedLinear(torch.zeros(4, 8), None, gate=Affine(gate, None))


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 70])
@pytest.mark.parametrize("inputs", [2, 64, 90])
def test_a_row_is_the_same_beside_others_and_between_products_of_pytorch(
    rows: int, inputs: int
) -> None:
    """Where a processor has AMX, both use its registers, and each sets them as it needs them."""
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, inputs, generator=random).bfloat16() for n in (40, rows))
    own, exact = PackedLinear(weight, None), x.double() @ weight.double().t()
    before = x @ weight.t()
    found = own(x)
    assert torch.equal(x @ weight.t(), before)
    assert torch.equal(torch.cat([own(row) for row in x.split(1)]), found)
    assert (found.double() - exact).norm() <= 3e-3 * exact.norm()


def test_mkl_multiplies_large_matrices_of_float32_on_processors_of_intel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, small, large = torch.zeros(4, 512), torch.zeros(512, 511), torch.zeros(512, 512)
    for intel in (False, True):
        monkeypatch.setattr(cpu, "of_intel", lambda intel=intel: intel)
        assert cpu.can_multiply(x, small) and cpu.can_multiply(x, large) is not intel
