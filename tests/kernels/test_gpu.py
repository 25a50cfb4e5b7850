"""Kernels for GPUs: interpreted on a CPU, and by the mark `gpu` on a real one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import interpreted_gpu
from groupwise.kernels import DecodeRows, GroupCache, Reference, Tree, active, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.graphs import DecodingGraphs
from groupwise.rollouts import GroupEngine
from interpreted_gpu import (
    CASES,
    EXACT,
    INTERPRETED,
    Memory,
    attention_gaps,
    completions,
    differences,
    draws,
    far_gaps,
    layer_gaps,
    log_softmax_gaps,
    tree_gaps,
    trial_gaps,
)  # fmt: skip
from own_process import printed
from trees import laid_out, tensors

NOT_FUSED = {"gemma2"}
TOLERANCE = {**EXACT, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the kernels compute on a CPU, in a process of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return printed(interpreted_gpu)


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED)
def test_an_engine_with_kernels_and_graphs_writes_the_same(
    case: str, interpreted: dict[str, Any]
) -> None:
    found = interpreted["models"][case]
    assert found["same"] and found["gap"] < 1e-5
    assert found["lengths"] > 1 and found["fused"] is (case not in NOT_FUSED)
    assert 0 < found["graphs"] < 4 and found["replays"] >= 6


@pytest.mark.parametrize("kind", EXACT, ids=str)
def test_scores_far_below_zero_have_gradients(
    kind: torch.dtype, interpreted: dict[str, Any]
) -> None:
    """A score of 200 is rounded to 1e-5, or in 16 bits the weights are to 1e-3."""
    gaps = interpreted["far"][str(kind)].values()
    assert all(gap <= 5e-3 for gap in gaps)


@pytest.mark.parametrize("kind", EXACT, ids=str)
def test_kernels_compute_what_pytorch_does(kind: torch.dtype, interpreted: dict[str, Any]) -> None:
    for what in ("trials", "attention", "layers", "trees", "log-probabilities"):
        for name, gap in interpreted[what][str(kind)].items():
            assert gap <= EXACT[kind], (what, name)


def test_draws_are_those_of_float64(interpreted: dict[str, Any]) -> None:
    check_draws(interpreted["draws"])


def check_draws(found: dict[str, float]) -> None:
    assert found["same"] >= 0.97 and found["gap"] < 1e-5
    assert found["possible"] == 1 and found["of NaN"] == 1


def test_rows_that_are_missing_in_a_graph_are_none() -> None:
    """16 rows, and then fewer: the rows that are left out must not keep their old places."""
    cache = GroupCache(
        slots=4, group=4, prompt_capacity=9, suffix_capacity=9, device=torch.device("cpu")
    )
    seen: list[list[int]] = []

    def hidden(tokens: torch.Tensor, positions: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        if rows.recorded:
            columns = (tokens, positions, rows.slot, rows.sample, rows.time)
            seen[:] = torch.stack(columns).T.tolist()
        return 10.0 * tokens[:, None]

    graphs: Any = DecodingGraphs(hidden, Memory(cache.device))
    for count in (16, 16, 12, 9, 16):
        row = torch.arange(count)
        rows = DecodeRows(
            cache=cache, slot=row // 4, sample=row % 4, time=row % 5, used=4, rows=row, clock=0,
            prompt=9, suffix=9, aligned=False,
        )  # fmt: skip
        found = graphs(row + 100, row + 5, rows)
        assert found.flatten().tolist() == [10.0 * (100 + one) for one in range(count)]
        assert [each[4] for each in seen] == [*(row % 5).tolist(), *[-1] * (16 - count)]
        assert all(each[1] == 0 for each in seen[count:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_kernels_of_a_card_compute_what_pytorch_does(kind: torch.dtype) -> None:
    measures = (trial_gaps, attention_gaps, layer_gaps, tree_gaps, log_softmax_gaps)
    found = {k: v for measure in measures for k, v in measure("cuda", kind).items()}
    assert all(gap <= 2e-2 for gap in far_gaps("cuda", kind).values())
    assert {name: gap for name, gap in found.items() if not gap <= TOLERANCE[kind]} == {}


@pytest.mark.gpu
def test_draws_of_a_card_are_those_of_float64() -> None:
    check_draws(draws("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_an_engine_on_a_card_writes_the_same_by_graphs(case: str) -> None:
    policy = CASES[case]()
    policy.model.to("cuda")
    with using(Reference()):
        wanted = completions(policy)
    with using(Auto()):
        found = completions(policy)
        fused = GroupEngine(policy).calls is not None
        backend: Any = active()
    (memory,) = backend.graph_memory.values()
    assert memory.works and memory.kept is not None and fused is (case not in NOT_FUSED)
    compared = differences(found, wanted)
    assert compared["gap"] < 1e-4 and compared["same"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_layers_of_an_update_on_a_card_have_the_gradients_of_transformers(
    kind: torch.dtype,
) -> None:
    model = CASES["qwen2"]().model.to("cuda", kind)
    ids = torch.arange(60, device="cuda").view(2, 30) % 97
    gradients, routed = [], []
    for backend in (Reference(), Auto()):
        model.zero_grad()
        with backend.training_layers(model):
            routed.append(sum("forward" in vars(module) for module in model.modules()))
            loss = model(ids, labels=ids).loss
            loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert routed == [0, 10]  # the norms and feed-forwards of three layers, and the last norm
    for name, wanted in gradients[0].items():
        gap = (gradients[1][name] - wanted).norm() / wanted.norm()
        assert gap <= (1e-4 if kind == torch.float32 else 5e-2), name


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_updates_on_a_card_attend_by_the_kernel(
    kind: torch.dtype, key_heads: int, window: int | None, softcap: float | None
) -> None:
    spans = laid_out([(20, [9, 4]), (7, [])])
    parts = tensors(4, key_heads, 64, int(spans[1].sum()))[:3]
    nothing = torch.empty(0, dtype=torch.long, device="cuda")
    tree = Tree(
        spans=spans.cuda(), prompt_index=nothing[:, None], prompt_length=nothing,
        branch_index=nothing[:, None], owner=nothing, inverse=nothing,
    )  # fmt: skip
    how = {"scaling": 0.3, "window": window, "softcap": softcap}
    Auto().tree_attention(tree, *(part.to("cuda", kind) for part in parts), **how)
    assert tree.blocks, "the reference knows no blocks"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_a_card_adds_products_of_16_bits_in_float32(kind: torch.dtype) -> None:
    """As the gradient of a head is summed, chunk by chunk."""
    grads, states = (torch.randn(70, n, device="cuda").to(kind) for n in (50, 24))
    total = None
    for rows in (slice(0, 40), slice(40, 70)):
        before, total = total, Auto().add_matmul(total, grads[rows].t(), states[rows])
        assert total.dtype == torch.float32 and (before is None or before is total)
    torch.testing.assert_close(total, grads.float().t() @ states.float(), rtol=1e-4, atol=1e-3)
