"""Worked values of the format and length rewards; the derivation stands beside each."""

from __future__ import annotations

import time
import unicodedata

import pytest

from groupwise.errors import UsageError
from groupwise.rewards import dropped_tags
from groupwise.rewards.builtin.format import (
    code_format,
    integer_answer,
    language_consistency,
    ordered_tags,
    reasoning_answer,
    reasoning_steps,
    repetition,
    tag_count,
    think_answer,
    think_boxed,
    think_format,
    token_repetition,
)
from groupwise.rewards.builtin.shaping import (
    concise,
    cosine,
    kimi_length,
    lcpo_exact,
    lcpo_max,
    soft_overlong,
    untruncated,
)

R1 = "<think>\nhm\n</think>\n<answer>\n2\n</answer>"
PAPER = "<reasoning>\nhm\nhm\n</reasoning>\n<answer>\n2\n</answer>\n"


@pytest.mark.parametrize(
    "length, reward",
    # L_max 20480, cache 4096: zero until 16384, then (16384 - n) / 4096, at least -1.
    [(16000, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (24576, -1.0)],
)
def test_soft_overlong(length: int, reward: float) -> None:
    assert soft_overlong(length, 20480) == reward
    assert soft_overlong(length, 99, limit=20480) == reward


def test_soft_overlong_without_a_floor_and_out_of_range() -> None:
    assert soft_overlong(500, 512) == -90 / 102  # a fifth of 512 is 102: (512 - 102 - 500) / 102
    assert soft_overlong(24576, 20480, floor=None) == -2.0  # (16384 - 24576) / 4096
    with pytest.raises(UsageError, match="cache"):
        soft_overlong(10, 100, cache=101)
    with pytest.raises(UsageError, match="limit"):
        soft_overlong(10)


def test_kimi_length() -> None:
    # (100, 200, 300, 500): ½ - (n - 100)/400 = (.5, .25, 0, -.5); a wrong answer at most 0.
    lengths = [100, 200, 300, 500]
    assert kimi_length(lengths, [1, 1, 0, 0]) == [0.5, 0.25, 0.0, -0.5]
    assert kimi_length(lengths, [1, 0, 1, 0]) == [0.5, 0.0, 0.0, -0.5]
    assert kimi_length([7, 7], [1, 0]) == [0.0, 0.0]
    assert kimi_length([], []) == []


@pytest.mark.parametrize(
    "length, right, wrong",
    # ½(1 + cos(π n/1000)) = 1, .853553, .5, .146447, 0 from 1 to .5 and from -1 to -.5
    [
        (0, 1.0, -1.0),
        (250, 0.926777, -0.926777),
        (500, 0.75, -0.75),
        (750, 0.573223, -0.573223),
        (1000, 0.5, -0.5),
        (2000, 0.5, -0.5),
    ],
)
def test_cosine(length: int, right: float, wrong: float) -> None:
    assert cosine(length, 1.0, 1000) == pytest.approx(right, abs=1e-6)
    assert cosine(length, 0.0, 1000) == pytest.approx(wrong, abs=1e-6)


@pytest.mark.parametrize(
    "length, right, wrong", [(250, 1.853553, -8.535534), (500, 1.5, -5), (1000, -10, -10)]
)
def test_cosine_of_its_origin(length: int, right: float, wrong: float) -> None:
    values = dict(correct_short=2, correct_long=1, wrong_short=-10, wrong_long=0, exceed=-10)
    assert cosine(length, 1.0, 1000, **values) == pytest.approx(right, abs=1e-6)
    assert cosine(length, 0.0, 1000, **values) == pytest.approx(wrong, abs=1e-6)


@pytest.mark.parametrize(
    "target, length, correct, exact, most",
    # exact: correct - .0003·|target - n|; most: correct · clip(.0003·(target - n) + .5, 0, 1)
    [
        (1000, 1200, 1, 0.94, 0.44),
        (1000, 1200, 0, -0.06, 0.0),
        (1000, 1000, 1, 1.0, 0.5),
        (500, 4000, 1, -0.05, 0.0),
        (1000, 500, 1, 0.85, 0.65),
        (1000, 3000, 1, 0.4, 0.0),
        (4000, 2000, 1, 0.4, 1.0),
    ],
)
def test_lcpo(target: int, length: int, correct: float, exact: float, most: float) -> None:
    columns = {"num_tokens": target}
    assert lcpo_exact(length, correct, columns) == pytest.approx(exact)
    assert lcpo_max(length, correct, columns) == pytest.approx(most)


def test_lcpo_without_a_target() -> None:
    assert lcpo_exact(5, 1.0, {"num_tokens": -1}) is None
    assert lcpo_max(5, 1.0, {"num_tokens": None}) is None
    assert lcpo_max(1200, 1.0, {"num_tokens": -1000}) == pytest.approx(0.44)
    with pytest.raises(UsageError, match="budget"):
        lcpo_exact(5, 1.0, {"n": 1}, column="budget")


def test_concise_and_untruncated() -> None:
    assert [concise("", 1.0), concise(r"\boxed{3}", 0.0), concise("3", 0.0)] == [1.0, -0.5, -1.0]
    assert (untruncated("stop"), untruncated("length")) == (0.0, None)


def test_repetition() -> None:
    # a b c a b c a b c: 7 trigrams, 3 of them distinct, so -(1 - 3/7).
    assert repetition("a b c a b c a b c") == pytest.approx(-4 / 7)
    assert repetition("A b a B", ngram=2, max_penalty=-0.6) == pytest.approx(-0.6 * (1 - 2 / 3))
    assert repetition("a b") == 0.0
    assert token_repetition([5, 5, 5, 5, 5], ngram=2) == -0.75  # 1 of 4
    for wrong in ({"max_penalty": 0.5}, {"ngram": 0}):
        with pytest.raises(UsageError):
            repetition("a b c", **wrong)


def test_reasoning_answer() -> None:
    assert [reasoning_answer(PAPER, form=f) for f in ("strict", "soft")] == [1.0, 1.0]
    assert reasoning_answer(PAPER, form="tags") == pytest.approx(1 - 0.002)
    one_line = "<reasoning>a</reasoning> <answer>2</answer>"
    assert [reasoning_answer(one_line, form=f) for f in ("strict", "soft", "tags")] == [0, 1, 0]
    assert reasoning_answer(PAPER + "more") == 0.0
    assert reasoning_answer(PAPER * 2) == 0.0
    assert reasoning_answer("x" + PAPER, form="soft") == 0.0
    assert reasoning_answer(PAPER + "x" * 10_000, form="tags") == 0.0
    assert reasoning_answer(PAPER.removeprefix("<reasoning>\n"), prefix="<reasoning>\n") == 1.0


def test_integer_answer() -> None:
    assert integer_answer("<answer>\n-12\n</answer>") == 1.0
    assert integer_answer("<answer>1.5</answer>") == integer_answer("12") == 0.0


def test_think_answer() -> None:
    # The pattern of open-r1 and what its flags let through, which is `loose` here.
    second = R1 + "\n<answer>\n3\n</answer>"
    for text, strict, loose in [
        (R1, 1, 1), (R1 + "\nmore", 0, 1), (R1 + " more", 0, 0), ("x" + R1, 0, 0), (second, 0, 1),
        ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1),
        ("<think>a</think><answer>b</answer>", 0, 0),
    ]:  # fmt: skip
        assert (think_answer(text), think_answer(text, loose=True)) == (strict, loose), text
    assert think_answer(R1.removeprefix("<think>\n"), prefix="<think>\n") == 1.0


