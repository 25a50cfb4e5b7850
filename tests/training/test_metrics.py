"""Metrics of a step on values small enough to count by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from groupwise import ADVANTAGES
from groupwise.algorithms import bind
from groupwise.training.monitor.answers import answer_metrics
from groupwise.training.monitor.metrics import (
    advantage_shares,
    clip_shares,
    divergence,
    effective_samples,
    entropy,
    lengths,
    sampler_gap,
    signal_share,
    step_metrics,
)
from groupwise.types import (
    Batch,
    Completion,
    Group,
    Prompt,
    ScoredGroups,
    Scores,
    Status,
    StepResult,
    Update,
)

NAN = float("nan")


def test_signal_share_counts_groups_that_differ_among_judged_samples() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, NAN], [0.3, 0.1 + 0.2, 5.0]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, True, False]])
    assert signal_share(rewards, valid) == pytest.approx(1 / 3)


def test_effective_samples_of_graded_rewards() -> None:
    # (Σ|A|)²/ΣA² on (4, 2.5, 1, .5): 3.333 for z-scores, 1.147 for softrank
    rewards, valid = torch.tensor([[4.0, 2.5, 1.0, 0.5]]), torch.ones(1, 4, dtype=torch.bool)
    found = [
        effective_samples(ADVANTAGES.get(name)(rewards), valid) for name in ("zscore", "softrank")
    ]
    assert found == pytest.approx([3.333, 1.147], abs=5e-4)


def test_effective_samples_leaves_out_groups_without_any() -> None:
    advantage = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    assert effective_samples(advantage, torch.ones(2, 2, dtype=torch.bool)) == 2.0
    assert math.isnan(effective_samples(advantage[1:], torch.ones(1, 2, dtype=torch.bool)))


def test_shares_of_advantages_skip_what_was_not_judged() -> None:
    advantage = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    valid = torch.tensor([[True, True, True, False]])
    found = advantage_shares(advantage, valid)
    assert found == pytest.approx({"positive_share": 1 / 3, "nonzero_share": 2 / 3})
    by_token = torch.tensor([[[1.0, -2.0], [0.0, 3.0], [0.0, 0.0], [9.0, 9.0]]])
    assert advantage_shares(by_token, valid) == found


def test_clip_shares_count_only_gradients_that_are_cut() -> None:
    # cut: ratio .5 with A < 0 (twice) and 1.5 with A > 0 (once); NaN and the hidden token drop out
    ratio = torch.tensor([[0.5, 0.5, 0.5, 1.5, 1.5, NAN, 1.5]])
    advantage = torch.tensor([[-1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, True, False]])
    found = clip_shares(ratio.log(), advantage, mask, low=0.8, high=1.28)
    assert found == {"clip_low": 0.4, "clip_high": 0.2}


def test_divergence_and_gap_leave_out_what_was_not_computed() -> None:
    old = torch.tensor([[-1.0, -0.5, NAN, -9.0]])
    sampler = torch.tensor([[-1.2, -0.4, -1.0, -1.0]])
    mask = torch.tensor([[True, True, True, False]])
    found = sampler_gap(old, sampler, mask)
    assert found["sampler_gap"] == pytest.approx(0.15)  # (.2 + .1)/2
    assert found["sampler_gap_max"] == pytest.approx(0.2)
    # x = sampler − old = (−.2, .1): mean of e^.2 − 1 − .2 = .021403 and e^−.1 − 1 + .1 = .004837
    assert found["sampler_kl"] == pytest.approx((0.021403 + 0.004837) / 2, abs=1e-6)
    # r = e^.2, e^−.1 = 1.221403, .904837: |r − 1| = .221403, .095163; (Σr)² = 4.520897,
    # Σr² = 2.310555
    assert found["sampler_ratio_gap"] == pytest.approx((0.221403 + 0.095163) / 2, abs=1e-6)
    assert found["sampler_ratio_gap_max"] == pytest.approx(0.221403, abs=1e-6)
    assert found["sampler_ess"] == pytest.approx(4.520897 / (2 * 2.310555), abs=1e-6)
    far = sampler_gap(torch.tensor([0.0, 800.0]), torch.zeros(2), torch.ones(2) > 0)
    assert far["sampler_ess"] == pytest.approx(0.5), "one token outweighs all others"
    assert divergence(sampler, old, mask)["k1"] == pytest.approx(-0.05)
    nothing = divergence(old, sampler, torch.zeros(1, 4, dtype=torch.bool))
    assert all(math.isnan(value) for value in nothing.values())


def test_entropy_and_lengths() -> None:
    assert entropy(torch.tensor([[1.0, 3.0, NAN]]), torch.tensor([[True, False, True]])) == 1.0
    found = lengths(torch.tensor([[1, 3]]), torch.tensor([[False, True]]))
    assert found == {"length": 2.0, "length_max": 3.0, "truncated_share": 0.5}


def step(*, old: torch.Tensor | None, algorithm: str = "dapo") -> dict[str, float]:
    """One prompt, two answers of one token, the second not computed."""
    completions = tuple(
        Completion(tokens=[7], mask=[True], logprobs=[-1.0], text="x", finish=finish)
        for finish in ("stop", "length")
    )
    scored = ScoredGroups(
        groups=(Group(prompt=Prompt(id="0"), prompt_tokens=[1], completions=completions),),
        scores=Scores(
            total=torch.tensor([[1.0, 0.0]]),
            correct=torch.tensor([[1.0, NAN]]),
            parts={"format": torch.tensor([[0.5, NAN]])},
            status=((Status.OK, Status.OK),),
            valid=torch.ones(1, 2, dtype=torch.bool),
        ),
        keep=torch.ones(1, 2, dtype=torch.bool),
        drawn=3,
        seconds={"rollout": 1.5},
    )
    batch = Batch(
        prompts=(torch.tensor([1]),),
        group=torch.tensor([0, 0]),
        tokens=torch.tensor([[7], [7]]),
        length=torch.tensor([1, 1]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        advantage=torch.tensor([[1.0], [-1.0]]),
        weight=torch.full((2, 1), 0.5),
        old_logp=old,
        sampler_logp=torch.full((2, 1), -1.0),
    )
    update = Update(
        version=1,
        logp=torch.tensor([[-0.5], [NAN]]),
        entropy=torch.full((2, 1), NAN),
        computed=torch.tensor([True, False]),
        loss=-0.25,
        grad_norm=2.0,
        learning_rate=1e-3,
        seconds={"backward": 0.5},
    )
    result = StepResult(
        scored=scored,
        advantages=torch.tensor([[1.0, -1.0]]),
        batches=(batch,),
        updates={"policy": (update,), "critic": (replace(update, loss=7.0, grad_norm=NAN),)},
    )
    return step_metrics(result, algorithm=bind(algorithm))


def test_metrics_of_an_on_policy_step() -> None:
    found = step(old=None)
    wanted = {
        "reward": 0.5,
        "reward_std": 0.5,
        "accuracy": 1.0,
        "reward_format": 0.5,
        "valid_share": 1.0,
        "signal_share": 1.0,
        "positive_share": 0.5,
        "truncated_share": 0.5,
        "drawn": 3.0,
        "loss": -0.25,
        "grad_norm": 2.0,
        "computed_share": 0.5,
        "tokens_per_second": 0.8,  # 2 tokens in 1.5 + .5 + .5 seconds
        "critic.loss": 7.0,
        "skipped_updates": 1.0,
        "duplicate_share": 0.5,
        "entropy": 1.0,  # −logp of the sampler over both tokens, the one left out included
        "sampler_gap": 0.5,
        "effective_samples": 2.0,
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    assert found.keys().isdisjoint({"kl", "policy_kl", "clip_high"})
    assert (found["length_right"], found["reflective_share"]) == (1.0, 0.0)
    assert found.keys().isdisjoint({"length_wrong", "accuracy_reflective"})


def test_metrics_of_an_off_policy_step() -> None:
    # the computed token moved by +.5: e^.5 = 1.65 > 1.28 with A > 0 is cut; KL(old‖π), x = −.5
    found = step(old=torch.full((2, 1), -1.0))
    assert found["clip_high"] == 1.0
    assert found["clip_low"] == 0.0
    assert found["policy_kl"] == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert found["sampler_gap"] == 0.0
    assert "clip_high" not in step(old=torch.full((2, 1), -1.0), algorithm="cispo")


def test_answers_by_what_they_are() -> None:
    texts = ("Wait, 7.", "so 7", "9; let me check", "9", "double-check")
    completions = tuple(
        Completion(tokens=[1] * n, mask=[True] * n, logprobs=[-1.0] * n, text=text, finish="stop")
        for n, text in enumerate(texts, start=1)
    )
    group = Group(prompt=Prompt(id="0"), prompt_tokens=[1], completions=completions)
    scores = Scores(
        total=torch.zeros(1, 5),
        correct=torch.tensor([[1.0, 1.0, 0.5, 0.0, 1.0]]),
        parts={},
        status=((Status.OK,) * 5,),
        valid=torch.tensor([[True, True, True, True, False]]),
    )
    keep = torch.ones(1, 5, dtype=torch.bool)
    scored = ScoredGroups(groups=(group,), scores=scores, keep=keep, drawn=1, seconds={})
    assert answer_metrics(scored) == {
        "length_right": 1.5,
        "length_wrong": 3.5,
        "reflective_share": pytest.approx(0.6),
        "accuracy_reflective": 0.75,
        "accuracy_plain": 0.5,
    }
