"""Attention of packed groups by a kernel of our own: the numbers and gradients of the plain one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from groupwise.kernels.build import compiled
from groupwise.kernels.tree_attention import tree_attention
from trees import GROUPS, attended, check_attention, laid_out, tensors

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no g++")


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(
    given: list[Tensor], spans: Tensor, window: int | None, *, accuracy: float = 1e-5
) -> None:
    check_attention(
        lambda *qkv: tree_attention(*qkv, spans, scaling=0.3, window=window),
        lambda *qkv: attended(*qkv, spans, 0.3, window),
        given,
        accuracy=accuracy,
    )


@pytest.mark.parametrize("window", [None, 1, 5, 70, 200])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_a_token_sees_its_prompt_and_its_own_past(
    groups: list[tuple[int, list[int]]], window: int | None, threads: int
) -> None:
    spans = laid_out(groups)
    check(tensors(6, 2, 32, int(spans[1].sum())), spans, window)


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(1, 1, 16), (4, 4, 48), (8, 1, 128)])
def test_heads_of_every_kind(heads: int, key_heads: int, dim: int, threads: int) -> None:
    spans = laid_out([(40, [33, 7])])
    check(tensors(heads, key_heads, dim, 80), spans, None)


def test_inputs_that_are_views() -> None:
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
        check(given, spans, None)


def test_heads_whose_numbers_lie_apart_are_refused() -> None:
    query, key, value, _ = tensors(4, 2, 16, 80)
    with pytest.raises(ValueError, match="contiguous"):
        tree_attention(
            query.mT.contiguous().mT,
            key,
            value,
            laid_out([(40, [33, 7])]),
            scaling=1.0,
            window=None,
        )


def test_scores_far_apart() -> None:
    spans = laid_out([(40, [33, 7])])
    query, key, value, grad = tensors(2, 2, 16, 80)
    check([100 * query, 10 * key, value, grad], spans, None, accuracy=2e-3)


def test_in_16_bits_it_is_that_in_float32_rounded() -> None:
    spans = laid_out([(40, [33, 7])])
    check([x.bfloat16() for x in tensors(4, 2, 16, 80)], spans, None, accuracy=2**-8)


def test_what_comes_later_changes_nothing() -> None:
    """Not a bit: a completion knows nothing of its end, or of another one."""
    spans = laid_out([(40, [33, 40]), (20, [35])])
    query, key, value, _ = tensors(2, 2, 16, 168)
    before = tree_attention(query, key, value, spans, scaling=0.3, window=None)
    key[60:73], value[60:73] = 1e30, 1e30
    after = tree_attention(query, key, value, spans, scaling=0.3, window=None)
    assert torch.equal(before[:60], after[:60])
    assert torch.equal(before[73:], after[73:])
    assert not torch.equal(before[60:73], after[60:73])


def test_the_same_bits_again(threads: int) -> None:
    spans = laid_out([(40, [33, 40, 9, 64]), (20, [35])])
    *parts, grad = tensors(4, 1, 16, int(spans[1].sum()))

    def gradients() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in parts]
        out = tree_attention(*leaves, spans, scaling=0.3, window=None)  # pyright: ignore[reportArgumentType]
        return list(torch.autograd.grad(out, leaves, grad))

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(), strict=True))
