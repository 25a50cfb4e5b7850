"""The Korean orthography task: particles, form of the answer, scores, and the items that ship."""

from __future__ import annotations

import json
import time
import unicodedata

import pytest

from data_folder import data_file
from groupwise.errors import UsageError
from groupwise.prompts.generators.korean_norms import korean_norms
from groupwise.rewards.builtin.korean import (
    final_consonant,
    korean_exact_match,
    korean_format,
    korean_reason,
    normalise_answer,
    particle,
    split_answer,
)

GOLD = '"가을"이 옳다. 받침이 있으면 이를 쓴다.'


@pytest.mark.parametrize(
    "text, lenient, strict",
    [  # the lenient column is what the team's pattern gives, run on these strings,
        # but for sentences without a letter
        ('"가을"이 옳다. 이유', 1, 1),
        ('"가을"이 옳다', 1, 0),
        ('"가을"가 옳다.', 1, 0),
        ('"가을"가 옳다. 이유', 1, 0),
        (' "가을"이 옳다.', 1, 0),
        (' "가을"이 옳다. 이유 ', 1, 1),
        ("“가을”이 옳다.", 0, 0),
        ("가을이 옳다.", 0, 0),
        ('"가을" 이 옳다.', 0, 0),
        ('"가을"이옳다.', 0, 0),
        ('정답: "가을"이 옳다.', 0, 0),
        ('""이 옳다.', 0, 0),
        ("'가을'이 옳다.", 0, 0),
        ('"사과"가 옳다. 이유\n둘째 줄', 1, 1),
        ('"사과"이 옳다. 이유', 1, 0),
        ('"가을이다."가 옳다. 이유', 1, 1),
        ('"가을이다."이 옳다. 이유', 1, 0),
        ('"ABC"가 옳다. 이유', 1, 1),
        ('"ABC"이 옳다. 이유', 1, 0),  # 씨
        ('"7"이 옳다. 이유', 1, 1),  # 칠
        ('"7"가 옳다. 이유', 1, 0),
        ('"서울(Seoul)"이 옳다. 이유', 1, 1),
        ('"사과(沙果)"가 옳다. 이유', 1, 1),
        # a sentence of nothing, which the team's pattern lets pass
        ('" "가 옳다. 이유', 0, 0),
        ('"."이 옳다. 이유', 0, 0),
        ('"\u200b"이 옳다. 이유', 0, 0),
        ('"_"가 옳다. 이유', 0, 0),
        ('"\u3164"이 옳다. 이유', 0, 0),  # letters by their category, but nothing is seen of them
        ('"\u115f\u1160"이 옳다. 이유', 0, 0),
        ('"가을"이 옳다. .', 1, 0),
        ('"가을"이 옳다. \u200b', 1, 0),
    ],
)
def test_the_form_of_an_answer(text: str, lenient: int, strict: int) -> None:
    assert korean_format(text, strict=False) == lenient
    assert korean_format(text) == strict
    assert korean_format(f"<think>{GOLD}</think>{text}") == strict


