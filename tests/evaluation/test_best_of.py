"""Choosing among sampled answers: worked examples for pass, majority, best reward, shortest."""

from __future__ import annotations

import pytest

from groupwise.errors import UsageError
from groupwise.evaluation.best_of import selection_figures


def answers(*given: tuple[str, float, float, int], id: str = "a") -> list[dict]:
    return [
        {"id": id, "answer_given": a, "correct": c, "reward": r, "tokens": t}
        for a, c, r, t in given
    ]


def test_ways_to_choose_differ_where_they_should() -> None:
    # Two of three say 8, which is wrong; the right 7 has the highest reward and is the longest.
    rows = answers(("8", 0, 0.1, 4), ("8", 0, 0.2, 5), ("7", 1, 0.9, 9))
    found = selection_figures(rows, ks=(1, 3))
    assert found["k = 3"]["pass"].value == 1
    assert found["k = 3"]["majority"].value == 0
    assert found["k = 3"]["best_reward"].value == 1
    assert found["k = 1"]["pass"].value == pytest.approx(1 / 3)
    assert found["all answers"]["shortest_right"].value == 9


def test_prompts_without_a_verdict_are_left_out() -> None:
    rows = answers(("7", 1, 1, 3)) + [
        {"id": "b", "correct": None, "completion": "x", "tokens": 1, "reward": None}
    ]
    assert selection_figures(rows)["k = 1"]["pass"].value == 1
    with pytest.raises(UsageError, match="no answer was judged"):
        selection_figures(rows[1:])
