"""Rewards for how a completion is written: tags, their order, steps, repetition, language.

Text reaches these rewards with its special tokens kept, so tags that are single tokens of the
vocabulary are seen; `dropped_tags` tells which ones a decoder that skips special tokens would lose.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from groupwise.errors import UsageError
from groupwise.rewards.base import REWARDS, looks_for
from groupwise.rewards.extract import boxes

_STRICT = re.compile(
    r"<reasoning>\n(?P<first>.*?)\n</reasoning>\n<answer>\n(?P<second>.*?)\n</answer>\s*", re.DOTALL
)
_SOFT = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
_THINK_ANSWER = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"
_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_CLOSING = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "```": "```"}
_NOT_WORDS = re.compile(
    r"(?P<opening>\$\$|\\\[|\\\(|```)|\$[^$\n]*\$|`[^`\n]*`|\\[a-zA-Z]+(?:\{[^{}]*\})*|</?\w+>"
)
_SCRIPTS: dict[str, re.Pattern[str]] = {
    "korean": re.compile(r"[\uac00-\ud7a3]"),
    "chinese": re.compile(r"[\u4e00-\u9fff]"),
    "japanese": re.compile(r"[\u3040-\u30ff]"),
    "english": re.compile(r"[A-Za-z]"),
    "russian": re.compile(r"[\u0400-\u04ff]"),
}
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@looks_for("<reasoning>", "</reasoning>", "<answer>", "</answer>")
@REWARDS.register
def reasoning_answer(
    text: str, *, form: Literal["strict", "soft", "tags"] = "strict", prefix: str = ""
) -> float:
    """Whether a completion is `<reasoning>…</reasoning><answer>…</answer>`.

    "strict": every tag on a line of its own and nothing else. "soft": both blocks in this order at
    the start. "tags": ¼ for each of the four tags that occurs exactly once with its line breaks,
    less 0.002 per character after `</answer>`, not below 0.

    Args:
        text: the completion.
        form: "strict", "soft" or "tags".
        prefix: what the prompt pre-filled; it is put before the text.

    Example:
        >>> good = "<reasoning>\\n1+1\\n</reasoning>\\n<answer>\\n2\\n</answer>\\n"
        >>> [reasoning_answer(good, form=form) for form in ("strict", "soft", "tags")]
        [1.0, 1.0, 0.998]

    Source: SoftRank-GRPO, training script (weights ½, ½ and ½).
    Elsewhere: the original patterns lack DOTALL, so they never match reasoning of several lines;
    its tag score counts what follows `</answer>` twice and goes below 0.
    """
    text = prefix + text
    if form == "strict":
        match = _STRICT.fullmatch(text)
        clean = match is not None and not re.search(r"</?(?:reasoning|answer)>", match["first"])
        return float(clean and match is not None and "answer>" not in match["second"])
    if form == "soft":
        return float(_SOFT.match(text) is not None)
    marks = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    score = 0.25 * sum(text.count(mark) == 1 for mark in marks)
    tail = len(text.rpartition("</answer>")[2]) if "</answer>" in text else 0
    return max(score - 0.002 * tail, 0.0)


@looks_for("<answer>", "</answer>")
@REWARDS.register
def integer_answer(text: str) -> float:
    """1 if the last `<answer>` block is a whole number, optionally signed, else 0.

    Source: SoftRank-GRPO, training script (weight ½).
    """
    inside = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return float(bool(inside) and re.fullmatch(r"\s*-?\d+\s*", inside[-1]) is not None)


@looks_for(*_TAGS)
@REWARDS.register
def think_answer(text: str, *, prefix: str = "", loose: bool = False) -> float:
    """1 for `<think>⏎…⏎</think>⏎<answer>⏎…⏎</answer>` and nothing else, every tag once.

    Args:
        text: the completion.
        prefix: what the prompt pre-filled, such as "<think>\\n".
        loose: the pattern of open-r1 as it is: lines after `</answer>` and repeated tags pass.

    Example:
        >>> good = "<think>\\nhm\\n</think>\\n<answer>\\n2\\n</answer>"
        >>> think_answer(good), think_answer(good + "\\n?"), think_answer(good + "\\n?", loose=True)
        (1.0, 0.0, 1.0)

    Source: DeepSeek-R1 (2501.12948), section 2.2; open-r1, `format_reward`.
    Elsewhere: open-r1 compiles with MULTILINE, so `$` matches at the end of any line.
    """
    text = prefix + text
    if loose:
        return float(re.match(f"^{_THINK_ANSWER}$", text, re.DOTALL | re.MULTILINE) is not None)
    once = all(text.count(tag) == 1 for tag in _TAGS)
    return float(once and re.fullmatch(_THINK_ANSWER, text, re.DOTALL) is not None)


@looks_for("<think>", "</think>")
@REWARDS.register
def think_format(text: str, *, prefix: str = "") -> float:
    """1 if the text is one `<think>…</think>` block followed by anything.

    Args:
        text: the completion.
        prefix: what the prompt pre-filled; it is put before the text.

    Example:
        >>> think_format("<think>a</think>b"), think_format("<think><think></think>b")
        (1.0, 0.0)

    Source: TRL, `think_format_reward`.
    """
    pattern = r"<think>(?!.*<think>).*?</think>.*"
    return float(re.fullmatch(pattern, prefix + text, re.DOTALL) is not None)


@looks_for("<think>", "</think>")
@REWARDS.register
def think_boxed(text: str, *, prefix: str = "") -> float:
    """1 if a closed `<think>` block comes before a closed box.

    Args:
        text: the completion.
        prefix: what the prompt pre-filled; it is put before the text.

    Source: NeMo-RL, `geo3k_reward` (weight 0.1 beside accuracy 0.9).
    """
    text = prefix + text
    start, end = text.find("<think>"), text.find("</think>")
    found = boxes(text)
    return float(0 <= start < end and bool(found) and found[-1][0] > end)


@looks_for(*_TAGS)
@REWARDS.register
def ordered_tags(text: str, *, right: float = 1.0, wrong: float = -1.0, prefix: str = "") -> float:
    """`right` if each of the think and answer tags occurs exactly once and in order.

    Args:
        text: the completion.
        right, wrong: the two rewards.
        prefix: what the prompt pre-filled; it is put before the text.

    Source: Logic-RL (2502.14768), `validate_response_structure`.
    """
    text = prefix + text
    places = [text.find(tag) for tag in _TAGS]
    return right if all(text.count(t) == 1 for t in _TAGS) and places == sorted(places) else wrong


@looks_for(*_TAGS)
@REWARDS.register
def tag_count(text: str, *, prefix: str = "") -> float:
    """¼ for each of the four think and answer tags that occurs exactly once with its line breaks.

    Args:
        text: the completion.
        prefix: what the prompt pre-filled; it is put before the text.

    Source: open-r1, `tag_count_reward`.
    """
    text = prefix + text
    marks = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return 0.25 * sum(text.count(mark) == 1 for mark in marks)


@looks_for(*_TAGS)
@REWARDS.register
def code_format(text: str, *, language: str = "python", prefix: str = "") -> float:
    """1 for the blocks of `think_answer` with fenced code in the answer.

    Args:
        text: the completion.
        language: what the fence names.
        prefix: what the prompt pre-filled; it is put before the text.

    Source: open-r1, `get_code_format_reward`.
    """
    block = rf"```{re.escape(language)}.*?```"
    pattern = rf"<think>\n.*?\n</think>\n<answer>\n.*?{block}.*?\n</answer>"
    return float(re.fullmatch(pattern, prefix + text, re.DOTALL) is not None)


@REWARDS.register
def reasoning_steps(text: str, *, enough: int = 3) -> float:
    """Share of `enough` visible steps: "Step 1:", a number or bullet, "First,", "Finally,".

    Example:
        >>> reasoning_steps("First, add. Finally, done.", enough=4)
        0.5

    Source: open-r1, `reasoning_steps_reward`.
    Elsewhere: as there, a number opens a step only at the very start of the text.
    """
    if enough < 1:
        raise UsageError(f"reward.enough = {enough}: must be at least 1.")
    return min(1.0, len(_STEPS.findall(text)) / enough)


@REWARDS.register
def repetition(text: str, *, ngram: int = 3, max_penalty: float = -1.0) -> float:
    """max_penalty · (1 − distinct n-grams / n-grams), over lower-case words; 0 for a short text.

    Args:
        text: the completion.
        ngram: words per n-gram.
        max_penalty: reached where every n-gram is the same; not positive.

    Example:
        >>> round(repetition("a b c a b c a b c"), 6)
        -0.571429

    Source: Demystifying Long CoT (2502.03373); open-r1, `get_repetition_penalty_reward`.
    """
    return _repetition(text.lower().split(), ngram, max_penalty)


@REWARDS.register
def token_repetition(tokens: Sequence[int], *, ngram: int = 3, max_penalty: float = -1.0) -> float:
    """`repetition` over token ids, for text without word boundaries.

    Args:
        tokens: ids of the completion.
        ngram: tokens per n-gram.
        max_penalty: reached where every n-gram is the same; not positive.

    Example:
        >>> token_repetition([5, 5, 5, 5, 5], ngram=2)
        -0.75

    Source: TRL, `get_repetition_penalty_reward`.
    """
    return _repetition(tokens, ngram, max_penalty)


def _repetition(items: Sequence[Any], ngram: int, max_penalty: float) -> float:
    if max_penalty > 0:
        raise UsageError(f"reward.max_penalty = {max_penalty}: must not be positive.")
    if ngram < 1:
        raise UsageError(f"reward.ngram = {ngram}: must be at least 1.")
    total = len(items) - ngram + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(items[i : i + ngram]) for i in range(total)})
    return max_penalty * (1 - distinct / total)


def _words_only(text: str) -> str:
    """The text without formulas, code and tags; a mark that is never closed is looked for once."""
    kept: list[str] = []
    never: set[str] = set()
    at = 0
    while found := _NOT_WORDS.search(text, at):
        kept += (text[at : found.start()], " ")
        at = found.end()
        if (opening := found["opening"]) and opening not in never:
            end = text.find(_CLOSING[opening], at)
            at = end + len(_CLOSING[opening]) if end >= 0 else at
            never |= {opening} if end < 0 else set()
    return "".join([*kept, text[at:]])


@REWARDS.register
def language_consistency(
    text: str,
    *,
    language: str = "english",
    empty: float = 0.0,
    part: Literal["reasoning", "all"] = "reasoning",
) -> float:
    """Share of the words of the chain of thought that are in the target language.

    A word is a run of non-space characters with a letter of any script; formulas, LaTeX, code,
    tags and numbers are not words. It is in the language if it contains a letter of its script.

    Args:
        text: the completion.
        language: one of chinese, english, japanese, korean, russian.
        empty: the reward of a text without words.
        part: "reasoning" reads what stands before the last `</think>`, and all of a text without
            that tag; "all" reads the answer too.

    Example:
        >>> language_consistency("답은 $x = 5$ 입니다 so", language="korean")
        0.6666666666666666

    Source: DeepSeek-R1 (2501.12948), section 2.3.2, which does not define a word.
    """
    if language not in _SCRIPTS:
        raise UsageError(f"reward.language = {language!r}: must be one of {', '.join(_SCRIPTS)}.")
    if part == "reasoning":
        before, closed, after = text.rpartition("</think>")
        text = before if closed else after
    text = unicodedata.normalize("NFC", text)  # Hangul syllables, not their letters
    words = [w for w in _words_only(text).split() if any(c.isalpha() for c in w)]
    if not words:
        return empty
    return sum(_SCRIPTS[language].search(word) is not None for word in words) / len(words)


def dropped_tags(tokenizer: Any, *, tags: Iterable[str] = _TAGS) -> list[str]:
    """Tags that disappear when a tokenizer decodes with special tokens skipped.

    Such tags are in `Completion.text`, but a reward that decodes for itself never sees them.

    Args:
        tokenizer: of transformers.
        tags: the tags to try.
    """
    lost = []
    for tag in tags:
        ids = tokenizer.encode(f"a{tag}b", add_special_tokens=False)
        if tag not in tokenizer.decode(ids, skip_special_tokens=True):
            lost.append(tag)
    return lost
