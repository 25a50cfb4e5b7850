"""Rewards of the two papers that teach a model to call a search engine: ReSearch and
R1-Searcher.

They read what the policy wrote. A page cannot answer for it, whatever tags it contains. Results are
read only in completions without an environment, as part of their text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from groupwise.rewards.base import REWARDS
from groupwise.rewards.builtin.text import between, f1, normalise, references
from groupwise.rewards.extract import boxes

Tags = Literal["r1-searcher", "research"]

_QUERY = ("<|begin_of_query|>", "<|end_of_query|>")
_DOCUMENTS = ("<|begin_of_documents|>", "<|end_of_documents|>")
_CALLS = (
    *_QUERY,
    *_DOCUMENTS,
    "<|begin_of_documents|>\n",
    "<|end_of_documents|>\n\n",
    "<|begin_of_documents|>\n(1)",
)
"""Seven strings that occur equally often where every query was answered by one well-formed block of
documents."""
_SEARCH, _RESULT = ("<search>", "</search>"), ("<result>", "</result>")
_MARKS = {
    "r1-searcher": (_QUERY, _DOCUMENTS, _CALLS),
    "research": (_SEARCH, _RESULT, (*_SEARCH, *_RESULT)),
}
"""By the name of the tags: what encloses queries, what encloses documents, and strings that occur
once a call."""
_CHINESE = re.compile("[\u4e00-\u9fff]")
_LONGEST_ANSWER = 10
"""Words that the strict format allows in an answer."""
_READ = 2000
"""Characters of an answer, from its end, in which a box is looked for."""


def _pairs_in_order(text: str, tags: tuple[str, ...]) -> bool:
    """Whether the tags come round and round in the given order, complete, from start to end."""
    found = re.findall("|".join(re.escape(tag) for tag in tags), text)
    return len(found) % len(tags) == 0 and all(
        tag == tags[i % len(tags)] for i, tag in enumerate(found)
    )


def _answers(text: str) -> list[str]:
    return between(text, "<answer>", "</answer>")


def _own_words(text: str, tags: Tags) -> str:
    """The text without the documents that were put into it."""
    for document in between(text, *_MARKS[tags][1]):
        text = text.replace(document, "", 1)
    return text


def _only_queries(text: str, tags: Tags) -> bool:
    """Whether the policy closed all its queries, and wrote no tags of results itself."""
    queries, documents, _ = _MARKS[tags]
    return _pairs_in_order(text, queries) and not any(mark in text for mark in documents)


def _research_format(text: str, *, injected: bool) -> bool:
    """Whether a text has the format; if results were injected, they are not part of it."""
    opened, closed = text.count("<think>"), text.count("</think>")
    one_answer = text.count("<answer>") == 1 == text.count("</answer>")
    if injected:
        calls = _only_queries(text, "research")
    else:
        calls = _pairs_in_order(text, (*_SEARCH, *_RESULT))
    blocks = _answers(text)
    return (
        opened == closed >= 1
        and one_answer
        and calls
        and len(blocks) == 1
        and bool(boxes(blocks[0][-_READ:]))
    )


@REWARDS.register
def research(
    text: str,
    answer: Any,
    finish: str | None = "stop",
    tool_values: Mapping[str, float] | None = None,
    *,
    format_only: float = 0.1,
) -> float | None:
    """ReSearch: 0 for a bad format, F1 of the boxed answer if it is above 0, else `format_only`.

    The format: as many `<think>` as `</think>` and at least one; exactly one `<answer>` pair with a
    `\\boxed{}` in it; every `<search>` closed and followed by a closed `<result>`, which only the
    environment may write. A completion that did not end by itself has no format either.

    Args:
        text: what the policy wrote, and the results where there is no environment.
        answer: one or several references.
        finish: "stop" unless the budget ran out.
        tool_values: what the environment counted; empty or None without one.
        format_only: what a right format with a wrong answer earns.

    Returns:
        A number from 0 to 1. An F1 below `format_only` earns less than an F1 of 0, as in the
        original.

    Example:
        >>> research("<think>a</think><answer>\\\\boxed{Barack Obama}</answer>", "Barack Obama")
        1.0
        >>> research("<think>a</think><answer>\\\\boxed{Rome}</answer>", "Paris")
        0.1

    Source: ReSearch (2503.19470), section 2.2; its code, `re_search.py`.
    Elsewhere: the original compares the last token with the end-of-sequence token; `finish` says
        the same.
    """
    golds = references(answer)
    if not golds:
        return None
    if finish != "stop" or not _research_format(text, injected=bool(tool_values)):
        return 0.0
    said = boxes(_answers(text)[0][-_READ:])[-1][2]
    best = max(f1(said, gold, rules="research") for gold in golds)
    return best if best > 0 else format_only


def _searches(text: str, tags: Tags, counted: Mapping[str, float] | None) -> float | None:
    """Number of searches; None where the tags of a query are wrong.

    Args:
        counted: by the environment; without one, searches are counted in the text.
    """
    if counted:
        if not _only_queries(text, tags):
            return None
        return counted["calls"] - counted.get("malformed", 0.0) - counted.get("refused", 0.0)
    counts = {text.count(mark) for mark in _MARKS[tags][2]}
    return counts.pop() if len(counts) == 1 else None


def _searcher_format(
    text: str, searches: float | None, *, strict: bool, tags: Tags, think: bool
) -> bool:
    """One closed block of reasoning (its opening tag is pre-filled by the prompt) and one
    answer."""
    answers = _answers(text)
    one_answer = text.count("<answer>") == 1 == text.count("</answer>") and len(answers) == 1
    if searches is None or "<think>" in text or text.count("</think>") != think or not one_answer:
        return False
    if not strict:
        return True
    said = answers[0]
    return (
        "assistant" not in text.lower()
        and not any(mark.strip() in said for mark in _MARKS[tags][2])
        and len(said.split()) <= _LONGEST_ANSWER
        and not _CHINESE.search(_own_words(text, tags))
    )


def covers(answer: str, reference: str) -> bool:
    """Cover exact match: every word of the reference occurs in the answer, in any order.

    Example:
        >>> covers("It was Obama, Barack", "Barack Obama"), covers("Obama", "Barack Obama")
        (True, False)
    """
    wanted = normalise(reference, rules="r1searcher").split()
    return bool(wanted) and set(wanted) <= set(normalise(answer, rules="r1searcher").split())


@REWARDS.register
def r1searcher_call(
    text: str,
    answer: Any = None,
    tool_values: Mapping[str, float] | None = None,
    *,
    answer_weight: float = 0.0,
    tags: Tags = "r1-searcher",
    think: bool = True,
) -> float | None:
    """R1-Searcher, stage 1 (learn to call): ½ for at least one search, ½ for the format, plus
    ±`answer_weight`.

    Args:
        text: what the policy wrote after a prompt that ends in `<think>`, and the documents where
            there is no environment.
        answer: one or several references; needed only where `answer_weight` is not 0.
        tool_values: what the environment counted, whose `calls` less `malformed` and `refused` are
            the searches; empty or None without one.
        answer_weight: 0 as in the paper; 1 as in the released code, which adds 1 where every word
            of a reference occurs in the answer and takes 1 away where not, so that totals lie in
            {-1, -½, 0, 1, 1½, 2}.
        tags: how searches are written, as in `environment.tags`.
        think: whether the format has a block of reasoning, which ends with `</think>`.

    Example:
        >>> r1searcher_call("I know.</think><answer>Rome</answer>")
        0.5

    Source: R1-Searcher (2503.05592), section 3.3; its code, `reward_server_llama_stage1.py`.
    """
    searches = _searches(text, tags, tool_values)
    formed = _searcher_format(text, searches, strict=False, tags=tags, think=think)
    score = 0.5 * ((searches or 0) >= 1) + 0.5 * formed
    if answer_weight == 0:
        return score
    golds = references(answer)
    if not golds:
        return None
    said = "".join(_answers(text)[-1:])
    return score + (answer_weight if any(covers(said, gold) for gold in golds) else -answer_weight)


@REWARDS.register
def r1searcher_answer(
    text: str,
    answer: Any,
    tool_values: Mapping[str, float] | None = None,
    *,
    penalty: float = -2.0,
    strict: bool = True,
    tags: Tags = "r1-searcher",
    think: bool = True,
) -> float | None:
    """R1-Searcher, stage 2 (learn to use): F1 of the answer, plus `penalty` where the format is
    wrong.

    Args:
        text: what the policy wrote after a prompt that ends in `<think>`, and the documents where
            there is no environment.
        answer: one or several references.
        tool_values: what the environment counted; empty or None without one.
        penalty: -2 in the paper and for Qwen, -1 in the released code for Llama.
        strict: as for Qwen, the format also forbids the word "assistant", call tags inside the
            answer, answers of more than ten words, and Chinese outside the documents. Searching not
            at all is allowed.

    Example:
        >>> r1searcher_answer("I know.</think><answer>Barack Obama</answer>", "Barack Obama")
        1.0
        >>> r1searcher_answer("Barack Obama", "Barack Obama")
        -2.0

    Source: R1-Searcher (2503.05592), equation of stage 2; its code, `reward_server_qwen_zero.py`.
    """
    golds = references(answer)
    if not golds:
        return None
    said = _answers(text)[-1:]
    score = max(f1(said[0], gold, rules="r1searcher") for gold in golds) if said else 0.0
    searches = _searches(text, tags, tool_values)
    formed = _searcher_format(text, searches, strict=strict, tags=tags, think=think)
    return score + (0.0 if formed else penalty)