def test_final_consonants_by_the_external_cases() -> None:
    seen = 0
    for line in data_file("korean_norms/es_hangul_cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        if case["function"] == "hasBatchim" and len(case["args"]) == 1:
            final = final_consonant(case["args"][0][-1:])
            assert bool(final) is case["expected"], case["id"]
            seen += 1
    assert seen == 10


def test_particles_by_the_external_cases() -> None:
    seen = 0
    for line in data_file("korean_norms/es_hangul_cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        if case["function"] != "josa" or not case["args"][0]:
            continue
        word, pair = case["args"]
        assert word + str(particle(word, pair)) == case["expected"], case["id"]
        seen += 1
    assert seen == 52


def test_particles_where_the_reading_is_unknown() -> None:
    assert particle("cat") is None
    assert particle("") is None
    assert particle("그는 갔다.)") == "가"


@pytest.mark.parametrize(
    ("word", "pair", "fitting"),
    [("서울(Seoul)", "이/가", "이"), ("사과 (한 개)", "을/를", "를"), ("그것[이것]", "이/가", "이"),
     ("7", "이/가", "이"), ("2", "이/가", "가"), ("10", "은/는", "은"), ("1,000", "을/를", "을"),
     ("1000000000000", "이/가", "가"), ("8", "으로/로", "로"), ("3", "으로/로", "으로"),
     ("50%", "이/가", "가"), ("1/2", "이/가", "이"), ("2/10", "이/가", "가"),
     ("7/9", "으로/로", "로"),
     ("URL", "으로/로", "로"), ("R", "으로/로", "로"), ("A", "이/가", "가"), ("FM", "은/는", "은"),
     ("100,000,000,000,000", "이/가", "가"), ("10" + "0" * 16, "이/가", "이"),
     ("1" + "0" * 20, "이/가", "가"), ("0" * 13, "이/가", "이"), ("７", "이/가", "이"),
     ("사과(Seoul(물))", "이/가", "가"), ("사과(" + "물" * 300 + ")", "이/가", "가"),
     ("사과{물}", "을/를", "를"), ("서울(首尔)에서", "은/는", "는"), ("(물)", "이/가", "이"),
     ("hotel", "이/가", "이"), ("camera", "이/가", "가"), ("(", "이/가", None)],
)  # fmt: skip
def test_particles_after_brackets_digits_and_latin_letters(
    word: str, pair: str, fitting: str | None
) -> None:
    assert particle(word, pair) == fitting


def test_letters_are_composed_before_anything_is_read() -> None:
    apart = unicodedata.normalize("NFD", GOLD)
    assert apart != GOLD and particle(unicodedata.normalize("NFD", "가을")) == "이"
    assert korean_format(apart) == korean_format(apart, strict=False) == 1.0
    assert korean_exact_match(apart, GOLD) == korean_exact_match(GOLD, apart) == 1.0
    assert korean_reason(apart, GOLD) == korean_reason(GOLD, apart) == 1.0


def test_the_published_split_cuts_at_ga_before_i() -> None:
    assert split_answer(GOLD) == ('"가을"이 옳다', "받침이 있으면 이를 쓴다.")
    # "이 옳다" comes first in the text, "가 옳다" first in the list: the cut is at the later place.
    assert split_answer('"X"이 옳다. "Y"가 옳다는 것은 아니다.') == (
        '"X"이 옳다. "Y"가 옳다',
        "는 것은 아니다.",
    )
    assert split_answer("모른다") == ("모른다", "")


def test_exact_match_by_the_published_rules_and_their_pitfalls() -> None:
    assert korean_exact_match('"가을"이 옳다. 다르게 말하면', GOLD) == 1.0
    assert korean_exact_match("'가을'이 옳다", GOLD) == 1.0
    assert korean_exact_match("가을이 옳다", GOLD) == 1.0
    assert korean_exact_match('"가을"가 옳다.', GOLD) == 0.0
    assert korean_exact_match("“가을”이 옳다.", GOLD) == 0.0
    assert korean_exact_match("“가을”이 옳다.", GOLD, rules="team") == 1.0
    assert korean_exact_match('"맑은  가을"이 옳다', '"맑은 가을"이 옳다', rules="team") == 1.0
    assert korean_exact_match("", GOLD) == 0.0
    assert korean_exact_match("x", None) is None


@pytest.mark.parametrize("blank", ["", '""', " ", "“”", "\u3164"])
def test_a_blank_answer_earns_nothing(blank: str) -> None:
    for rules in ("official", "team"):
        assert korean_exact_match(blank, f"{GOLD}#", rules=rules) == 0.0
        assert korean_exact_match(blank, '"#"가을', rules=rules) == 0.0
        assert korean_exact_match("x", blank, rules=rules) is None
        assert korean_exact_match(blank, blank, rules=rules) is None


def test_alternatives_between_hashes() -> None:
    both = '"가을"이 옳다#"겨울"이 옳다. 까닭'
    # The reference is cut at its first "이 옳다" too: the second alternative is in the reason.
    assert korean_exact_match('"가을"이 옳다', both) == 1.0
    assert korean_exact_match('"겨울"이 옳다', both) == 0.0
    # Alternatives with one particle behind the last: only the last can be met.
    last = '"가을#겨울"이 옳다. 까닭'
    assert korean_exact_match('"겨울"이 옳다', last) == 1.0
    assert korean_exact_match('"가을"이 옳다', last) == 0.0


def test_normalisation_of_both_rules() -> None:
    assert normalise_answer(" \"가\"'나' ") == "가나"
    assert normalise_answer("「가」“나”\u3000ＡＢ", rules="team") == "「가」나 AB"


def test_reasons() -> None:
    assert korean_reason(GOLD, GOLD) == 1.0
    assert korean_reason('"가을"이 옳다', GOLD) == 0.0
    assert korean_reason(GOLD, '"가을"이 옳다') is None
    assert korean_reason(GOLD, None) is None
    # reasons "가나다라" and "가나마": 2 common characters, P = 1/2, R = 2/3, F1 = 4/7
    assert korean_reason('"A"이 옳다. 가나다라', '"A"이 옳다. 가나마') == pytest.approx(4 / 7)


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ("가을이 옳다. 이유", 1, 1),
        ('"가을이 옳다. 이유"', 1, 1),
        ("\"가을이 옳다. 'ㄹ' 받침\"", 1, 1),
        ('"가을이 옳다. 이유', 1, 0),  # the quote is never closed
        ('"가을"이 옳다. 이유', 0, 0),  # the other form
        ("가을가 옳다. 이유", 1, 0),
        ("가을이 옳다.", 1, 0),
        ("이 옳다. 이유", 0, 0),
        (".이 옳다. 이유", 0, 0),
        ("\u200b가 옳다. 이유", 0, 0),
        ("가을!?이 옳다. 이유", 1, 1),
    ],
)
def test_the_literal_form(text: str, lenient: int, strict: int) -> None:
    assert korean_format(text, form="literal", strict=False) == lenient
    assert korean_format(text, form="literal") == strict


