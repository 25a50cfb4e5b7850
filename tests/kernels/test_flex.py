"""Attention of packed groups by FlexAttention, whose mask and layout are ours: the numbers and
gradients of the plain one. Its kernels are for a card; here PyTorch computes its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as library

from groupwise.kernels import flex, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.flex import can_use_flex, flex_tree_attention, tree_blocks
from groupwise.kernels.reference import Reference
from groupwise.updates import TreeAttention
from trees import GROUPS, attended, check_attention, laid_out, tensors

CACHES = (flex._kernel, flex._works)


def forget() -> None:
    """Drop what is compiled, and what is known of it."""
    for each in CACHES:
        each.cache_clear()
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture(autouse=True)
def by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a card, but computed operation by operation, and with gradients, which on a CPU
    there are only so."""
    monkeypatch.setattr(flex, "BACKEND", "aot_eager")
    monkeypatch.setattr(library, "_validate_device", lambda *_: None)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is compiled, here or for the tests after this one."""
    forget()
    yield
    forget()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_a_token_sees_its_prompt_and_its_own_past(
    groups: list[tuple[int, list[int]]], window: int | None, softcap: float | None
) -> None:
    spans = laid_out(groups)
    blocks = tree_blocks(spans, window=window)
    check_attention(
        lambda *qkv: flex_tree_attention(*qkv, blocks, scaling=0.3, softcap=softcap),
        lambda *qkv: attended(*qkv, spans, 0.3, window, softcap),
        tensors(6, 2, 32, int(spans[1].sum())),
    )


def test_blocks_that_nobody_sees_are_not_computed() -> None:
    """Spans of one block each: those of completions see two, those of prompts one."""
    blocks = tree_blocks(laid_out([(128, [128] * 7), (128, [128])]), window=None)
    assert blocks.to_dense().sum() == 8 * 2 + 2
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.flatten().tolist() == [0, *[1] * 7, 0, 1]


def test_a_row_that_fills_no_block_whole() -> None:
    """What fills it up sees nothing of it, and is not seen."""
    for tokens in (1, 127, 129):
        spans = torch.tensor([[0], [tokens], [-1]])
        query, key, value, _ = tensors(2, 2, 16, tokens)
        out = flex_tree_attention(
            query, key, value, tree_blocks(spans, window=None), scaling=0.3, softcap=None
        )
        wanted = attended(query, key, value, spans, 0.3, None)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_a_pack_attends_by_it_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = laid_out([(20, [9, 4]), (7, [])])
    query, key, value, _ = tensors(4, 2, 16, int(spans[1].sum()))
    nothing = torch.empty(0, 0, dtype=torch.long)
    attend = TreeAttention(
        spans=spans, prompt_index=nothing, prompt_length=nothing.flatten(),
        branch_index=nothing, owner=nothing.flatten(), inverse=nothing.flatten(),
    )  # fmt: skip
    monkeypatch.setattr(flex, "can_use_flex", lambda *_, **__: True)
    for window in (None, 5, None):
        with using(Auto(without={"tree_attention"})):
            out = attend(0, query, key, value, scaling=0.3, window=window, softcap=4.0)
        wanted = attended(query, key, value, spans, 0.3, window, 4.0)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert attend.blocks.keys() == {None, 5}


@pytest.mark.usefixtures("fresh")
def test_the_number_of_tokens_is_compiled_for_but_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two packs have the same, and a compilation takes longer than a step."""
    compiled = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex, "BACKEND", compiled)
    for tokens in (300, 500, 129, 1300, 700, 260):
        given = [x.requires_grad_() for x in tensors(4, 2, 16, tokens)[:3]]
        blocks = tree_blocks(torch.tensor([[0], [tokens], [-1]]), window=None)
        flex_tree_attention(*given, blocks, scaling=0.3, softcap=None).sum().backward()  # pyright: ignore[reportArgumentType]
    assert compiled.frame_count == 2


