"""The steps of an answer, and one number of their rewards."""

from __future__ import annotations

import pytest

from groupwise.rewards.steps import aggregated, step_ends
from small_runs import tiny


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1+2=3; 3+4=7", ["1+2=3; ", "3+4=7"]),
        ("1+2=3; 3+4=7<|end|>", ["1+2=3; ", "3+4=7<|end|>"]),
        # The end token alone is no step, and white space neither.
        ("1+2=3; <|end|>", ["1+2=3; <|end|>"]),
        ("1; ; 2", ["1; ", "; 2"]),
        ("; 2", ["; 2"]),
        ("12", ["12"]),
        ("", []),
    ],
)
def test_steps_end_with_the_separator_and_with_the_last_token(text: str, steps: list[str]) -> None:
    tokenizer = tiny().tokenizer
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    bounds = [-1, *step_ends(tokens, "; ", tokenizer)]
    found = [
        tokenizer.decode(tokens[a + 1 : b + 1]) for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    assert found == steps


def test_a_separator_may_straddle_tokens_and_steps_may_be_long() -> None:
    tokenizer = tiny().tokenizer
    tokens = tokenizer("1" * 40 + "; " + "2" * 40 + "; 3", add_special_tokens=False).input_ids
    ends = step_ends(tokens, "1; 2", tokenizer)
    assert [tokenizer.decode(tokens[: end + 1])[-4:] for end in ends] == ["1; 2", "2; 3"]


def test_aggregates_are_those_worked_by_hand() -> None:
    rewards = [0.9, 0.5, 0.8]
    found = {how: aggregated(rewards, how) for how in ("min", "mean", "product", "last")}
    assert found == pytest.approx({"min": 0.5, "mean": 2.2 / 3, "product": 0.36, "last": 0.8})
