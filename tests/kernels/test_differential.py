"""Every kernel against its definition, operation by operation: outputs, gradients, limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from groupwise.kernels import Affine, GroupCache, LayerCache, Reference, active, onednn, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled, library
from groupwise.kernels.cpu import can_use_attention as attends
from groupwise.kernels.cpu import draw_tokens, matmul, multiplies_tiles, rms_norm
from groupwise.kernels.packed import PackedLinear as Linear
from groupwise.kernels.tree_attention import tree_attention
from groupwise.rollouts.engines.attention import Decode, Prefill
from groupwise.rollouts.sampling import draw
from groupwise.types import Sampling
from trees import GROUPS, attended, check_attention, laid_out, tensors

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no g++")
TYPES = [t for t in (torch.float32, torch.bfloat16) if t in onednn.dtypes()]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gap(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


# Products, norms


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 129])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (15, 3), (16, 16), (33, 7), (96, 64)])
def test_a_product_is_the_product(rows: int, columns: int, depth: int) -> None:
    """With and without a bias, a gate and what it is added to; sizes that fill no tile."""
    x, onto = numbers(rows, depth), numbers(rows, columns, seed=1)
    weight, gate = numbers(columns, depth, seed=2), numbers(columns, depth, seed=3)
    bias, of_gate = numbers(columns, seed=4), numbers(columns, seed=5)
    plain = x.double() @ weight.double().t()
    gated = F.silu(x.double() @ gate.double().t() + of_gate)
    for found, wanted in (
        (Linear(weight, None)(x), plain),
        (Linear(weight, bias)(x), plain + bias),
        (Linear(weight, bias)(x, onto=onto), plain + bias + onto),
        (Linear(weight, bias, gate=Affine(gate, of_gate))(x), gated * (plain + bias)),
        (Linear(weight, None, gate=Affine(gate, of_gate))(x, onto=onto), gated * plain + onto),
    ):
        assert found.shape == wanted.shape
        assert gap(found, wanted) < 2e-6


def test_the_activation_of_any_number() -> None:
    """Far below nought it is nothing, where e^-x is more than a float32 holds."""
    x = torch.tensor([-1e30, -1e4, -200, -100, -89, -88.5, -20, -1, 0, 1, 20, 89, 200, 1e4])
    one = torch.ones(1, 1)
    found = Linear(torch.zeros(1, 1), torch.ones(1), gate=Affine(one, None))(x[:, None])[:, 0]
    # Not one of the last, where up · 0 is none.
    torch.testing.assert_close(found[1:], F.silu(x[1:].double()).float(), rtol=5e-7, atol=1e-30)
    assert abs(found[0].item()) < 1e-6
    spread = torch.linspace(-80, 80, 10001)
    found = Linear(torch.zeros(1, 1), torch.ones(1), gate=Affine(one, None))(spread[:, None])[:, 0]
    wanted = F.silu(spread.double())
    assert ((found - wanted) / wanted)[wanted != 0].abs().max() < 5e-7


@pytest.mark.parametrize("size", [1, 15, 16, 33, 896])
def test_a_norm_is_the_norm(size: int) -> None:
    x, weight = numbers(3, 2, size) * 5, numbers(size, seed=1)
    for given in (x, x.transpose(0, 1), x[:0]):
        exact = F.rms_norm(given.double(), (size,), weight.double(), 1e-5)
        torch.testing.assert_close(rms_norm(given, weight, 1e-5), exact.float())


def test_what_is_drawn_is_what_pytorch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniform = 3 * numbers(300, 2, 500)[:, 0], torch.rand(600, dtype=torch.float64)[::2]
    ours = draw(logits, uniform, Sampling(max_tokens=1, temperature=0.7))
    with using(Reference()):
        theirs = draw(logits, uniform, Sampling(max_tokens=1, temperature=0.7))
    assert (ours.tokens != theirs.tokens).sum() <= 1  # where rounding decides
    same = ours.tokens == theirs.tokens
    torch.testing.assert_close(ours.logp[same], theirs.logp[same], atol=1e-5, rtol=1e-5)
    assert (ours.tokens.dtype, ours.logp.dtype) == (theirs.tokens.dtype, theirs.logp.dtype)


@pytest.mark.parametrize("temperature", [-1.0, 0.0, torch.inf, torch.nan])
def test_no_token_is_drawn_at_such_a_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        draw_tokens(numbers(2, 40), torch.zeros(2), temperature=temperature)


def test_no_rows_no_tokens() -> None:
    tokens, logp = draw_tokens(numbers(0, 40), torch.zeros(0), temperature=1.0)
    assert tokens.shape == logp.shape == (0,)
    with pytest.raises(ValueError, match="no token"):
        draw_tokens(numbers(2, 0), torch.zeros(2), temperature=1.0)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 5, 6), (9, 33, 64), (150, 96, 130)])
def test_a_product_in_16_bits_is_rounded_once(rows: int, outputs: int, inputs: int) -> None:
    """Sums are in float32; the product, its activation and `onto` are rounded as by PyTorch."""
    x, weight = numbers(rows, inputs).bfloat16(), numbers(outputs, inputs).bfloat16()
    bias, onto = numbers(outputs).bfloat16(), numbers(rows, outputs).bfloat16()
    found = Linear(weight, bias)(x, onto=onto)
    exact = F.linear(x.double(), weight.double(), bias.double())
    wanted = exact.bfloat16() + onto
    assert found.dtype == torch.bfloat16 and (found != wanted).float().mean() < 0.01
    torch.testing.assert_close(found, wanted, atol=0.06, rtol=0.02)
    gate = numbers(outputs, inputs).bfloat16()
    found = Linear(weight, bias, gate=Affine(gate, None))(x)
    product = F.linear(x.double(), gate.double()).bfloat16()
    wanted = F.silu(product) * exact.bfloat16()
    assert (found != wanted).float().mean() < 0.01
    torch.testing.assert_close(found, wanted, atol=0.06, rtol=0.02)


def test_products_that_no_kernel_computes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        Linear(numbers(4, 8).half(), None)
    if library().multiplies_pairs():
        with pytest.raises(ValueError, match="even"):
            Linear(numbers(4, 7).bfloat16(), None)


def test_sizes_that_do_not_belong_together_are_refused() -> None:
    """A model is tried out by what is refused; beyond their end, weights are not to be read."""
    with pytest.raises(ValueError):
        Linear(numbers(4, 8), None)(numbers(2, 6))
    with pytest.raises((ValueError, TypeError)):
        Linear(numbers(4, 8), None)(numbers(2, 8), onto=numbers(1, 4))
    with pytest.raises((ValueError, TypeError)):
        Linear(numbers(4, 8), None)(numbers(2, 8).bfloat16())  # pyright: ignore[reportArgumentType]
    with pytest.raises((ValueError, TypeError)):
        rms_norm(numbers(2, 6), numbers(4), 1e-5)
    with pytest.raises((ValueError, TypeError)):
        draw_tokens(numbers(2, 6), torch.zeros(1).double(), temperature=1.0)


def by_columns(x: Tensor) -> Tensor:
    """The same matrix, laid out by columns."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize("columns", [1, 32, 70])
