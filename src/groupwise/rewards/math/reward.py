"""Answers of mathematics: `math_equal` and the verifiers built on it.

Most answers are plain numbers, which are compared exactly. The rest is parsed into a tree
by a small parser and compared by structure, and by value at several points. Text of a
model never reaches `eval`, `sympify` or any other function that can execute it.
"""

from __future__ import annotations

import re
from typing import Any

from groupwise.rewards.base import REWARDS, verifier
from groupwise.rewards.extract import Style, boxed, counted, extract_answer
from groupwise.rewards.math.ast import Node
from groupwise.rewards.math.equality import plain_words, same
from groupwise.rewards.math.expressions import read
from groupwise.rewards.math.numbers import plain_number, same_number
from groupwise.rewards.math.phrases import (
    LONE_STATEMENT,
    clock,
    directed,
    is_program,
    same_time,
)
from groupwise.rewards.math.tokens import JOINERS, KNOWN, MAX_LENGTH, ReadError, tidy
from groupwise.rewards.math.values import NoValue

MAX_WORDS = 8

_LETTER = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
_LEADING_LETTER = re.compile(r"\(?\s*([A-Ja-j])\s*(?:[).:]+(?:\s.*)?|$)", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_STYLED = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_EMPHASISED = re.compile(r"\\text(?:bf|it)\s*\{([^{}]*\d[^{}]*)\}")
_BARE = re.compile(r"(\$?)[-+]?[\d.,/ ]+\1")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")


def math_equal(gold: str, answer: str) -> bool | None:
    """Whether an answer is mathematically the same as the reference.

    Integers, decimals, fractions, mixed numbers, percentages, currency and units; surds, powers,
    factorials, complex numbers; algebraic expressions, equations (up to a factor) and
    inequalities; tuples, lists, sets, intervals and unions; matrices; ±; choices and plain words.
    Open and closed intervals, tuples and sets differ; the order of a tuple counts, that of a list
    or set does not. A decimal stands for an exact value only with at least four significant
    digits. "2 million" is 2000000, and also meets a bare reference of 2, which may count millions.

    Args:
        gold: the reference, plain or LaTeX, with or without `$` and `\\boxed{}`.
        answer: the answer, likewise; of a whole sentence the part that answers is taken.

    Returns:
        None where the reference cannot be read as an answer (and the two are not the same text).

    Example:
        >>> math_equal("\\\\frac{1}{2}", "0.5"), math_equal("(1, 2]", "[1, 2]"), math_equal("", "1")
        (True, False, None)

    Elsewhere: math-verify compares with sympy to six decimals, so it takes 1e-7 for 2e-7 and
    (1, 2) for {1, 2}; its time limit is a signal of the main thread. Nothing here needs a limit.
    """
    gold, answer = _unstyled(gold.strip()), _unstyled(answer.strip())
    if not gold:
        return None
    if gold == answer:
        return True
    if "\n" in answer and is_program(answer) and not is_program(gold):
        return False if _readable(gold) else None
    (one, unit), (two, other) = counted(gold), counted(answer)
    if (unit or other) and (not (unit and other) or unit == other):
        gold, answer = one, two  # 99개 is 99, but 3시간 is not 3분
    hours, others = clock(_plain(gold)), clock(_plain(answer))
    if hours and others:
        return same_time(hours, others)
    (one, way), (two, other) = directed(_plain(gold)), directed(_plain(answer))
    if way and other and way != other:
        return False
    if way or other:
        gold, answer = one, two
    quick = _quick(gold, answer)
    if quick is not None:
        return quick
    gold, answer = _core(gold), _core(answer)
    quick = _quick(gold, answer)
    if quick is not None:
        return quick
    return _by_structure(gold, answer)


def _unstyled(text: str) -> str:
    """Without bold or italic type around the whole of an answer with digits: \\textbf{(073)}."""
    found = _EMPHASISED.fullmatch(text)
    return found[1].strip() if found else text


def _quick(gold: str, answer: str) -> bool | None:
    """What can be said without a parser, else None."""
    if re.sub(r"\s+", "", gold) == re.sub(r"\s+", "", answer) and gold:
        return True
    one = plain_number(_plain(gold))
    two = plain_number(_plain(answer)) if one is not None else None
    if one is not None and two is not None:
        # A bare reference of 2 may count millions, so that "2 million" meets it too.
        counts = two.scale != 1 and _BARE.fullmatch(gold) is not None
        return same_number(one, two) or (counts and one.value == two.value / two.scale)
    if one is not None and not answer:
        return False
    return None


def _core(text: str) -> str:
    """The part of a text that is the answer: the box, the last formula of a sentence, or all."""
    if "\\boxed" in text or "\\fbox" in text:
        return (extract_answer(text) if boxed(text) else text) or text
    if is_program(text) or LONE_STATEMENT.fullmatch(_plain(text)):
        return text
    formula = re.search(r"\$|\\\(|\\\[", text)
    sentence = _said(_STYLED.sub(" ", re.sub(r"\\[a-zA-Z]+", " ", text)))
    if formula and _said(text[: formula.start()]) and not text.startswith("$"):
        return extract_answer(text) or text
    saying = len(sentence) >= 4 or re.search(r"\banswer\b", text, re.IGNORECASE)
    if saying and (formula or re.search(r"\d", text)):
        return extract_answer(text) or text
    return text.strip("$ ") if text.count("$") in (1, 2) else text


def _said(text: str) -> list[str]:
    """The words of a sentence: names of functions, constants and letters are none."""
    return [word for word in _WORD.findall(text) if word not in KNOWN - JOINERS]


def _by_structure(gold: str, answer: str) -> bool | None:
    letters = [_LETTER.fullmatch(_plain(text)) for text in (gold, answer)]
    leading = [_LEADING_LETTER.fullmatch(_plain(text)) for text in (gold, answer)]
    if any(letters) and leading[0] and leading[1]:
        return leading[0][1].upper() == leading[1][1].upper()
    if not answer or len(answer) > MAX_LENGTH:
        return False if _readable(gold) else None
    if tidy(gold) == tidy(answer):
        return True
    for one in _readings(gold):
        for two in _readings(answer):
            try:
                if same(one, two):
                    return True
            except (NoValue, ArithmeticError, ValueError, RecursionError):
                continue
    if _wordy(gold) and plain_words(_plain(gold)) == plain_words(_plain(answer)):
        return True
    return False if _readable(gold) else None


def _wordy(text: str) -> bool:
    return bool(_WORD.search(_plain(text))) and not re.search(r"[\d([{\\<>=]", _plain(text))


def _plain(text: str) -> str:
    """The text without LaTeX commands around words and plain numbers."""
    if "\\" not in text and "$" not in text:
        return text
    return tidy(_STYLED.sub(r"\1", text))


def _readings(text: str) -> list[Node]:
    """The trees that a text may mean: 1,5 is a list, and a decimal in much of the world."""
    found: list[Node] = []
    if _DECIMAL_COMMA.fullmatch(text):
        found.append(read(text.replace(",", ".")))
    try:
        found.append(read(text))
    except (ReadError, ValueError):
        return found
    return found


def _readable(gold: str) -> bool:
    """Whether a mismatch with this reference means anything: it was read, or it is a few words."""
    few = len(_WORD.findall(_plain(gold))) <= MAX_WORDS
    return few and ("\\" not in gold or bool(_readings(gold)))


@verifier
@REWARDS.register
def exact_answer(
    text: str, answer: Any, *, style: Style = "answer_tag", after: str = ""
) -> float | None:
    """1 if the answer that a completion gives equals the reference mathematically, else 0.

    Args:
        text: the completion.
        answer: the reference, or a list of references of which one must be met; of a GSM8K
            solution the part after `####`.
        style: where the answer is: "answer_tag", "boxed", "gsm8k" (after ####), "last_number",
            "choice" (a letter), or "auto", which tries them.
        after: only what follows the last occurrence of this string counts, such as "</think>";
            a completion without it earns 0.

    Returns:
        None where no reference can be read.

    Example:
        >>> exact_answer("<answer>0.5</answer>", "1/2"), exact_answer("0.5", "1/2")
        (1.0, 0.0)

    Elsewhere: TRL's `accuracy_reward` looks for the answer anywhere and refuses references in
    words; open-r1's pays 1 where the reference cannot be read.
    """
    if after:
        _, mark, text = text.rpartition(after)
        if not mark:
            return 0.0 if _golds(answer) else None
    golds = _golds(answer)
    said = extract_answer(text, style=style)
    if said is None:
        readable = any(math_equal(gold, "") is not None for gold in golds)
        return 0.0 if readable else None
    verdicts = [math_equal(gold, said) for gold in golds]
    known = [verdict for verdict in verdicts if verdict is not None]
    return float(any(known)) if known else None


def _golds(answer: Any) -> list[str]:
    items = answer if isinstance(answer, list | tuple) else [answer]
    texts = [str(item) for item in items if item is not None]
    return [text.rpartition("####")[2].strip() for text in texts]
