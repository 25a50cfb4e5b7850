"""Attention of packed groups on a GPU: how spans are divided into blocks, and what happens where
the kernels cannot be used. What they compute is tested in test_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.kernels import Reference, Tree, gpu_attention
from groupwise.kernels.auto import Auto
from groupwise.kernels.gpu_attention import blocks_of, can_use_gpu_attention
from trees import GROUPS, attended, laid_out, tensors


@pytest.mark.parametrize("size", [1, 32, 128])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_every_token_is_in_one_block(groups: list[tuple[int, list[int]]], size: int) -> None:
    spans = laid_out(groups)
    begin, length, _ = spans
    tokens = int(length.sum())
    blocks = blocks_of(spans, tokens=tokens, size=size)
    listed = [one for one in blocks.of_block.T.tolist() if one[0] < len(begin)]
    covered = [
        int(begin[span]) + place
        for span, first in listed
        for place in range(first, min(first + size, int(length[span])))
    ]
    assert sorted(covered) == list(range(tokens))
    assert all(first % size == 0 for _, first in listed)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_every_prompt_finds_its_branches(groups: list[tuple[int, list[int]]]) -> None:
    spans = laid_out(groups)
    owner = spans[2].tolist()
    blocks = blocks_of(spans, tokens=int(spans[1].sum()), size=32)
    for span, (first, last) in enumerate(blocks.branches[1:].T.tolist()):
        wanted = [branch for branch, of in enumerate(owner) if of == span]
        assert blocks.branches[0, first:last].tolist() == wanted


def test_on_a_cpu_it_is_not_asked_for() -> None:
    query, key, value, _ = tensors(4, 2, 16, 8)
    assert not can_use_gpu_attention(query, key, value, softcap=None, window=None)


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    """No trial is remembered, here or by the tests after this one."""
    gpu_attention._works.cache_clear()
    yield
    gpu_attention._works.cache_clear()


def works() -> bool:
    how = {"alone": False, "windowed": True, "capped": True}
    return gpu_attention._works(torch.device("cpu"), torch.float32, 16, **how)


def right(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, blocks: Any,
    *, scaling: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    return attended(query, key, value, spans, scaling, window, softcap)


def broken(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no compiler\nfor this card")


def of_no_prompt(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query + key.sum() + value.sum()


def without_gradient(*given: Any, **how: Any) -> Tensor:
    """Right, but what flows back is no number."""
    out = right(*given, **how)
    out.register_hook(lambda grad: grad * float("nan"))
    return out


def test_what_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "gpu_tree_attention", right)
    with torch.inference_mode():
        assert works()


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (broken, "no compiler"),
        (of_no_prompt, "results are off by"),
        (without_gradient, "results are off by nan"),
    ],
)
def test_what_does_not_work_is_said_once_and_not_used(
    kernel: Callable[..., Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_attention, "gpu_tree_attention", kernel)
    with pytest.warns(UserWarning, match=reason) as said:
        assert not works()
        assert not works()
    assert len(said) == 1


def test_a_lack_of_memory_is_not_taken_for_a_kernel_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_attention, "gpu_tree_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        works()


def test_a_trial_is_not_the_business_of_a_checkpoint_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which counts what is saved inside it, and would find less the second time."""
    monkeypatch.setattr(gpu_attention, "gpu_tree_attention", right)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert works()
    assert not saved


def test_a_kernel_that_fails_after_its_trial_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Tensor:
        raise error

    error: Exception = RuntimeError("no kernel for these strides\nand more")
    monkeypatch.setattr(gpu_attention, "can_use_gpu_attention", lambda *_, **__: True)
    monkeypatch.setattr(gpu_attention, "gpu_tree_attention", failing)
    monkeypatch.setattr(Reference, "tree_attention", lambda *given, **_: given[2])
    spans = laid_out([(20, [9, 4])])
    query, key, value, _ = tensors(4, 2, 16, int(spans[1].sum()))
    nothing = torch.empty(0, 0, dtype=torch.long)
    tree = Tree(
        spans=spans, prompt_index=nothing, prompt_length=nothing.flatten(),
        branch_index=nothing, owner=nothing.flatten(), inverse=nothing.flatten(),
    )  # fmt: skip
    how: dict[str, Any] = {"scaling": 0.3, "window": None, "softcap": None}
    backend = Auto(without={"tree_attention"})
    with pytest.warns(UserWarning, match="not used on cpu .RuntimeError: no kernel for these str"):
        assert backend.tree_attention(tree, query, key, value, **how) is query
    assert "triton_attention" not in backend.on and "triton" in backend.on
    error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        Auto(without={"tree_attention"}).tree_attention(tree, query, key, value, **how)
