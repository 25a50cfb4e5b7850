"""Trying a reward before training."""

from __future__ import annotations

import json
import math

import pytest

from groupwise.errors import UsageError
from groupwise.rewards import build_scorer, from_functions, verifier
from groupwise.settings import RewardSettings
from groupwise.testing import RewardCheck, check_reward
from groupwise.types import Prompt

PROMPTS = [Prompt(id=str(n), text="q", answer=f"so\n#### {n}") for n in (12, 34)]


def kinds(check: RewardCheck, prompt: str) -> dict[str, float]:
    return {row.kind: row.total for row in check.rows if row.prompt == prompt}


def test_a_sound_reward() -> None:
    parts = [RewardSettings(name="exact_answer"), RewardSettings(name="think_answer", weight=0.5)]
    with build_scorer(parts) as scorer:
        check = check_reward(scorer, PROMPTS, {"12": ["<answer>24/2</answer>"]})
    assert check.passed and check.writing == "think and answer"
    assert kinds(check, "12") == {
        "gold": 1.5, "wrong": 0.5, "garbage": 0, "empty": 0, "truncated": 0, "long": 0, "sample": 1,
    }  # fmt: skip
    assert "sample" not in kinds(check, "34")
    assert set(check.seconds) == {"exact_answer", "think_answer"}
    assert "no problem found" in str(check) and "think_answer" in str(check)
    assert json.loads(json.dumps(check.table()))[0]["total"] == 1.5
    assert "correct" in str(check).splitlines()[0]
    no_verifier = RewardSettings(name="think_answer")
    with build_scorer([no_verifier]) as scorer:
        unverified = str(check_reward(scorer, PROMPTS))
    assert "correct" not in unverified.splitlines()[0] and "nan" not in unverified


def test_a_reward_that_pays_rubbish() -> None:
    check = check_reward(from_functions(lambda text: float(len(text))), PROMPTS)
    assert any("prompt 12: long earns" in problem for problem in check.problems)
    assert "problem:" in str(check)


def test_a_reward_that_misses_the_reference_answer() -> None:
    @verifier
    def always_wrong(text: str) -> float:
        return 0.0

    check = check_reward(from_functions(always_wrong), PROMPTS)
    assert any("counts as 0 correct" in problem for problem in check.problems)


def test_a_reward_that_fails_says_so_for_each_text() -> None:
    def breaks(text: str) -> float:
        if not text:
            raise IndexError("empty")
        return float("12" in text) + (1.0 if "34" in text else 0.0)

    check = check_reward(from_functions(breaks), PROMPTS, gold=lambda p: p.id)
    empty = next(row for row in check.rows if row.kind == "empty")
    assert empty.status == "error" and math.isnan(empty.total)
    assert any("2 of" in problem and "IndexError" in problem for problem in check.problems)
    assert check.writing == "given"


def test_prompts_without_a_reference_answer() -> None:
    with pytest.raises(UsageError, match="give `gold`"):
        check_reward(from_functions(lambda text: 1.0), [Prompt(id="a", text="q")])


@pytest.mark.parametrize("reward", ["normalised_match", "token_f1"])
def test_the_first_of_several_references_is_an_answer(reward: str) -> None:
    answers = (["Seoul", "Seoul City"], ["the Han river", "Hangang"])
    prompts = [
        Prompt(id=str(n), text=f"{n}?", answer=json.dumps(each)) for n, each in enumerate(answers)
    ]
    with build_scorer([RewardSettings(name=reward)], workers=0) as scorer:
        tried = check_reward(scorer, prompts)
    assert tried.passed, tried.problems
    assert [row.total for row in tried.rows if row.kind == "gold"] == [1.0, 1.0]