@pytest.mark.parametrize("piece", ["가", "가 ", "!", "이 옳다", '"'])
def test_the_form_takes_time_in_proportion_to_the_text(piece: str) -> None:
    start = time.process_time()
    for strict in (True, False):
        korean_format('"' + piece * (60_000 // len(piece)), strict=strict)
        korean_format(piece * (60_000 // len(piece)), strict=strict, form="literal")
    assert time.process_time() - start < 1.0  # quadratic patterns take ten seconds


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(UsageError, match="form = 'plain'"):
        korean_format("x", form="plain")  # pyright: ignore[reportArgumentType]


def test_items_are_in_the_form_that_is_asked_for() -> None:
    items = korean_norms(1000) + korean_norms(1000, split="held_out")
    assert len({item.id for item in items}) == len(items) >= 60
    for item in items:
        question, answer = item.columns["question"], item.answer
        assert answer is not None
        assert korean_format(answer) == 1.0, answer
        before, _, rest = question.partition("{")
        choices, _, after = rest.partition("}")
        chosen = [
            f"{before}{choice}{after}".split('" ')[0].strip('"') for choice in choices.split("/")
        ]
        assert sum(answer.startswith(f'"{sentence}"') for sentence in chosen) == 1, question


def test_the_first_choice_is_not_always_right() -> None:
    items = korean_norms(1000) + korean_norms(1000, split="held_out")
    first = [
        i for i in items if _first_choice(i.columns["question"]) in str(i.answer).split('"')[1]
    ]
    assert 0.4 < len(first) / len(items) < 0.6


def _first_choice(question: str) -> str:
    return question.partition("{")[2].partition("/")[0]
