"""Gold answers of the benchmark suites: each equals itself, and is found in its own solution."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_folder import data_file
from groupwise.rewards.extract import extract_answer
from groupwise.rewards.math.reward import math_equal

UNFOUND = {"math_500": {"\\frac{639}{40}"}}
"""Gold answers of solutions that box two forms of the answer beside each other."""


def rows(suite: str) -> list[dict[str, Any]]:
    text = data_file(f"suites/{suite}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def gold(row: dict[str, Any]) -> str:
    """The answer as a recipe with that column reads it; Minerva's stands in the solution's box."""
    if "final_answer" in row:
        return row["final_answer"][0]
    if "answer" not in row:
        return extract_answer(row["solution"], style="boxed") or ""
    number = row["answer"]
    return str(int(number)) if isinstance(number, float) and number == int(number) else str(number)


@pytest.mark.parametrize(
    "suite", ["aime24", "aime25", "amc23", "math_500", "minerva_math", "olympiadbench"]
)
def test_every_gold_answer_equals_itself(suite: str) -> None:
    answers = [gold(row) for row in rows(suite)]
    assert all(answers)
    read = [extract_answer(f"So it is $\\boxed{{{each}}}$.", style="boxed") for each in answers]
    assert [g for g, r in zip(answers, read, strict=True) if not r or not math_equal(g, r)] == []


@pytest.mark.parametrize("suite", ["aime24", "math_500", "minerva_math"])
def test_gold_answers_are_found_in_their_solutions(suite: str) -> None:
    """OlympiadBench is left out: its solutions are proofs that mark no answer."""
    missed = set()
    for row in rows(suite):
        found = extract_answer(row["solution"], style="auto")
        if found is None or not math_equal(gold(row), found):
            missed.add(gold(row))
    assert missed == UNFOUND.get(suite, set())
