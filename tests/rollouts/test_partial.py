"""Completions that are cut at a budget of tokens per step: none is lost, doubled or changed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from groupwise.errors import UsageError
from groupwise.prompts.order import PromptOrder
from groupwise.rewards import from_functions
from groupwise.rollouts import ScriptedEngine
from groupwise.rollouts.source import RolloutSource
from groupwise.rundir.files import read_lines
from groupwise.training.prepare import Prepared
from groupwise.types import Prompt, Sampling, ScoredGroups
from small_runs import config, prepared, timeless

PROMPTS = [Prompt(id=f"p{n}", text="x") for n in range(7)]
PARTLY = ("partial_rollouts.tokens_per_step=3", "algorithm.correction.name=tis")


def answer(prompt: Prompt, sample: int) -> str:
    """An answer of 0 to 40 letters; those of a few prompts are all long."""
    number = zlib.crc32(f"{prompt.id} {sample}".encode())
    return "abcdefgh"[number % 8] * (40 if prompt.id in ("p1", "p4") else number % 41)


def even(text: str) -> float:
    return float(len(text) % 2 == 0)


def some(evidence: Mapping[str, Any]) -> Tensor:
    """A filter that drops groups of which every completion is right."""
    rewards = evidence["rewards"]
    return (rewards < 1).any(1, keepdim=True).expand(rewards.shape)


class Counting(PromptOrder):
    """Counts the prompts that were drawn."""

    drawn = 0

    def next(self, count: int) -> list[int]:
        self.drawn += count
        return super().next(count)


def source(order: Counting, *, per_step: int | None, group: int, most: int) -> RolloutSource:
    return RolloutSource(
        PROMPTS,
        [[1]] * len(PROMPTS),
        engine=ScriptedEngine(answer),
        scorer=from_functions([even]),
        keep=some,
        group=group,
        sampling=Sampling(max_tokens=most),
        seed=0,
        order=order,
        tokens_per_step=per_step,
    )


@settings(max_examples=60, deadline=None)
@given(
    per_step=st.integers(1, 45),
    most=st.integers(1, 45),
    group=st.integers(1, 3),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    resumed_at=st.integers(0, 5),
)
def test_every_completion_is_handed_out_once_and_whole(
    per_step: int, most: int, group: int, counts: list[int], resumed_at: int
) -> None:
    """Through random budgets, filters and an interruption."""
    order = Counting(len(PROMPTS), seed=0)
    rollouts = source(order, per_step=per_step, group=group, most=most)
    seen: set[tuple[int, ...]] = set()
    complete = 0
    for step, count in enumerate(counts):
        if step == resumed_at:
            state = rollouts.state()
            drawn, order = order.drawn, Counting(len(PROMPTS), seed=0)
            order.drawn = drawn
            rollouts = source(order, per_step=per_step, group=group, most=most)
            rollouts.restore(state)
        rollouts.engine.version = step  # pyright: ignore[reportAttributeAccessIssue]
        found = rollouts.take(count, step=step)
        complete += found.drawn
        assert found.unfinished == len(rollouts.partial)
        assert order.drawn == complete + len(rollouts.partial)
        for one in found.groups:
            assert one.stream not in seen and one.samples == tuple(range(group))
            seen.add(one.stream)
            for sample, completion in enumerate(one.completions):
                whole = list(answer(one.prompt, sample).encode())
                assert list(completion.tokens) == whole[:most]
                assert len(completion.mask) == len(completion.logprobs) == len(whole[:most])
                ages = [version for _, version in completion.versions]
                assert ages == sorted(set(ages)) and ages[0] == one.stream.step
                assert len(ages) <= 1 + len(whole[:most]) // per_step


@given(most=st.integers(1, 30), more=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_a_budget_that_nothing_exceeds_changes_nothing(most: int, more: int) -> None:
    def taken(per_step: int | None) -> list[ScoredGroups]:
        rollouts = source(Counting(7, seed=0), per_step=per_step, group=2, most=most)
        return [rollouts.take(3, step=step) for step in range(3)]

    for one, other in zip(taken(None), taken(most + more), strict=True):
        assert one.groups == other.groups and one.drawn == other.drawn
        assert torch.equal(one.scores.total, other.scores.total)


def weights(run: Prepared) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.trainer.policy.trained().items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def steps(run: Prepared, count: int) -> list[dict[str, float]]:
    return [run.trainer.advance().metrics for _ in range(count)]


def test_a_run_with_budgets_from_the_longest_completion_on_is_the_ordinary_one(
    tmp_path: Path,
) -> None:
    """To the bit: weights and metrics."""
    found = []
    for name, more in (("plain", ()), ("partly", ("partial_rollouts.tokens_per_step=8",))):
        run = prepared(tmp_path / name, *more, "steps=2")
        steps(run, 2)
        rows = timeless(tmp_path / name)
        found.append((weights(run), [{**row, "unfinished": 0} for row in rows]))
        run.close()
    assert equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize(
    "more",
    [(), ("partial_rollouts.old_tokens=mask",), ("sampling.top_k=5",)],
    ids=["is", "mask", "top_k"],
)
def test_a_resumed_run_goes_on_with_unfinished_completions_bit_for_bit(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    run = prepared(tmp_path, *PARTLY, *more)
    steps(run, 2)
    run.trainer.save(wait=True)
    metrics = steps(run, 2)
    assert all(row["unfinished"] for row in metrics)
    wanted, rows = weights(run), timeless(tmp_path)
    run.close()
    again = prepared(tmp_path, *PARTLY, *more, resume=True)
    steps(again, 2)
    again.close()
    assert timeless(tmp_path) == rows
    assert equal(weights(again), wanted)


def test_old_tokens_keep_what_they_were_drawn_with_and_are_corrected_or_masked(
    tmp_path: Path,
) -> None:
    for old_tokens in ("correct", "mask"):
        run = prepared(tmp_path / old_tokens, *PARTLY, f"partial_rollouts.old_tokens={old_tokens}")
        steps(run, 2)
        result = run.trainer.advance()
        [batch], [update] = result.batches, result.updates["policy"]
        age = batch.columns["age"]
        old, fresh = (age > 0) & batch.mask, (age == 0) & batch.mask
        assert fresh.any() and bool(old.any()) == (old_tokens == "correct")
        assert batch.sampler_logp is not None
        gap = (update.logp - batch.sampler_logp).abs()
        assert float(gap[fresh & ~gap.isnan()].max()) < 1e-5
        assert result.metrics["sampler_gap_max"] < 1e-5
        completions = [c for group in result.scored.groups for c in group.completions]
        assert max(len(c.versions) for c in completions) == 3
        if old_tokens == "correct":
            assert float(gap[old & ~gap.isnan()].max()) > 1e-4
            assert result.metrics["token_age_max"] == 2 and 0 < result.metrics["old_share"] < 1
        else:
            assert result.metrics["token_age_max"] == 0 and result.metrics["length"] > 6
        run.close()
    lines = read_lines(tmp_path / "mask" / "rollouts" / "step-000001.jsonl")
    assert not any("versions" in one for line in lines for one in line["completions"])


def test_ratios_start_from_the_probabilities_of_the_sampler_where_it_is_the_proximal_policy(
    tmp_path: Path,
) -> None:
    """Old tokens then need no correction: their ratio is that of the weights that drew them."""
    some = [each for each in PARTLY if not each.startswith("algorithm.correction")]
    assert len(some) < len(PARTLY)
    run = prepared(tmp_path, *some, "update.proximal=sampler")
    steps(run, 2)
    result = run.trainer.advance()
    run.close()
    [batch], [update] = result.batches, result.updates["policy"]
    old = (batch.columns["age"] > 0) & batch.mask & ~update.logp.isnan()
    assert batch.old_logp is not None and batch.sampler_logp is not None
    assert torch.equal(batch.old_logp, batch.sampler_logp)
    assert float((update.logp - batch.old_logp)[old].abs().max()) > 1e-4


def test_with_fresh_tokens_either_proximal_policy_gives_the_same_run(tmp_path: Path) -> None:
    found = []
    for proximal in ("learner", "sampler"):
        more = ("steps=2", "update.epochs=2", f"update.proximal={proximal}")
        run = prepared(tmp_path / proximal, *more)
        found.append((steps(run, 2), weights(run)))
        run.close()
    (one, first), (other, second) = found
    for key, weight in first.items():
        torch.testing.assert_close(weight, second[key], atol=1e-5, rtol=1e-4)
    for key in ("reward", "clip_low", "clip_high"):
        assert [row[key] for row in one] == pytest.approx([row[key] for row in other], abs=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("update.minibatches=2",), "a step may complete a single group"),
        (("guards.spike=5.0",), "a rollback would continue completions"),
        (("algorithm.name=ppo", "partial_rollouts.old_tokens=mask"), "needs every token"),
    ],
)
def test_settings_that_partial_rollouts_would_spoil_are_refused(
    tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        config(tmp_path, *PARTLY, *more)


def test_old_tokens_need_a_correction_or_a_mask(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="old_tokens = 'correct': algorithm .* 'tis'"):
        config(tmp_path, "partial_rollouts.tokens_per_step=3")
    config(tmp_path, "partial_rollouts.tokens_per_step=3", "partial_rollouts.old_tokens=mask")
    with pytest.raises(UsageError, match="tokens_per_step"):
        config(tmp_path, "partial_rollouts.tokens_per_step=0")