def test_think_format() -> None:
    texts = [
        "<think>a</think>b",
        "<think><think></think>b",
        "x<think>a</think>",
        "<think>a</think>",
    ]
    assert [think_format(text) for text in texts] == [1.0, 0.0, 0.0, 1.0]


def test_tags() -> None:
    assert tag_count(R1) == 1.0 and tag_count(R1.replace("<answer>\n", "")) == 0.75
    assert tag_count(R1 + R1) == 0.0  # every tag twice
    assert ordered_tags("so <think>a</think> <answer>b</answer> !") == 1.0
    assert ordered_tags("<answer>b</answer><think>a</think>") == -1.0
    assert ordered_tags("<think>a</think><answer>b</answer><answer></answer>") == -1.0
    assert think_boxed(r"<think>a</think> \boxed{1}") == 1.0
    assert think_boxed(r"<think>\boxed{1}</think>") == think_boxed(r"\boxed{1}") == 0.0


def test_code_format() -> None:
    inside = R1.replace("2", "```python\nx = 1\n```")
    assert code_format(inside) == 1.0
    assert code_format(inside, language="c") == code_format(R1) == 0.0


def test_reasoning_steps() -> None:
    assert reasoning_steps("Step 1: a\nStep 2: b\nStep 3: c\n- d") == 1.0
    assert reasoning_steps("1. a\n2. b") == pytest.approx(1 / 3)  # a number only at the start
    assert reasoning_steps("plain") == 0.0
    with pytest.raises(UsageError):
        reasoning_steps("a", enough=0)


def test_language_consistency() -> None:
    # 8 of 10 words; numbers, formulas, code and tags are not counted.
    assert language_consistency("a b c d e f g h 답 은") == 0.8
    assert (
        language_consistency("따라서 12 + 3 = 15 이다 $x_1$ `code` <think>", language="korean") == 1
    )
    assert language_consistency("12 $x$") == 0.0
    mixed = "<think>a b 답</think> 은 은 은"
    assert language_consistency(mixed) == pytest.approx(2 / 3)  # the answer does not count
    assert language_consistency(mixed, part="all") == pytest.approx(1 / 3)
    start = time.perf_counter()
    for opening in ("\\[", "\\(", "$$", "```", "`", "$"):
        language_consistency((opening + " a\n") * 30_000)
    assert time.perf_counter() - start < 20  # one search to the end for each takes a minute
    assert language_consistency("12 $x$", empty=1.0) == 1.0
    with pytest.raises(UsageError, match="klingon"):
        language_consistency("a", language="klingon")


def test_dropped_tags() -> None:
    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> str:
            return text

        def decode(self, ids: str, skip_special_tokens: bool) -> str:
            return ids.replace("<think>", "") if skip_special_tokens else ids

    assert dropped_tags(Tokenizer()) == ["<think>"]


def test_language_consistency_reads_syllables_written_as_letters() -> None:
    apart = unicodedata.normalize("NFD", "답은 오 입니다 so")
    assert language_consistency(apart, language="korean") == 3 / 4
