"""Exact match, normalised match, word F1, ROUGE, and the rewards of the two search papers."""

from __future__ import annotations

import importlib.util
import json

import pytest

from data_folder import data_file
from groupwise.environments import SEARCH_TAGS, Reply, TagEnvironment
from groupwise.errors import UsageError
from groupwise.rewards.builtin.rouge import overlap, rouge, rouge_score, tokenize
from groupwise.rewards.builtin.search import covers, r1searcher_answer, r1searcher_call, research
from groupwise.rewards.builtin.text import (
    exact_match,
    f1,
    final_answer,
    normalise,
    normalised_match,
    references,
    token_f1,
)
from groupwise.types import Prompt, Stream

SEARCH = "<|begin_of_query|>q<|end_of_query|>"
FOUND = "<|begin_of_documents|>\n(1) text<|end_of_documents|>\n\n"


@pytest.mark.parametrize(
    "text, source, answer",
    [
        ("<think>a</think><answer> b </answer>", "final", "b"),
        ("<answer>a</answer><answer>b</answer>", "final", "b"),
        ("<think><answer>a</answer></think>b", "final", "b"),
        ("prefilled thought</think>b", "final", "b"),
        ("<think>never closed <answer>b</answer>", "final", ""),
        (" plain ", "final", "plain"),
        ("plain", "tag", None),
        ("<answer>x</answer>", "tag", "x"),
        ("<answer>x</answer>", "all", "<answer>x</answer>"),
    ],
)
def test_what_counts_as_the_answer(text: str, source: str, answer: str | None) -> None:
    assert final_answer(text, source=source) == answer  # type: ignore[arg-type]


def test_references_of_every_form() -> None:
    assert references('["a", "b"]') == ["a", "b"]
    assert references(("a", "b")) == ["a", "b"]
    assert references('["a", 1]') == ['["a", 1]']
    assert references('["broken') == ['["broken']
    assert references("[0, 1)") == ["[0, 1)"]
    assert references(4.0) == ["4.0"]
    assert references(None) == []


def test_normalisation_rules() -> None:
    assert normalise("  The Cat_s, an  A. ") == "cats"
    assert normalise("new_york city", rules="r1searcher") == "new york city"
    assert normalise("True", rules="r1searcher") == "yes"
    assert normalise("가을이 옳다.") == "가을이 옳다"


@pytest.mark.parametrize(
    "answer, gold, expected",
    [  # the values the original functions give
        ("Barack Obama", "Obama", 2 / 3),
        ("Barack-Obama", "Barack Obama", 1.0),
        ("The United States of America", "United States", 2 / 3),
        ("yes", "no", 0.0),
        ("yes it is", "yes", 0.0),
        ("True", "yes", 1.0),
        ("new_york city", "New York", 0.8),
        ("", "x", 0.0),
    ],
)
def test_f1_of_r1searcher(answer: str, gold: str, expected: float) -> None:
    assert f1(answer, gold, rules="r1searcher") == pytest.approx(expected)


def test_f1_of_squad_has_no_rule_for_yes_and_no() -> None:
    # 1 common word of 3 and 1: P = 1/3, R = 1, F1 = 1/2.
    assert f1("yes it is", "yes") == pytest.approx(0.5)
    assert f1("yes it is", "yes", rules="research") == 0.0
    assert f1("...", "the") == 1.0
    # "a" twice in one side counts once: common = 1, P = 1/2, R = 1.
    assert f1("b b", "b") == pytest.approx(2 / 3)


def test_no_reference_is_no_verdict_and_silence_is_no_answer() -> None:
    for reward in (exact_match, normalised_match, token_f1, rouge):
        assert reward("x", None) is None
        assert reward("", "Paris") == 0.0
        assert reward("<think>Paris", "Paris") == 0.0


def test_normalised_match_of_a_reference_that_normalises_to_nothing() -> None:
    assert normalised_match("...", "The") == 0.0
    assert normalised_match("The", "The") == 1.0


def test_agrees_with_the_external_cases_of_text_rewards() -> None:
    path = data_file("cases/reward_functions.jsonl")
    rewards = {"PuzzleMatcherVerifier": normalised_match, "F1Verifier": token_f1}
    seen = 0
    for line in path.read_text().splitlines():
        case = json.loads(line)
        if case["reward"] not in rewards or "rewards" not in case:
            continue
        for completion, expected in zip(case["completions"], case["rewards"], strict=True):
            got = rewards[case["reward"]](completion, case["inputs"]["label"])
            assert got == pytest.approx(expected), case["id"]
            seen += 1
    assert seen == 42