@pytest.mark.parametrize("depth", [1, 16, 37])
def test_a_product_of_any_size_in_any_layout(rows: int, columns: int, depth: int) -> None:
    left, right = torch.randn(rows, depth), torch.randn(depth, columns)
    wanted = (left.double() @ right.double()).float()
    for one in (left, by_columns(left), torch.randn(rows, 2 * depth)[:, ::2].copy_(left)):
        for other in (right, by_columns(right)):
            torch.testing.assert_close(matmul(one, other), wanted, atol=1e-5, rtol=1e-5)
            total = torch.ones(rows, columns)
            assert matmul(one, other, onto=total) is total
            torch.testing.assert_close(total, wanted + 1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (17, 70, 37), (130, 32, 16)])
def test_a_product_in_16_bits_is_summed_in_float32(rows: int, columns: int, depth: int) -> None:
    """Rounded once where the result is in 16 bits, and not at all where it is added in float32."""
    left, right = numbers(rows, depth).bfloat16(), numbers(depth, columns, seed=1).bfloat16()
    wanted = (left.double() @ right.double()).float()
    for one in (
        left,
        by_columns(left),
        torch.randn(rows, 2 * depth).bfloat16()[:, ::2].copy_(left),
    ):
        for other in (right, by_columns(right)):
            found = matmul(one, other)
            assert found.dtype == torch.bfloat16
            assert (found != wanted.bfloat16()).float().mean() < 0.01
            total = torch.ones(rows, columns)
            assert matmul(one, other, onto=total) is total
            torch.testing.assert_close(total, wanted + 1, atol=1e-5, rtol=1e-5)
            narrow = torch.ones(rows, columns).bfloat16()
            assert (
                matmul(one, other, onto=narrow) != (wanted + 1).bfloat16()
            ).float().mean() < 0.01
    with pytest.raises(ValueError, match="like the factors"):
        matmul(left, right, onto=torch.ones(rows, columns).half())
    with pytest.raises(ValueError, match="dtypes"):
        matmul(left, right.float())


