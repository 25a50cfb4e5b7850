"""Rewards that compare the text of an answer with one or several references, by string or by word.

What of a completion counts as its answer is the setting `source`: "final" takes what follows the
last `</think>`, and of that the last `<answer>` block if there is one; "tag" insists on such a
block; "all" takes the text as it is.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from groupwise.rewards.base import REWARDS, verifier

Source = Literal["final", "tag", "all"]
Rules = Literal["squad", "research", "r1searcher"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def final_answer(text: str, *, source: Source = "final") -> str | None:
    """The part of a completion that counts as its answer; None where `source` asks for a tag that
    is not there.

    Reasoning that was opened and never closed is not an answer, so "final" returns the empty string
    for it.

    Example:
        >>> final_answer("<think>Rome?</think><answer> Paris </answer>")
        'Paris'
        >>> final_answer("<think>still thinking")
        ''
        >>> final_answer("Paris", source="tag") is None
        True
    """
    if source == "all":
        return text
    if source == "final":
        if "<think>" in text and "</think>" not in text:
            return ""
        text = text.rsplit("</think>", 1)[-1]
    blocks = between(text, "<answer>", "</answer>")
    if blocks:
        return blocks[-1].strip()
    return text.strip() if source == "final" else None


def between(text: str, opening: str, closing: str) -> list[str]:
    """What stands between two marks, each time they occur, in time proportional to the text.

    Example:
        >>> between("<a>1</a> <a>2</a> <a>", "<a>", "</a>")
        ['1', '2']
    """
    found: list[str] = []
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        found.append(text[start:end])
        at = text.find(opening, end + len(closing))
    return found


def references(answer: Any) -> list[str]:
    """The reference answers of a row: one string, a list of strings (as such or in JSON), or none.

    Example:
        >>> references(["one", "one season"]), references('["one", "one season"]')
        (['one', 'one season'], ['one', 'one season'])
        >>> references("[1, 2]"), references(None)
        (['[1, 2]'], [])
    """
    if answer is None:
        return []
    if isinstance(answer, str):
        listed = _json_list(answer)
        return [answer] if listed is None else listed
    return [str(item) for item in answer] if isinstance(answer, Sequence) else [str(answer)]


def _json_list(text: str) -> list[str] | None:
    """The strings of a JSON list of strings; None for any other text, an interval such as [1, 2]
    included."""
    if not text.startswith('["'):
        return None
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) and all(isinstance(i, str) for i in listed) else None


def normalise(text: str, *, rules: Rules = "squad") -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces.

    Args:
        text: any text. Hangul and other scripts pass unchanged, apart from the white space.
        rules: "squad" and "research" delete punctuation; "r1searcher" turns it into a space and
            reads true/false as yes/no.

    Example:
        >>> normalise("The Barack-Obama!"), normalise("The Barack-Obama!", rules="r1searcher")
        ('barackobama', 'barack obama')

    Source: Rajpurkar et al. 2016 (SQuAD), evaluation script; R1-Searcher (2503.05592) and ReSearch
        (2503.19470), reward code.
    """
    blank = " " if rules == "r1searcher" else ""
    text = text.lower().translate({ord(mark): blank for mark in string.punctuation})
    text = " ".join(_ARTICLES.sub(" ", text).split())
    if rules == "r1searcher":
        text = {"true": "yes", "false": "no"}.get(text, text)
    return text


def f1(answer: str, reference: str, *, rules: Rules = "squad") -> float:
    """Word overlap: F1 = 2·P·R/(P+R) over the multisets of normalised words.

    Args:
        answer: what was answered.
        reference: what should have been.
        rules: see `normalise`; "research" and "r1searcher" moreover give 0 where one side is yes,
            no or noanswer and the other side is something else.

    Returns:
        A number from 0 to 1; 1 where both are empty after normalisation, 0 where only one is.

    Example:
        >>> round(f1("Barack Obama", "Obama"), 6)
        0.666667
        >>> [f1("Barack-Obama", "Barack Obama", rules=r) for r in ("squad", "r1searcher")]
        [0.0, 1.0]

    Source: SQuAD 2.0 evaluation script; R1-Searcher, reward server; ReSearch, `re_search.py`.
    Elsewhere: the hyphen is what tells the two search papers apart: ReSearch deletes it, so
        "Barack-Obama" is one word.
    """
    said, wanted = normalise(answer, rules=rules), normalise(reference, rules=rules)
    if rules != "squad" and said != wanted and (said in _VERDICTS or wanted in _VERDICTS):
        return 0.0
    left, right = said.split(), wanted.split()
    if not left or not right:
        return float(left == right)
    common = sum((Counter(left) & Counter(right)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(left), common / len(right)
    return 2 * precision * recall / (precision + recall)


def best_score(
    text: str, answer: Any, source: Source, score: Callable[[str, str], float]
) -> float | None:
    """The best score over all references: None without a reference, 0 without an answer."""
    golds = references(answer)
    if not golds:
        return None
    said = final_answer(text, source=source)
    return 0.0 if said is None else max(score(said, gold) for gold in golds)


@verifier
@REWARDS.register
def exact_match(text: str, answer: Any, *, source: Source = "final") -> float | None:
    """1 if the answer equals a reference character by character, apart from surrounding white
    space.

    Args:
        text: the completion.
        answer: one or several references.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Example:
        >>> exact_match("<answer>Paris</answer>", "Paris"), exact_match("paris", "Paris")
        (1.0, 0.0)
    """
    return best_score(text, answer, source, lambda said, gold: float(said.strip() == gold.strip()))


@verifier
@REWARDS.register
def normalised_match(
    text: str, answer: Any, *, source: Source = "final", rules: Rules = "squad"
) -> float | None:
    """1 if the answer equals a reference after normalisation.

    A reference that is empty after normalisation ("The.") is compared unnormalised, so that an
    empty answer does not match it.

    Args:
        text: the completion.
        answer: one or several references.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.
        rules: all ignore case, English articles and extra spaces; "squad" and "research" delete
            punctuation, "r1searcher" turns it into spaces and reads true and false as yes and no.

    Example:
        >>> normalised_match("The answer is: New York City!", "answer is new york city")
        1.0
        >>> normalised_match("<think>4</think>", "the")
        0.0

    Source: SQuAD 1.1 evaluation script (exact match).
    """

    def equal(said: str, gold: str) -> float:
        wanted = normalise(gold, rules=rules)
        return float(
            normalise(said, rules=rules) == wanted if wanted else said.strip() == gold.strip()
        )

    return best_score(text, answer, source, equal)


@REWARDS.register
def token_f1(
    text: str, answer: Any, *, source: Source = "final", rules: Rules = "squad"
) -> float | None:
    """The best word F1 over all references.

    How it is gamed: with one-word references a long list of guesses still earns a little; pair it
        with a length limit.

    Args:
        text: the completion.
        answer: one or several references.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.
        rules: see `f1`.

    Example:
        >>> round(token_f1("hello world", ["hello", "world"]), 6)
        0.666667

    Source: SQuAD evaluation script.
    Elsewhere: see `f1` for what `rules` change.
    """
    return best_score(text, answer, source, lambda said, gold: f1(said, gold, rules=rules))