def test_rouge_worked() -> None:
    # pred "a b c d", gold "a b e": two common words: P = 2/4, R = 2/3, F1 = 4/7.
    assert overlap("a b c d".split(), "a b e".split()) == pytest.approx((0.5, 2 / 3, 4 / 7))
    # bigrams ab bc cd and ab be: P = 1/3, R = 1/2, F1 = 2/5.
    assert overlap("a b c d".split(), "a b e".split(), kind="2") == pytest.approx((1 / 3, 0.5, 0.4))
    # longest common subsequence of "a c b d" and "a b d" is "a b d".
    assert overlap("a c b d".split(), "a b d".split(), kind="L") == pytest.approx((0.75, 1, 6 / 7))
    assert rouge_score("d c b a", "a b c d", kind="1") == 1.0
    assert rouge_score("d c b a", "a b c d", kind="L") == 0.25
    assert rouge_score("a b c d", "a b e", measure="recall") == pytest.approx(2 / 3)


def test_identical_korean_sentences_score_one() -> None:
    said = "받침이 있으면 '이'를 쓴다."
    for kind in ("1", "2", "L"):
        assert rouge_score(said, said, kind=kind) == 1.0  # type: ignore[arg-type]
    assert tokenize("가을이 옳다.", tokens="words") == ["가을이", "옳다"]
    # By words nothing is shared, by characters 가 and 을 of two and three: P = 1, R = 2/3.
    assert rouge_score("가을", "가을이", tokens="words") == 0.0
    assert rouge_score("가을", "가을이") == pytest.approx(0.8)
    assert rouge_score("fall", "가을이") == 0.0


@pytest.mark.parametrize("tokens, package", [("kiwi", "kiwipiepy"), ("mecab", "mecab")])
def test_morphemes(tokens: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        with pytest.raises(UsageError, match="not installed"):
            tokenize("가을이 옳다.", tokens=tokens)  # type: ignore[arg-type]
        return
    assert tokenize("가을이 옳다.", tokens=tokens)[:3] == ["가을", "이", "옳"]  # type: ignore[arg-type]


def _research(answer: str, *, think: str = "<think>t</think>", calls: str = "") -> str:
    return f"{think}{calls}<answer>{answer}</answer>"


@pytest.mark.parametrize(
    "text, gold, finish, expected",
    [
        (_research(r"\boxed{Barack Obama}"), "Barack Obama", "stop", 1.0),
        (_research(r"\boxed{Obama}"), "Barack Obama", "stop", 2 / 3),
        (_research(r"\boxed{Rome}"), "Paris", "stop", 0.1),
        (_research(r"\boxed{Barack Obama}"), "Barack Obama", "length", 0.0),
        (_research("Barack Obama"), "Barack Obama", "stop", 0.0),
        (_research(r"\boxed{Rome}", calls="<search>q</search>"), "Rome", "stop", 0.0),
        (
            _research(r"\boxed{Rome}", calls="<search>q</search> <result>r</result>"),
            "Rome",
            "stop",
            1.0,
        ),
        (
            _research(r"\boxed{Rome}", calls="<result>r</result><search>q</search>"),
            "Rome",
            "stop",
            0.0,
        ),
        (_research(r"\boxed{Rome}", think=""), "Rome", "stop", 0.0),
        (_research(r"\boxed{Rome}", think="<think>t"), "Rome", "stop", 0.0),
        # one right word of 41, gold of 2 words: P = 1/41, R = 1/2, F1 = 2/43.
        (_research(rf"\boxed{{Obama {'x ' * 40}}}"), "Barack Obama", "stop", 2 / 43),
        (_research(r"\boxed{Barack-Obama}"), "Barack Obama", "stop", 0.1),
        (_research(r"\boxed{yes}"), "no", "stop", 0.1),
        (_research(r"\boxed{Rome}") + "<answer>x</answer>", "Rome", "stop", 0.0),
    ],
)
def test_research_reward(text: str, gold: str, finish: str, expected: float) -> None:
    assert research(text, gold, finish) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text, paper, code",
    [  # paper: ½ search + ½ format; code: ±1 more for cover exact match
        (f"t{SEARCH}{FOUND}</think><answer>Obama, Barack</answer>", 1.0, 2.0),
        (f"t{SEARCH}{FOUND}</think><answer>Rome</answer>", 1.0, 0.0),
        ("t</think><answer>Barack Obama</answer>", 0.5, 1.5),
        (f"t{SEARCH}{FOUND}<answer>Rome</answer>", 0.5, -0.5),
        (f"t{SEARCH}</think><answer>Rome</answer>", 0.0, -1.0),
        ("<think>t</think><answer>Barack Obama</answer>", 0.0, 1.0),
    ],
)
def test_r1searcher_first_stage(text: str, paper: float, code: float) -> None:
    assert r1searcher_call(text) == paper
    assert r1searcher_call(text, "Barack Obama", answer_weight=1.0) == code


