"""ROUGE with a tokenizer that does not delete the language it is given."""

from __future__ import annotations

import functools
import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from groupwise.errors import UsageError
from groupwise.rewards.base import REWARDS
from groupwise.rewards.builtin.text import Source, best_score

Tokens = Literal["auto", "words", "characters", "kiwi", "mecab"]
RougeKind = Literal["1", "2", "L"]
Measure = Literal["f1", "recall", "precision"]

_HANGUL = re.compile(r"[\uac00-\ud7a3]")
_WORD = re.compile(r"\w+")
_PACKAGES = {"kiwi": ("kiwipiepy", "kiwipiepy"), "mecab": ("mecab", "python-mecab-ko")}


def tokenize(text: str, *, tokens: Tokens = "auto") -> list[str]:
    """Lower-cased pieces of a text, without punctuation.

    Args:
        text: any text.
        tokens: "words" (runs of letters and digits of any script), "characters" (each of those by
            itself), "kiwi" and "mecab" (Korean morphemes, from the packages kiwipiepy and
            python-mecab-ko); "auto" is "characters" for a text with Hangul in it, else "words".

    Raises:
        UsageError: a morpheme tokenizer that is not installed.

    Example:
        >>> tokenize("A cat, a CAT."), tokenize("가을이 옳다.")
        (['a', 'cat', 'a', 'cat'], ['가', '을', '이', '옳', '다'])
    """
    if tokens == "auto":
        tokens = "characters" if _HANGUL.search(text) else "words"
    if tokens in ("kiwi", "mecab"):
        pieces = _morphemes(tokens)(text)
        return [piece.lower() for piece in pieces if _WORD.search(piece)]
    words = _WORD.findall(text.lower())
    return [character for word in words for character in word] if tokens == "characters" else words


@functools.lru_cache(maxsize=2)
def _morphemes(name: str) -> Callable[[str], list[str]]:
    """A morpheme tokenizer, made once per process: its dictionary takes a second to load."""
    package, source = _PACKAGES[name]
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise UsageError(
            f"tokens = {name!r}: the package {package} is not installed; pip install {source}, "
            "or use tokens = 'characters'."
        ) from None
    if name == "kiwi":
        kiwi = module.Kiwi()
        return lambda text: [token.form for token in kiwi.tokenize(text)]
    return module.MeCab().morphs


def _longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence, in memory proportional to one of them."""
    row = [0] * (len(right) + 1)
    for piece in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = row[column]
            row[column] = diagonal + 1 if piece == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]


def overlap(
    left: Sequence[str], right: Sequence[str], *, kind: RougeKind = "1"
) -> tuple[float, float, float]:
    """(precision, recall, F1) of the n-grams (or longest common subsequence) of `left` that occur
    in `right`.

    Example:
        >>> [round(x, 6) for x in overlap("a b c d".split(), "a b e".split())]
        [0.5, 0.666667, 0.571429]
    """
    if kind == "L":
        common, made, wanted = _longest_common(left, right), len(left), len(right)
    else:
        n = int(kind)
        grams = [
            Counter(zip(*(side[i:] for i in range(n)), strict=False)) for side in (left, right)
        ]
        common, made, wanted = ((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / made, common / wanted
    return precision, recall, 2 * precision * recall / (precision + recall)


def rouge_score(
    said: str,
    reference: str,
    *,
    kind: RougeKind = "1",
    measure: Measure = "f1",
    tokens: Tokens = "auto",
    limit: int = 2000,
) -> float:
    """ROUGE-1, -2 or -L between two texts.

    Args:
        said, reference: the texts; "auto" chooses the tokenizer by the reference, so that both get
            the same.
        kind: "1", "2" for n-grams, "L" for the longest common subsequence.
        measure: "f1", "recall" or "precision".
        tokens: see `tokenize`.
        limit: tokens of each side that are looked at; bounds the time of "L", which grows with the
            product.

    Returns:
        From 0 to 1; 1 for two identical texts with at least one n-gram in them, else 0 where there
        is nothing to compare.

    Example:
        >>> rouge_score("가을이 옳다", "가을이 옳다"), round(rouge_score("a b c d", "a b e"), 6)
        (1.0, 0.571429)

    Source: Lin 2004, ROUGE.
    Elsewhere: the default tokenizer of rouge-score keeps [a-z0-9] only, so two identical Korean
        sentences score 0 there; it also stems English words on request, which is left out here.
    """
    if tokens == "auto":
        tokens = "characters" if _HANGUL.search(reference) else "words"
    sides = [tokenize(text, tokens=tokens)[:limit] for text in (said, reference)]
    scores = dict(zip(("precision", "recall", "f1"), overlap(*sides, kind=kind), strict=True))
    return scores[measure]


@REWARDS.register
def rouge(
    text: str,
    answer: Any,
    *,
    kind: RougeKind = "L",
    measure: Measure = "f1",
    tokens: Tokens = "auto",
    source: Source = "final",
) -> float | None:
    """The best ROUGE over all references.

    How it is gamed: recall is met by saying everything; F1 of single characters is high for any
    fluent Korean of the right length, because a few syllables make up most of a text (prefer "2",
    "L" or morphemes for long answers).

    Args:
        text: the completion.
        answer: one or several references.
        kind: "1" or "2" for n-grams, "L" for the longest common subsequence.
        measure: "f1", "recall" or "precision".
        tokens: "words", "characters", or Korean morphemes by "kiwi" or "mecab"; "auto" is
            "characters" for a reference with Hangul in it, else "words".
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Example:
        >>> rouge("<think>…</think>가을이 옳다.", "가을이 옳다.")
        1.0

    Source: Lin 2004, ROUGE.
    Elsewhere: see `rouge_score`.
    """
    score = functools.partial(rouge_score, kind=kind, measure=measure, tokens=tokens)
    return best_score(text, answer, source, score)
