"""TRL's preference formats and rankings: what is read from a row, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.prompts.preferences import Comparison, read_comparisons

USER = {"role": "user", "content": "What colour is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}


def read(*rows: dict[str, Any], **settings: Any) -> tuple[Comparison, ...]:
    return read_comparisons(rows, **settings).items


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, "The sky is", None),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "The sky is", None),
        ({"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}, (USER,), ((BLUE,), (GREEN,))),
        ({"chosen": [USER, BLUE], "rejected": [USER, GREEN]}, (USER,), ((BLUE,), (GREEN,))),
        (
            {"prompt": [USER], "chosen": [USER, BLUE], "rejected": [USER, GREEN]},
            (USER,),
            ((BLUE,), (GREEN,)),
        ),
    ],
    ids=["explicit", "implicit", "explicit turns", "implicit turns", "repeated turns"],
)
def test_every_format_of_trl_gives_the_same_pair(row: Any, prompt: Any, answers: Any) -> None:
    (found,) = read(row)
    assert (found.prompt.messages or found.prompt.text) == prompt
    assert found.answers == (answers or (" blue.", " green."))
    assert found.rankings[0].pairs == [(0, 1)]
    assert found.labels == (True, False)


def test_rows_of_one_prompt_are_one_comparison_and_equal_answers_one_answer() -> None:
    rows = [
        {"prompt": "p", "chosen": a, "rejected": b, "margin": m}
        for a, b, m in (("x", "y", 1), ("x", "z", 2), ("z", "y", None))
    ]
    first, second = read(*rows, {"prompt": "q", "chosen": "x", "rejected": "y"})
    assert first.answers == ("x", "y", "z")
    assert [ranking.pairs for ranking in first.rankings] == [[(0, 1)], [(0, 2)], [(2, 1)]]
    assert [ranking.margin for ranking in first.rankings] == [1, 2, 0]
    assert second.prompt.id != first.prompt.id


def test_rankings_by_rank_and_by_score_give_all_pairs_and_ties_in_score_none() -> None:
    given = {"prompt": "p", "completions": ["a", "b", "c"]}
    (ranked,) = read({**given, "ranks": [2, 1, 3]})
    assert sorted(ranked.rankings[0].pairs) == [(0, 2), (1, 0), (1, 2)]
    (scored,) = read({**given, "scores": [1.0, 0.0, 1.0]})
    assert sorted(scored.rankings[0].pairs) == [(0, 1), (2, 1)]
    assert scored.scores == (1.0, 0.0, 1.0)


def test_labelled_answers_to_one_prompt_are_kept_apart_from_pairs() -> None:
    (found,) = read(
        {"prompt": "p", "completion": "a", "label": True},
        {"prompt": "p", "completion": "b", "label": False},
    )
    assert found.labels == (True, False) and found.rankings == ()
    assert all(math.isnan(score) for score in found.scores)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "row 1: rejected: is missing"),
        ({"prompt": "p", "chosen": "a", "rejected": " "}, "rejected: is empty"),
        ({"chosen": "abc", "rejected": "xyz"}, "must begin with the same text"),
        ({"chosen": "abc", "rejected": "abcd"}, "chosen: is the beginning of the other"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"prompt": [GREEN], "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, "not the begin"),
        ({"prompt": "p", "chosen": "a", "rejected": [GREEN]}, "both be texts"),
        ({"prompt": "p", "completions": ["a", "b"], "ranks": [1]}, "each of the 2 completions"),
        ({"prompt": "p", "completions": ["a", "b"], "ranks": [1, 1]}, "all ranks are equal"),
        ({"prompt": "p", "completions": ["a", "b", "c"], "ranks": [1, 2, 2]}, "ranks hold a tie"),
        ({"prompt": "p", "completions": ["a", "a"], "ranks": [1, 2]}, "completions are equal"),
        ({"prompt": "p", "completions": ["a", "b"], "scores": [1, math.nan]}, "finite numbers"),
        ({"prompt": "p", "completion": "a"}, "label: is missing"),
        ({"prompt": "p", "completion": "a", "label": "yes"}, "must be true or false"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, "margin = 'big'"),
        ({"question": "p"}, "must have the columns chosen and rejected"),
        ({"prompt": "p", "completions": ["a", "b"], "ranks": [[1], [2]]}, "ranks: holds [1]"),
        ({"prompt": "p", "completions": ["a", "b"], "ranks": [True, False]}, "ranks: holds True"),
        ({"prompt": "p", "completions": ["a", "b"], "scores": [1, 10**400]}, "finite numbers"),
        ({"prompt": "p", "completion": "a", "score": [1]}, "score = [1]: must be a finite number"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": True}, "margin = True"),
        ({"prompt": [USER], "chosen": [{**BLUE, "content": None}], "rejected": [GREEN]}, "content"),
        ({"prompt": [{**USER, "content": 4}], "chosen": [BLUE], "rejected": [GREEN]}, "content"),
        (
            {"prompt": "p", "completions": ["a", "b"], "labels": [1, 0]},
            "reward_model.step_separator",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_number(row: Any, message: str) -> None:
    with pytest.raises(UsageError, match=r"row 1: ") as refused:
        read(row)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_rows_that_say_nothing_are_counted_where_they_may_be_dropped() -> None:
    same = {"prompt": "p", "chosen": "a", "rejected": "a"}
    found = read_comparisons([same, same, {**same, "rejected": "b"}], bad_rows="drop")
    assert len(found.items) == 1
    assert found.dropped == {"chosen and rejected are equal": 2}
    with pytest.raises(UsageError, match="no row is left of 1"):
        read(same, bad_rows="drop")


def test_a_completion_with_both_labels_is_refused_or_counted() -> None:
    wanted = {"prompt": "p", "completion": "a", "label": True}
    with pytest.raises(UsageError, match="row 2: an earlier row gives the same completion the oth"):
        read(wanted, {**wanted, "label": False})
    found = read_comparisons([wanted, {**wanted, "label": False}, wanted], bad_rows="drop")
    assert found.items[0].labels == (True,)
    assert found.dropped == {"an earlier row gives the same completion the other label": 1}


def test_a_completion_with_two_scores_is_refused_or_counted() -> None:
    rated = {"prompt": "p", "completion": "a", "score": 1}
    with pytest.raises(UsageError, match="row 2: an earlier row gives the same completion another"):
        read(rated, {**rated, "score": 3})
    found = read_comparisons([rated, {**rated, "score": 3}, rated], bad_rows="drop")
    assert found.items[0].scores == (1,)
    assert found.dropped == {"an earlier row gives the same completion another score": 1}


def test_scores_and_labels_of_later_rows_are_kept() -> None:
    plain = {"prompt": "p", "completion": "a"}
    (found,) = read({**plain, "label": False}, {**plain, "score": 2})
    assert found.labels == (False,) and found.scores == (2,)
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    (found,) = read(pair, {**pair, "score_chosen": 5, "score_rejected": 1})
    assert found.scores == (5, 1)


def test_an_answer_may_be_chosen_in_one_pair_and_rejected_in_another() -> None:
    (found,) = read(
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "c", "rejected": "a"},
    )
    assert [ranking.pairs for ranking in found.rankings] == [[(0, 1)], [(2, 0)]]