@pytest.mark.usefixtures("fresh")
def test_every_kind_of_pack_of_a_model_finds_its_kernel() -> None:
    """More of them than are compiled for where nobody says how many there may be."""
    for tokens in (300, 40):
        for window in (None, 30):
            for trained in (True, False):
                given = [x.requires_grad_(trained) for x in tensors(4, 2, 16, tokens)[:3]]
                spans = torch.tensor([[0], [tokens], [-1]])
                for softcap in (None, 2.0):
                    blocks = tree_blocks(spans, window=window)
                    out = flex_tree_attention(*given, blocks, scaling=0.3, softcap=softcap)  # pyright: ignore[reportArgumentType]
                    assert out.requires_grad == trained


def works() -> bool:
    return flex._works(torch.device("cpu"), torch.float32, (4, 16, 2), 0.3, 3.0)


@pytest.mark.usefixtures("fresh")
def test_it_is_tried_with_heads_like_those_of_the_model() -> None:
    assert works()
    with torch.inference_mode():
        assert flex._works(torch.device("cpu"), torch.bfloat16, (4, 32, 4), 0.2, None)


def broken(*given: Any, **call: Any) -> Tensor:
    raise RuntimeError("no compiler\nfor this card")


def of_no_prompt(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    return query + key.sum() + value.sum()


def without_gradient(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    """Right, but what flows back is no number."""
    out = torch.compile(library.flex_attention, backend="aot_eager")(query, key, value, **call)
    if out.requires_grad:
        out.register_hook(lambda grad: grad * float("nan"))
    return out


def silent(*given: Any, **call: Any) -> Tensor:
    raise RuntimeError


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (broken, "no compiler"),
        (silent, "RuntimeError"),
        (of_no_prompt, "it is off by"),
        (without_gradient, "it is off by nan"),
    ],
)
def test_what_does_not_work_is_said_once_and_not_used(
    kernel: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_kernel", lambda: kernel)
    with pytest.warns(UserWarning, match=reason) as said:
        assert not works()
        assert not works()
    assert len(said) == 1


@pytest.mark.usefixtures("fresh")
def test_a_lack_of_memory_is_not_taken_for_a_kernel_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*given: Any, **call: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(flex, "_kernel", lambda: full)
    with pytest.raises(torch.OutOfMemoryError):
        works()


@pytest.mark.usefixtures("fresh")
def test_a_trial_is_not_the_business_of_a_checkpoint_around_it() -> None:
    """Which counts what is saved inside it, and would find less the second time."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert works()
    assert not saved


def test_on_a_cpu_it_is_not_asked_for() -> None:
    query, key, value, _ = tensors(4, 2, 16, 8)
    assert not can_use_flex(query, key, value, scaling=0.3, softcap=None)


def test_a_kernel_that_fails_after_its_trial_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> torch.Tensor:
        raise error

    error: Exception = RuntimeError("no kernel for these lengths\nand more")
    monkeypatch.setattr(flex, "can_use_flex", lambda *_, **__: True)
    monkeypatch.setattr(flex, "flex_tree_attention", failing)
    monkeypatch.setattr(Reference, "tree_attention", lambda *given, **_: given[2])
    spans = laid_out([(20, [9, 4])])
    query, key, value, _ = tensors(4, 2, 16, int(spans[1].sum()))
    nothing = torch.empty(0, 0, dtype=torch.long)
    tree = TreeAttention(
        spans=spans, prompt_index=nothing, prompt_length=nothing.flatten(),
        branch_index=nothing, owner=nothing.flatten(), inverse=nothing.flatten(),
    )  # fmt: skip
    how: dict[str, Any] = {"scaling": 0.3, "window": None, "softcap": None}
    backend = Auto(without={"tree_attention"})
    with pytest.warns(UserWarning, match="not used on cpu .RuntimeError: no kernel for these len"):
        assert backend.tree_attention(tree, query, key, value, **how) is query
    assert "flex" not in backend.on
    error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        Auto(without={"tree_attention"}).tree_attention(tree, query, key, value, **how)