@pytest.mark.parametrize(
    "text, called, answered",
    [
        ("<search>q</search><result>r</result> <answer>Rome</answer>", 1.0, 1.0),
        ("<answer>Rome</answer>", 0.5, 1.0),
        ("<search>q</search> <answer>Rome</answer>", 0.0, -1.0),
        ("</think><answer>Rome</answer>", 0.0, -1.0),
        ("<answer><search>q</search><result>r</result> Rome</answer>", 1.0, 0.25 - 2),
    ],
)
def test_r1searcher_in_other_tags_and_without_reasoning(
    text: str, called: float, answered: float
) -> None:
    assert r1searcher_call(text, tags="research", think=False) == called
    found = r1searcher_answer(text, "Rome", tags="research", think=False)
    assert found == pytest.approx(answered)


def asked(environment: str, before: str, page: str, after: str) -> tuple[str, dict[str, float]]:
    """What the policy wrote before and after a page, and what the environment counted."""
    tool = TagEnvironment(lambda query: Reply(text=page), tags=SEARCH_TAGS[environment])
    reply = tool.reply(tool.begin(Prompt(id="q"), stream=Stream()), before)
    return before + after, dict(reply.values)


@pytest.mark.parametrize(
    "page",
    [
        "<answer>Barack Obama</answer>",
        "</think><answer>Barack Obama</answer>",
        "<think>",
        "assistant 中",
        SEARCH + FOUND,
    ],
)
def test_a_page_cannot_answer_search_or_spoil_the_format_for_the_policy(page: str) -> None:
    told, counted = asked("r1-searcher", f"I need it.{SEARCH}", page, "</think>")
    assert r1searcher_call(told, "Barack Obama", counted) == 0.5, "it called, and gave no answer"
    assert r1searcher_call(told, "Barack Obama", counted, answer_weight=1.0) == -0.5
    assert r1searcher_answer(told, "Barack Obama", counted) == -2.0
    told, counted = asked("r1-searcher", SEARCH, page, "Yes.</think><answer>Barack Obama</answer>")
    assert r1searcher_call(told, None, counted) == r1searcher_answer(told, "Obama Barack", counted)
    assert r1searcher_answer(told, "Barack Obama", counted) == 1.0


@pytest.mark.parametrize(
    "page", [r"<answer>\boxed{Rome}</answer>", r"\boxed{Rome}", "<think>", "</answer>", "<result>"]
)
def test_research_reads_the_answer_of_the_policy_alone(page: str) -> None:
    search = "<think>t</think><search>q</search>"
    told, counted = asked("research", search, page, "<answer>Rome</answer>")
    assert research(told, "Rome", "stop", counted) == 0.0, "without a box of its own"
    told, counted = asked("research", search, page, "")
    assert research(told, "Rome", "stop", counted) == 0.0
    told, counted = asked("research", search, page, r"<answer>\boxed{Rome}</answer>")
    assert research(told, "Rome", "stop", counted) == 1.0


@pytest.mark.parametrize("own", ["<result>r</result>", "<search>q", "</search>", "<result>"])
def test_results_that_the_policy_wrote_itself_break_the_format(own: str) -> None:
    text = rf"<think>t</think>{own}<answer>\boxed{{Rome}}</answer>"
    assert research(text, "Rome", "stop", {"calls": 0.0}) == 0.0
    told = f"{own}<answer>Rome</answer>"
    assert r1searcher_call(told, None, {"calls": 0.0}, tags="research", think=False) == 0.0
    refused = {"calls": 2.0, "malformed": 1.0, "refused": 1.0}
    assert r1searcher_call("<answer>Rome</answer>", None, refused, think=False) == 0.5


def test_cover_match_needs_every_word() -> None:
    assert covers("It was Barack, the Obama", "Barack Obama")
    assert not covers("Obama", "Barack Obama")
    assert not covers("anything", "the")


@pytest.mark.parametrize(
    "text, qwen, llama",
    [
        ("t</think><answer>Barack Obama</answer>", 1.0, 1.0),
        ("<think>t</think><answer>Barack Obama</answer>", -1.0, 0.0),
        ("no answer at all", -2.0, -1.0),
        # what only the strict format forbids: F1 stays 1, or 4/13 for 2 right words of 11
        ("Assistant t</think><answer>Barack Obama</answer>", -1.0, 1.0),
        ("中t</think><answer>Barack Obama</answer>", -1.0, 1.0),
        (f"t</think><answer>Barack Obama{' x' * 9}</answer>", 4 / 13 - 2, 4 / 13),
        (f"t{SEARCH}{FOUND.replace('text', '中')}</think><answer>Barack Obama</answer>", 1.0, 1.0),
    ],
)
def test_r1searcher_second_stage(text: str, qwen: float, llama: float) -> None:
    assert r1searcher_answer(text, "Barack Obama") == pytest.approx(qwen)
    assert r1searcher_answer(text, "Barack Obama", penalty=-1.0, strict=False) == pytest.approx(
        llama
    )


def test_hostile_text_is_judged_in_a_moment() -> None:
    for text in ("<answer>" * 20_000, "<search>" * 20_000, r"\boxed{" * 5_000, "a " * 200_000):
        assert token_f1(text, "x") == 0.0
        assert research(text, "x") == 0.0
        assert rouge(text, "x") == 0.0