@pytest.mark.parametrize(("rows", "columns"), [(17, 70), (70, 17), (130, 32)])
def test_a_deep_product_has_the_bits_of_its_parts_added_in_order(rows: int, columns: int) -> None:
    """Too deep for any second-level cache, so it is computed in parts."""
    depth, part = 20_001, 1_000
    left, right = numbers(rows, depth), numbers(depth, columns, seed=1)
    more = numbers(rows, columns, seed=2)
    for dtype in (torch.float32, *([] if multiplies_tiles() else [torch.bfloat16])):
        one, other, onto = left.to(dtype), right.to(dtype), more.to(dtype)
        alone, added = torch.zeros(rows, columns), onto.float().clone()
        for k in range(0, depth, part):
            for total in (alone, added):
                matmul(one[:, k : k + part], other[k : k + part], onto=total)
        for first in (one, by_columns(one)):
            for second in (other, by_columns(other)):
                assert torch.equal(matmul(first, second), alone.to(dtype))
                assert torch.equal(matmul(first, second, onto=onto.clone()), added.to(dtype))
        assert gap(alone, one.double() @ other.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_product_records_its_gradient_where_one_is_needed(dtype: torch.dtype) -> None:
    x, weight = numbers(16, 24).to(dtype), numbers(40, 24, seed=1).to(dtype).requires_grad_()
    with torch.no_grad():
        alone = Auto().linear(x, weight)
    found = Auto().linear(x, weight)
    found.sum().backward()
    assert weight.grad is not None and not alone.requires_grad
    torch.testing.assert_close(found.detach(), alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad, x.sum(0).expand(40, 24), atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_added_in_float32_at_least(dtype: torch.dtype) -> None:
    left, right = torch.randn(40, 24).to(dtype), torch.randn(24, 300).to(dtype)
    wanted = left.double() @ right.double()
    total = Auto().add_matmul(None, left, right)
    again = Auto().add_matmul(total, left, right)
    assert again is total
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    accuracy = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(total.double(), 2 * wanted, atol=accuracy, rtol=accuracy)
    torch.testing.assert_close(
        Auto().matmul(left, right).double(), wanted, atol=1e-1, rtol=accuracy
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_linear_of_every_type(rows: int, dtype: torch.dtype) -> None:
    left, weight = numbers(rows, 256, dtype=dtype), numbers(512, 256, dtype=dtype, seed=1)
    found = Auto().linear(left, weight)
    assert found.dtype == dtype
    exact = left.double() @ weight.double().t()
    assert gap(found, exact) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_a_product_with_a_transposed_factor() -> None:
    left, weight = numbers(300, 512), numbers(512, 256, seed=1)
    assert gap(Auto().linear(left, weight.t()), left.double() @ weight.double()) < 1e-6


def test_a_product_is_differentiated_where_gradients_are_recorded() -> None:
    left, weight = numbers(7, 256), numbers(512, 256, seed=1).requires_grad_()
    Auto().linear(left, weight).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, left.sum(0).expand(512, -1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_are_left_to_pytorch(dtype: torch.dtype) -> None:
    left, weight = numbers(7, 256, dtype=dtype), numbers(512, 256, dtype=dtype, seed=1)
    assert torch.equal(Auto().linear(left, weight), left @ weight.t())


# Attention


def scene(
    *,
    lengths: tuple[int, ...] = (5, 0, 9, 1),
    ages: tuple[int, ...] = (0, 3, 17, 6),
    rows: tuple[int, ...] = (0, 2, 3, 4, 6, 7, 8),
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 16,
) -> tuple[Decode, tuple[Tensor, Tensor, Tensor]]:
    """A step of a grid of slots with three completions each, of which `rows` live; every cell of
    the grid holds something, whether it is to be seen or not."""
    used, group, clock = len(lengths), 3, max(20, *ages)
    grid = GroupCache(
        slots=used + 1, group=group, prompt_capacity=max(11, *lengths),
        suffix_capacity=max(19, max(ages) + 1), device=torch.device("cpu"),
    )  # fmt: skip
    grid.prompt_length[:used] = torch.tensor(lengths)
    grid.start[:used] = clock - torch.tensor(ages)
    live = torch.tensor(rows)
    query = numbers(len(rows), heads, dim)
    key, value = (numbers(len(rows), key_heads, dim, seed=seed) for seed in (1, 2))
    for seed, tensor in enumerate(grid.layer(0, key).tensors(), 3):
        tensor.copy_(numbers(*tensor.shape, seed=seed))
    decode = Decode(
        cache=grid, used=used, rows=live, slot=live // group, sample=live % group,
        time=torch.tensor(ages)[live // group], clock=clock, prompt=max(lengths),
        suffix=max(ages) + 1, aligned=len(set(lengths)) == len(set(ages)) == 1,
    )  # fmt: skip
    return decode, (query, key, value)


def both(
    decode: Decode, given: tuple[Tensor, Tensor, Tensor], *, window: int | None, scaling: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a step gives and the grid after it: by the kernel and by PyTorch."""
    assert attends(*given, softcap=None)
    store, found = decode.cache.layer(0, given[1]), []
    before = [tensor.clone() for tensor in store.tensors()]
    for ours in (True, False):
        for tensor, old in zip(store.tensors(), before, strict=True):
            tensor.copy_(old)
        with using(Auto() if ours else Reference()):
            out = decode(0, *given, scaling=scaling, window=window, softcap=None)
        found.append((out, *(tensor.clone() for tensor in store.tensors())))
    return found[0], found[1]


def assert_as_reference(
    decode: Decode,
    given: tuple[Tensor, Tensor, Tensor],
    *,
    window: int | None = None,
    scaling: float | None = None,
) -> None:
    scaling = given[0].shape[-1] ** -0.5 if scaling is None else scaling
    found, wanted = both(decode, given, window=window, scaling=scaling)
    torch.testing.assert_close(found[0], wanted[0], atol=3e-6, rtol=1e-5)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("window", [None, 1, 2, 6, 10, 18, 22, 100])
def test_attention_of_slots_that_differ(window: int | None) -> None:
    """Windows that end in a suffix, at its first token, in a prompt and before it."""
    assert_as_reference(*scene(), window=window)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 30])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_new_prompts_attend_as_pytorch_lets_them(window: int | None, kind: torch.dtype) -> None:
    found = []
    for ours in (True, False):
        grid = GroupCache(
            slots=4, group=2, prompt_capacity=9, suffix_capacity=1, device=torch.device("cpu")
        )
        attend = Prefill(cache=grid, slots=torch.tensor([3, 0, 2]), time=7)
        query = numbers(21, 4, 16).to(kind)
        key, value = (numbers(21, 2, 16, seed=seed).to(kind) for seed in (1, 2))
        with using(Auto() if ours else Reference()):
            out = attend(0, query, key, value, scaling=0.2, window=window, softcap=None)
        assert out.dtype == kind
        found.append((out, grid.layers[0].prompt_key, grid.layers[0].prompt_value))
    exact = kind == torch.float32
    torch.testing.assert_close(found[0][0], found[1][0], atol=3e-6 if exact else 1e-2, rtol=1e-5)
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


def narrow(grid: GroupCache) -> GroupCache:
    """The same in bfloat16."""
    (layer,) = grid.layers.values()
    stored = {f.name: getattr(layer, f.name).to(torch.bfloat16) for f in fields(layer)}
    made = replace(grid, layers={0: LayerCache(**stored)})
    made.prompt_length, made.start = grid.prompt_length, grid.start
    return made


def hide_the_unseen(decode: Decode) -> None:
    """Nothing that a row does not see is a number."""
    prompt_key, prompt_value, *suffixes = decode.cache.layers[0].tensors()
    for slot, length in enumerate(decode.cache.prompt_length):
        prompt_key[slot, :, length:] = prompt_value[slot, :, length:] = torch.nan
    for suffix in suffixes:
        for slot, time in zip(decode.slot, decode.time, strict=True):
            suffix[slot, :, :, time + 1 :] = torch.nan


LONG = {"lengths": (300, 128, 33, 1), "ages": (127, 300, 16, 128)}
"""Beyond the blocks of keys that are attended to at once, and up to their ends."""


@pytest.mark.skipif(not isinstance(active(), Auto), reason="kernels are switched off")
@pytest.mark.parametrize("window", [None, 1, 8, 131, 300])
@pytest.mark.parametrize("grid", [{}, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(6, 2, 32), (14, 2, 64), (3, 3, 96), (17, 1, 128), (6, 2, 48)]
)
def test_attention_in_16_bits_is_that_in_float32_rounded(
    heads: int, key_heads: int, dim: int, grid: dict[str, tuple[int, ...]], window: int | None
) -> None:
    """Nearly all numbers are rounded to the same; a weight of 8 bits would change a fifth."""
    decode, given = scene(heads=heads, key_heads=key_heads, dim=dim, **grid)
    small = tuple(x.to(torch.bfloat16) for x in given)
    hide_the_unseen(decode)
    in_16_bits = replace(decode, cache=narrow(decode.cache))
    call = {"scaling": 0.2, "window": window, "softcap": None}
    found = in_16_bits(0, *small, **call)
    assert found.dtype == torch.bfloat16
    stored = in_16_bits.cache.layers[0].tensors()
    for mine, other in zip(decode.cache.layers[0].tensors(), stored, strict=True):
        mine.copy_(other)
    wanted = decode(0, *(x.float() for x in small), **call).to(torch.bfloat16)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-3)
    assert (found != wanted).float().mean() < 0.03
    for mine, other in zip(decode.cache.layers[0].tensors(), stored, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scaling", [0.0, -0.3])
def test_attention_may_be_scaled_by_any_number(scaling: float) -> None:
    assert_as_reference(*scene(), scaling=scaling)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_attention_of_long_prompts_and_completions(window: int | None) -> None:
    assert_as_reference(*scene(**LONG), window=window)


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(1, 1, 16), (3, 3, 48), (7, 1, 80), (14, 2, 128), (8, 4, 256)]
)
def test_attention_of_heads_of_every_kind(heads: int, key_heads: int, dim: int) -> None:
    assert_as_reference(*scene(heads=heads, key_heads=key_heads, dim=dim))
    assert_as_reference(*scene(heads=heads, key_heads=key_heads, dim=dim), window=8)


@pytest.mark.parametrize(
    ("lengths", "ages", "rows"),
    [
        ((9, 9), (4, 4), (0, 1, 2, 3, 4, 5)),
        ((9,), (0,), (2,)),
        ((1, 3), (16, 15), (1, 3, 4, 5)),
        ((0, 11, 2), (18, 0, 1), (0, 8)),
    ],
    ids=["alike", "one row", "whole vectors", "a slot without rows"],
)
def test_attention_of_grids_of_every_kind(
    lengths: tuple[int, ...], ages: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    assert_as_reference(*scene(lengths=lengths, ages=ages, rows=rows))


def test_attention_of_inputs_that_are_views() -> None:
    """Layers of `transformers` hand in heads by rows, turned round; fused ones slices of one
    product."""
    decode, given = scene()
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
    product = torch.cat(given, 1)
    slices = product.split([x.shape[1] for x in given], 1)
    for views in (turned, slices):
        assert not views[1].is_contiguous()
        assert_as_reference(decode, (views[0], views[1], views[2]))


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e15, -1e4])
def test_attention_to_extreme_scores(scale: float) -> None:
    """All weight is that of the highest one; none overflows. Sums of both are rounded apart, so
    queries and keys are whole numbers, of which no two are as good."""
    decode, (query, key, value) = scene(heads=2)
    store = decode.cache.layer(0, key)
    for place, tensor in enumerate((store.prompt_key, store.suffix_key, key)):
        whole = numbers(tensor.numel(), seed=place).argsort().view(tensor.shape) % 8191
        tensor.zero_()[..., 0] = whole[..., 0].float()
    query.zero_()[..., 0] = scale
    assert_as_reference(decode, (query, key, value), scaling=1.0)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FC0017F])
@pytest.mark.parametrize(
    ("place", "rows", "heads"),
    [
        ("query", [0], [0]),
        ("key", [0], [0, 1]),
        ("value", [0], [0, 1]),
        ("prompt_key", [0, 1], [0, 1]),
        ("prompt_value", [0, 1], [0, 1]),
        ("suffix_key", [], []),
        ("suffix_value", [], []),
    ],
)
def test_what_is_no_number_shows(place: str, rows: list[int], heads: list[int], bits: int) -> None:
    """In the heads that see it and in no other, whatever the last bits of a NaN are; the first cell
    of a suffix is the one that the first row writes."""
    decode, given = scene()
    store = decode.cache.layer(0, given[1])
    held = {"query": given[0], "key": given[1], "value": given[2], **vars(store)}[place]
    held.view(-1)[3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found, _ = both(decode, given, window=None, scaling=0.25)
    shown = torch.zeros(found[0].shape[:2], dtype=torch.bool)
    shown[torch.tensor(rows, dtype=torch.long)[:, None], heads] = True
    assert torch.equal(found[0].isnan().any(-1), shown)


def test_what_cannot_be_attended_is_left_to_pytorch() -> None:
    _, (query, key, value) = scene()
    assert attends(query, key, value, softcap=None)
    assert not attends(query, key, value, softcap=2.0)
    assert not attends(*(x[..., :8] for x in (query, key, value)), softcap=None)
    assert not attends(query.double(), key.double(), value.double(), softcap=None)
    assert not attends(query, key, value.repeat(1, 1, 2), softcap=None)
    assert not attends(query, key, value.to("meta"), softcap=None)
    assert not attends(query, key, value.mT.contiguous().mT, softcap=None)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (query, key, value)]
        assert not attends(fake[0], fake[1], fake[2], softcap=None)


# Threads


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything() -> list[Tensor]:
    """What every kernel gives, of sizes that are worth a second thread."""
    x, weight = numbers(300, 96), numbers(200, 96, seed=1)
    decode, given = scene(
        lengths=(11, 7) * 20, ages=(18, 3) * 20, rows=tuple(range(120)), heads=8, dim=64
    )
    found, _ = both(decode, given, window=None, scaling=0.25)
    gated = Linear(weight, None, gate=Affine(weight, None))
    drawn = draw_tokens(x, torch.linspace(0, 1, 300).double(), temperature=1.0)
    return [Linear(weight, None)(x), gated(x), rms_norm(x, weight[0], 1e-5), *drawn, *found]


def test_any_number_of_threads_gives_the_same_bits(threads: None) -> None:
    torch.set_num_threads(1)
    wanted = everything()
    for count in (2, 5, 1):
        torch.set_num_threads(count)
        assert all(map(torch.equal, everything(), wanted))


def test_threads_of_python_do_not_hinder_each_other() -> None:
    weight, x = numbers(200, 96), numbers(33, 96, seed=1)
    linear = Linear(weight, None)
    wanted, found = linear(x), []

    def work() -> None:
        with torch.inference_mode():
            found.extend(torch.equal(linear(x), wanted) for _ in range(50))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 200 and all(found)


def test_a_row_does_not_depend_on_its_company() -> None:
    """To the bit: a completion is the same whoever is written beside it."""
    x, weight = numbers(19, 96), numbers(40, 96, seed=1)
    linear = Linear(weight, None, gate=Affine(weight, None))
    whole = linear(x)
    for row in range(19):
        assert torch.equal(linear(x[row : row + 1])[0], whole[row])


# Tree attention


@pytest.fixture(params=[1, 2, 5])
def tree_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check_tree(
    given: list[Tensor], spans: Tensor, window: int | None, *, accuracy: float = 1e-5
) -> None:
    prompts = int((spans[2] < 0).sum())
    check_attention(
        lambda *qkv: tree_attention(*qkv, spans, prompts=prompts, scaling=0.3, window=window),
        lambda *qkv: attended(*qkv, spans, 0.3, window),
        given,
        accuracy=accuracy,
    )


@pytest.mark.parametrize("window", [None, 1, 5, 70, 200])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_a_token_sees_its_prompt_and_its_own_past(
    groups: list[tuple[int, list[int]]], window: int | None, tree_threads: int
) -> None:
    spans = laid_out(groups)
    check_tree(tensors(6, 2, 32, int(spans[1].sum())), spans, window)


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(1, 1, 16), (4, 4, 48), (8, 1, 128)])
def test_tree_attention_of_heads_of_every_kind(
    heads: int, key_heads: int, dim: int, tree_threads: int
) -> None:
    spans = laid_out([(40, [33, 7])])
    check_tree(tensors(heads, key_heads, dim, 80), spans, None)


def test_tree_attention_of_views() -> None:
    """As rotation leaves them, head by head, and as one product of all three gives them."""
    spans = laid_out([(40, [33, 7])])
    query, key, value, grad = tensors(4, 2, 16, 80)
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    joined = torch.cat([query, key, value], 1)
    for given in (
        [by_head, key, value, grad],
        [*joined.split([4, 2, 2], 1), grad],
        [query, key, value, grad.mT.contiguous().mT],
    ):
        check_tree(given, spans, None)


def test_heads_whose_numbers_lie_apart_are_refused() -> None:
    query, key, value, _ = tensors(4, 2, 16, 80)
    with pytest.raises(ValueError, match="contiguous"):
        tree_attention(
            query.mT.contiguous().mT,
            key,
            value,
            laid_out([(40, [33, 7])]),
            prompts=1,
            scaling=1.0,
            window=None,
        )


def test_tree_attention_of_scores_far_apart() -> None:
    spans = laid_out([(40, [33, 7])])
    query, key, value, grad = tensors(2, 2, 16, 80)
    check_tree([100 * query, 10 * key, value, grad], spans, None, accuracy=2e-3)


def test_tree_attention_in_16_bits_is_that_in_float32_rounded() -> None:
    spans = laid_out([(40, [33, 7])])
    check_tree([x.bfloat16() for x in tensors(4, 2, 16, 80)], spans, None, accuracy=2**-8)


def test_later_tokens_do_not_change_tree_attention() -> None:
    """Not a bit: a completion knows nothing of its end, or of another one."""
    spans = laid_out([(40, [33, 40]), (20, [35])])
    query, key, value, _ = tensors(2, 2, 16, 168)
    before = tree_attention(query, key, value, spans, prompts=2, scaling=0.3, window=None)
    key[60:73], value[60:73] = 1e30, 1e30
    after = tree_attention(query, key, value, spans, prompts=2, scaling=0.3, window=None)
    assert torch.equal(before[:60], after[:60])
    assert torch.equal(before[73:], after[73:])
    assert not torch.equal(before[60:73], after[60:73])


def test_tree_attention_gives_the_same_bits_again(tree_threads: int) -> None:
    spans = laid_out([(40, [33, 40, 9, 64]), (20, [35])])
    *parts, grad = tensors(4, 1, 16, int(spans[1].sum()))

    def gradients() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in parts]
        out = tree_attention(*leaves, spans, prompts=2, scaling=0.3, window=None)  # pyright: ignore[reportArgumentType]
        return list(torch.autograd.grad(out, leaves, grad))

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(), strict=True))


def test_memory_of_completions_is_readable_up_to_where_they_have_got() -> None:
    """What lies beyond is whatever the memory held, and what was written is never cleared."""
    grid = GroupCache(
        slots=4, group=2, prompt_capacity=3, suffix_capacity=150, device=torch.device("cpu")
    )
    first = grid.layer(0, torch.zeros(1, 2, 4))
    for key in (first.suffix_key, first.suffix_value):
        key.fill_(float("nan"))
    grid.reach(1, 1)
    first.suffix_key[0, :, :, 0] = 7
    later = grid.layer(1, torch.zeros(1, 2, 4))
    later.suffix_key[1:], later.suffix_value[1:] = torch.nan, torch.nan

    def check(slots: int, reached: int) -> None:
        for layer in (first, later):
            kept = torch.stack([layer.suffix_key, layer.suffix_value])
            assert not kept[:, :slots, :, :, :reached].isnan().any()
            assert kept[:, slots:].isnan().all(), "no memory is taken for slots that are not used"

    for slots, reached in ((1, 1), (1, 64), (2, 65), (1, 66), (2, 150)):
        grid.reach(slots, reached)
        check(max(slots, grid.entered), reached)
    assert bool((first.suffix_key[0, :, :, 0] == 7).all())
    grid.move([2], [0], prompt=1, suffix=150)
    check(3, 150)
