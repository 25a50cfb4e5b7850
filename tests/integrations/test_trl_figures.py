"""What is logged by TRL's names: numbers worked by hand, and the installed TRL's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from groupwise.algorithms import bind
from groupwise.integrations.trl import figures
from groupwise.types import Completion, Group, Prompt, ScoredGroups, Scores, Status
from trl_peer import GROUP, PROMPTS, REWARDS, fixed, require_trl, rows, trl_trainer

NAN = math.nan


def scored(
    lengths: list[list[int]],
    ended: list[list[bool]],
    parts: dict[str, list[list[float]]],
    total: list[list[float]],
    prompt_tokens: int = 3,
) -> ScoredGroups:
    """Groups of completions of given lengths and rewards; NaN is not judged."""
    groups = tuple(
        Group(
            prompt=Prompt(id=str(place), text="?"),
            prompt_tokens=[1] * prompt_tokens,
            completions=tuple(
                Completion(
                    tokens=[1] * n,
                    mask=[True] * n,
                    logprobs=[-1.0] * n,
                    text="",
                    finish="stop" if stop else "length",
                )
                for n, stop in zip(row, stops, strict=True)
            ),
        )
        for place, (row, stops) in enumerate(zip(lengths, ended, strict=True))
    )
    values = torch.tensor(total)
    scores = Scores(
        total=values,
        correct=values * NAN,
        parts={name: torch.tensor(part) for name, part in parts.items()},
        status=tuple(tuple(Status.OK for _ in row) for row in lengths),
        valid=~values.isnan(),
    )
    return ScoredGroups(groups=groups, scores=scores, keep=scores.valid, drawn=len(groups))


def test_figures_are_the_numbers_worked_by_hand() -> None:
    found = figures.of_rollouts(
        scored(
            [[2, 4, 6], [8, 1, 3]],
            [[True, False, True], [False, True, True]],
            {"a": [[1.0, 0.0, NAN], [2.0, 2.0, 2.0]]},
            [[1.0, 0.0, NAN], [2.0, 2.0, 2.0]],
        )
    )
    assert found == pytest.approx(
        {
            "completions/mean_length": 4.0,
            "completions/min_length": 1.0,
            "completions/max_length": 8.0,
            "completions/clipped_ratio": 2 / 6,
            # the ended ones have 2, 6, 1 and 3
            "completions/mean_terminated_length": 3.0,
            "completions/min_terminated_length": 1.0,
            "completions/max_terminated_length": 6.0,
            # of (1, 0, 2, 2, 2): mean 1.4, squares .16 + 1.96 + 3 · .36 = 3.2, over 4
            "rewards/a/mean": 1.4,
            "rewards/a/std": math.sqrt(0.8),
            "reward": 1.4,
            "reward_std": math.sqrt(0.8),
            "frac_reward_zero_std": 0.5,
        }
    )


def test_tokens_count_the_prompt_for_each_completion() -> None:
    made = scored([[2, 4]], [[True, True]], {}, [[0.0, 0.0]], prompt_tokens=5)
    assert figures.tokens(made) == 16
    assert figures.of_rollouts(made, scale="batch")["frac_reward_zero_std"] == 1.0


def test_means_leave_out_nan() -> None:
    found = figures.averaged({"a": [1.0, NAN, 3.0], "b": [NAN]})
    assert found == {"a": 2.0, "b": None}


def test_the_loss_without_its_entropy_bonus_is_logged_beside_it() -> None:
    """Two updates: each has a loss of 0.1, of which −0.2 · 0.5 is the bonus."""
    metrics = {"seconds": 4.0, "entropy": 0.5, "loss": 0.2}
    found = figures.of_update(metrics, updates=2, clips=False, bonus=0.2)
    assert found["policy_loss"] == pytest.approx(0.2) and found["entropy_coef"] == 0.2
    assert "policy_loss" not in figures.of_update(metrics, updates=2, clips=False)


def test_the_loss_of_an_evaluation_is_the_number_worked_by_hand() -> None:
    """Rewards 1 and 0 have the deviation √½, so the advantages are ±√½. The answers have two tokens
    and one: −(2 · √½ − √½) / 3."""
    made = scored([[2, 1]], [[True, True]], {}, [[1.0, 0.0]])
    algorithm = bind("grpo@trl", {"advantage": {"eps": 0.0}})
    found = figures.loss(made, algorithm, reference=None)
    assert found == pytest.approx(-math.sqrt(0.5) / 3, rel=1e-5)


def test_clipping_is_logged_where_ratios_are_clipped() -> None:
    metrics = {"seconds": 4.0, "entropy": 0.5, "clip_low": 0.1, "clip_high": 0.2}
    found = figures.of_update(metrics, updates=2, clips=True)
    assert found["clip_ratio/region_mean"] == pytest.approx(0.3)
    assert found["step_time"] == 2.0
    assert not any("clip" in name for name in figures.of_update(metrics, updates=1, clips=False))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_figures_of_rollouts_are_trls(tmp_path: Path, scale: str) -> None:
    require_trl()
    rollouts = fixed(tmp_path / "model")
    equal = (REWARDS[0], (0.5,) * GROUP)
    trainer = trl_trainer(rollouts, tmp_path / "out", scale_rewards=scale, rewards=equal)
    trainer._generate_and_score_completions(rows())
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    values = [list(row) for row in equal]
    made = scored(
        [[len(tokens) for tokens in group] for group in rollouts.tokens],
        [[end == "stop" for end in group] for group in rollouts.finish],
        {"told": values},
        values,
    )
    assert theirs.pop("num_tokens") == figures.tokens(made) + sum(
        GROUP * (len(rollouts.tokenizer(prompt).input_ids) - 3) for prompt in PROMPTS
    )
    assert figures.of_rollouts(made, scale=scale) == pytest.approx(theirs, abs=1e-6)
