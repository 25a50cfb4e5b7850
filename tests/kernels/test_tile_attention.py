"""Attention in bfloat16 with the tiles of AMX against that in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from groupwise.kernels import tree_attention as module
from groupwise.kernels.cpu import multiplies_tiles
from groupwise.kernels.tree_attention import tree_attention
from trees import GROUPS, laid_out, tensors

pytestmark = pytest.mark.skipif(not multiplies_tiles(), reason="the processor has no AMX")


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed in tiles as well."""
    monkeypatch.setattr(module, "SHORTEST", 0)


def results(given: list[Tensor], spans: Tensor, window: int | None) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    *parts, grad = given
    leaves = [x.detach().requires_grad_() for x in parts]
    query, key, value = leaves
    prompts = int((spans[2] < 0).sum())
    out = tree_attention(query, key, value, spans, prompts=prompts, scaling=0.3, window=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def in_float32(
    given: list[Tensor], spans: Tensor, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """The same by the kernel that converts to float32, and rounds its results."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "multiplies_tiles", lambda: False)
        return results(given, spans, window)


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Nearly all numbers are rounded to the same; a weight of 8 bits would change a fifth."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)
        assert (one != other).float().mean() < 0.03


@pytest.mark.parametrize("window", [None, 1, 5, 70, 200])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_a_token_sees_its_prompt_and_its_own_past(
    groups: list[tuple[int, list[int]]],
    window: int | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = laid_out(groups)
    given = [x.bfloat16() for x in tensors(6, 2, 32, int(spans[1].sum()))]
    check(results(given, spans, window), in_float32(given, spans, window, monkeypatch))


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(1, 1, 16), (4, 4, 48), (14, 2, 64), (8, 1, 128), (2, 2, 80)]
)
def test_heads_of_every_kind(
    heads: int, key_heads: int, dim: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = laid_out([(40, [33, 7]), (90, [1])])
    given = [x.bfloat16() for x in tensors(heads, key_heads, dim, 171)]
    check(results(given, spans, None), in_float32(given, spans, None, monkeypatch))


def test_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads as rotation leaves them, and as one product of all three gives them."""
    spans = laid_out([(40, [33, 7])])
    query, key, value, grad = (x.bfloat16() for x in tensors(4, 2, 16, 80))
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    joined = torch.cat([query, key, value], 1)
    wanted = in_float32([query, key, value, grad], spans, None, monkeypatch)
    check(results([by_head, key, value, grad], spans, None), wanted)
    check(results([*joined.split([4, 2, 2], 1), grad], spans, None), wanted)


def test_later_tokens_do_not_change_attention() -> None:
    spans = laid_out([(40, [33, 40]), (20, [35])])
    query, key, value, grad = (x.bfloat16() for x in tensors(2, 2, 16, 168))
    before = results([query, key, value, grad], spans, None)[0]
    key[60:73], value[60:73] = 1e30, 1e30
    after = results([query, key, value, grad], spans, None)[0]
    assert torch.equal(before[:60], after[:60])
    assert torch.equal(before[73:], after[73:])
    assert not torch.equal(before[60:73], after[60:73])


def test_scores_far_apart_and_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = laid_out([(40, [33, 7])])
    query, key, value, grad = (x.bfloat16() for x in tensors(2, 2, 16, 80))
    far = [100 * query, 10 * key, value, grad]
    found, wanted = results(far, spans, None), in_float32(far, spans, None, monkeypatch)
    check(found[:1], wanted[:1])
    query[50] = torch.nan
    found = results([query, key, value, grad], spans, None)[0]
    assert found[50].isnan().all()
    assert found[[*range(50), *range(51, 80)]].isfinite().all()


def test_the_same_bits_again(threads: int) -> None:
    spans = laid_out([(40, [33, 40, 9, 64]), (20, [35])])
    given = [x.bfloat16() for x in tensors(4, 1, 16, int(spans[1].sum()))]
    first = results(given, spans, None)
    for _ in range(5):
        assert all(
            torch.equal(x, y) for x, y in zip(first, results(given, spans, None), strict=True)
        )


def test_short_completions_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of many completions of one token would be empty but for it."""
    monkeypatch.setattr(module, "SHORTEST", 32)
    query = torch.zeros(500, 4, 64, dtype=torch.bfloat16)
    short, long = laid_out([(100, [1] * 400)]), laid_out([(100, [100] * 4)])
    assert module._kernel(query, short, prompts=1) == torch.float32
    assert module._kernel(query, long, prompts=1) == torch.bfloat16
    assert module._kernel(query, laid_out([(1, [])] * 500), prompts=500) == torch.bfloat16


def test_registers_are_as_before() -> None:
    """oneDNN's products in the same threads, before and after."""
    spans = laid_out([(40, [33, 7])])
    given = [x.bfloat16() for x in tensors(4, 2, 32, 80)]
    x = torch.randn(300, 256).bfloat16()
    before = x @ x.t()
    results(given, spans, None)
    assert torch.equal(before, x @ x.t())
