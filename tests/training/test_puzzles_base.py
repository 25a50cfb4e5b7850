"""Demonstrations of reasoning about knights and knaves: what they say, and which puzzles occur."""

from __future__ import annotations

import re
from random import Random

import pytest

from groupwise.errors import UsageError
from groupwise.prompts.generators.puzzles import knights_knaves_puzzle, solutions, split_of
from groupwise.rewards.builtin.logic import logic_rl
from groupwise.training.stages.puzzles_base import (
    KNIGHTS_KNAVES,
    _restated,
    allowed,
    knights_knaves_demonstrations,
)

SHARES = (0.4, 0.4, 0.2)


def listed(chain: str) -> list[set[str]]:
    """The roles that each claim of a chain allows."""
    return [set(line.split(":")[1].split()) for line in chain.split("\n") if ":" in line]


def test_demonstrations_conclude_what_all_claims_allow() -> None:
    seen = set()
    for example in knights_knaves_demonstrations(size=200, people=SHARES):
        assert logic_rl(example.completion, example.prompt.columns) == 3.0
        chain, _, said = example.completion.partition("so ")
        claims = listed(chain)
        assert set.intersection(*claims) == {said.partition("<")[0]}
        assert len(claims) == example.prompt.columns["people"]
        seen.add(len(claims))
    assert seen == {2, 3, 4}


def test_slips_conclude_what_the_first_claim_allows() -> None:
    right = 0
    for example in knights_knaves_demonstrations(size=300, people=SHARES, slip=1.0):
        chain, _, said = example.completion.partition("so ")
        claims = listed(chain)
        assert said.partition("<")[0] in claims[0]
        right += logic_rl(example.completion, example.prompt.columns) == 3.0
    assert 0.15 < right / 300 < 0.4


def test_what_claims_allow_together_is_the_solution() -> None:
    for seed in range(50):
        row = knights_knaves_puzzle(Random(seed), people=2 + seed % 3)
        said = row["statements"]
        lists = [set(allowed(each, who, len(said))) for who, each in enumerate(said)]
        assert [*set.intersection(*lists)] == solutions(said)


def test_held_out_puzzles_do_not_occur() -> None:
    rows = [knights_knaves_puzzle(Random(seed), people=2) for seed in range(2000)]
    held_out = {
        tuple(map(_restated, row["statements"]))
        for row in rows
        if split_of(row["statements"]) == "held_out"
    }
    assert len(held_out) > 100
    for example in knights_knaves_demonstrations(size=1000, people=(1.0, 0.0, 0.0)):
        assert tuple(re.findall(r"[AB] says (.*):", example.completion)) not in held_out


def test_puzzles_and_chains_are_a_few_tokens() -> None:
    tokenizer = KNIGHTS_KNAVES.tokenizer()
    for example in knights_knaves_demonstrations(size=100, people=SHARES):
        for text, most in (
            (str(example.prompt.messages[0]["content"]), 64),
            (example.completion, 96),
        ):
            tokens = tokenizer.encode(text)
            assert len(tokens) <= most and tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"size": 0, "people": SHARES}, "size = 0"),
        ({"size": 1, "people": SHARES, "slip": 2.0}, "slip = 2.0"),
        ({"size": 1, "people": (1.0, 0.5, 0.0)}, r"people = \[1.0, 0.5, 0.0\]"),
    ],
)
def test_impossible_shares_are_refused(given: dict, where: str) -> None:
    with pytest.raises(UsageError, match=where):
        knights_knaves_demonstrations(**given)
