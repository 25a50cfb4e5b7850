"""Selections keep what they say and count it; pairs are right against wrong or much longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import main
from groupwise.errors import UsageError
from groupwise.registry import spec
from groupwise.rundir.provenance import fingerprint, origin_path
from groupwise.training.stages.select import SELECTIONS, preference_pairs, rules_of, select


def row(id: str, tokens: int, correct: float | None, reward: float = 0.0, text: str = "") -> dict:
    completion = text or f"{id}{tokens}{correct}"
    return {
        "id": id,
        "completion": completion,
        "tokens": tokens,
        "correct": correct,
        "reward": reward,
    }


# a: two right of four; b: all right; c: all wrong; d: nothing decides
ROWS = [
    row("a", 9, 1, 0.5),
    row("b", 3, 1, 1.0),
    row("a", 4, 0, 0.9),
    row("a", 6, 1, 0.7),
    row("c", 2, 0, 0.1),
    row("a", 7, 0, 0.0),
    row("b", 8, 1, 1.0),
    row("d", 5, None, 0.2),
]


def left(name: str, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> list[tuple[str, int]]:
    kept = select(rows, [SELECTIONS.bind(spec(name, **settings))]).rows
    return [(r["id"], r["tokens"]) for r in kept]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("correct", {}, [("a", 9), ("b", 3), ("a", 6), ("b", 8)]),
        ("shortest_correct", {}, [("a", 6), ("b", 3)]),
        ("best", {}, [("b", 3), ("a", 4), ("c", 2), ("d", 5)]),
        ("best", {"count": 2}, [("b", 3), ("a", 4), ("a", 6), ("c", 2), ("b", 8), ("d", 5)]),
        ("pass_rate", {}, [("a", 9), ("a", 4), ("a", 6), ("a", 7)]),
        ("length", {"least": 4, "most": 6}, [("a", 4), ("a", 6), ("d", 5)]),
        ("at_most", {"count": 1}, [("a", 9), ("b", 3), ("c", 2), ("d", 5)]),
    ],
)
def test_a_rule_keeps_what_it_says(name, settings, expected) -> None:
    assert left(name, **settings) == expected


def test_every_rule_is_tested_here() -> None:
    assert set(SELECTIONS.names()) == {
        *("correct", "shortest_correct", "best", "pass_rate", "length", "at_most", "distinct"),
        "language",
    }


def test_equal_answers_are_kept_once_whatever_their_spaces() -> None:
    rows = [row("a", 1, 1, text="x  y\n"), row("a", 2, 1, text="x y"), row("b", 3, 1, text="x y")]
    assert left("distinct", rows) == [("a", 1), ("b", 3)]


def test_rules_are_applied_in_order_and_counted() -> None:
    rules = [SELECTIONS.bind(spec("pass_rate")), SELECTIONS.bind(spec("best", count=1))]
    found = select(ROWS, rules)
    assert found.counts == (("sampled", 8), ("pass_rate()", 4), ("best(count=1)", 1))


def test_a_rule_that_leaves_nothing_is_named() -> None:
    with pytest.raises(UsageError, match=r"length.*leaves none of the 8 rows"):
        left("length", least=100, most=200)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(UsageError, match="has no column 'tokens'"):
        left("length", [{"id": "a"}], least=1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("best", {"count": 0}),
        ("at_most", {"count": 0}),
        ("pass_rate", {"above": 0.5, "below": 0.5}),
        ("length", {"least": 9, "most": 3}),
    ],
)
def test_settings_out_of_range_are_refused(name, settings) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        left(name, **settings)


def test_pairs_reject_wrong_answers_first_and_much_longer_ones_after() -> None:
    found = preference_pairs(ROWS, most=9)
    assert [(p["id"], p["chosen"], p["rejected"], p["reason"]) for p in found] == [
        ("a", "a61", "a40", "wrong"),
        ("a", "a61", "a70", "wrong"),
        ("a", "a61", "a91", "longer"),  # 9 ≥ 1.5 · 6
        ("b", "b31", "b81", "longer"),
    ]
    assert len(preference_pairs(ROWS)) == 2
    assert not any("tokens" in pair or "reward" in pair for pair in found)


def test_answers_that_nothing_decides_are_never_rejected_as_wrong() -> None:
    rows = [row("a", 2, 1), row("a", 3, None)]
    with pytest.raises(UsageError, match="none of 1 prompts"):
        preference_pairs(rows, ratio=2.0)
    with pytest.raises(UsageError, match="ratio = 1.0"):
        preference_pairs(ROWS, ratio=1.0)


def test_rules_are_read_as_they_are_written() -> None:
    rules = rules_of(["distinct", "pass_rate(above=0.1, below=0.9)", "best(count=1)"])
    assert [str(rule.spec) for rule in rules] == [
        "distinct",
        "pass_rate(above=0.1, below=0.9)",
        "best(count=1)",
    ]
    for wrong in ("longth", "at_most(2)", "at_most(count=open('x'))", "at_most(cuont=2)", "a b"):
        with pytest.raises(UsageError):
            rules_of([wrong])


def test_answers_in_another_language_are_left_out() -> None:
    rows = [
        row("a", 1, 1, text="다섯 더하기 둘은 일곱"),
        row("b", 1, 1, text="five plus two is 일곱"),
    ]
    assert left("language", rows, language="korean", share=0.9) == [("a", 1)]


def test_the_best_answer_by_another_score_leaves_out_what_was_not_scored() -> None:
    rows = [row("a", 1, 1) | {"score": None}, row("a", 2, 0) | {"score": -1.0}]
    assert left("best", rows, column="score") == [("a", 2)]


def test_a_selection_says_what_made_it(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    row = {"id": "a", "completion": "x", "tokens": 1, "correct": 1.0}
    answers.write_text(json.dumps(row) + "\n", encoding="utf-8")
    kept = tmp_path / "kept.jsonl"
    assert main(["select", str(answers), "--keep", "correct", "--output", str(kept)]) == 0
    origin = json.loads(origin_path(kept).read_text(encoding="utf-8"))
    assert origin["data_hash"] == fingerprint(answers)
    assert origin["settings"] == {"keep": ["correct"]}
    assert origin["counts"] == [["sampled", 1], ["correct()", 1]]
