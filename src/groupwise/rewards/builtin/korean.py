"""Rewards of the Korean orthography task: `"{sentence}"이/가 옳다. {reason}`.

The task: choose or correct a sentence, say in that form which one is right, and give the reason.
The published score is (exact match of the first part + mean of three similarities of reasons)/2.
How the published rules can be gamed or go wrong, as their code shows, and what is done here:

* The particle is part of what must match: a right sentence with the wrong one is wrong.
  `korean_format` tells this apart.
* "가 옳다" is looked for before "이 옳다", so `"X"이 옳다. "Y"가 옳다는 …` is cut at the later
  place and is wrong.
* Reasons are compared only where both sides have one, so leaving out hard reasons raises the
  average. Here a missing reason earns 0.
* Curly quotes stay under the published rules and are removed under the team's (`rules`).
* A reference with `#` between alternatives and a particle after the last one only never matches the
  others.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Literal, get_args

from groupwise.errors import UsageError, suggest
from groupwise.rewards.base import REWARDS, verifier
from groupwise.rewards.builtin.rouge import RougeKind, Tokens, rouge_score
from groupwise.rewards.builtin.text import Source, final_answer

Rules = Literal["official", "team"]
Form = Literal["quoted", "literal"]

_STRICT = re.compile(
    r'^"(?=[^"]*[^\W_])(?P<sentence>[^"]+)"(?P<particle>이|가) 옳다\. (?P<reason>\S.*)$', re.DOTALL
)
_LENIENT = re.compile(r'^"(?=[^"]*[^\W_])[^"]+"[이가] 옳다[.]?')
_LITERAL = re.compile(
    r'^(?P<quote>"?)(?P<sentence>[^"]*?[^\W_](?:[^\w"]*[^\w"\s])?)(?P<particle>이|가) 옳다\. '
    r"(?P<reason>\S.*?)(?P=quote)$",
    re.DOTALL,
)
_LENIENT_LITERAL = re.compile(r'^"?[^"]*?[^\W_](?:[^\w"]*[^\w"\s])?[이가] 옳다')
_ENDINGS = ("가 옳다", "이 옳다")
_QUOTES = str.maketrans(dict.fromkeys("\"'“”„‟«»‘’‚‛‹›"))
_ASCII_QUOTES = str.maketrans(dict.fromkeys("\"'"))
_FIRST, _LAST = 0xAC00, 0xD7A3
_RIEUL = 8
_LETTERS = {"L": _RIEUL, "M": 16, "N": 4, "R": _RIEUL}
"""Letters whose Korean name ends in a consonant, and its number: 엘, 엠, 엔, 알."""
_DIGITS = {"0": 21, "1": _RIEUL, "3": 16, "6": 1, "7": _RIEUL, "8": _RIEUL}
"""Digits whose reading ends in a consonant: 영, 일, 삼, 육, 칠, 팔. Tens, hundreds, thousands and
their multiples end in one too (십, 백, 천, 만, 억, 경), but for those of `_VOWELS`."""
_VOWELS = (*range(12, 16), *range(20, 28))
"""Zeros at the end of numbers whose reading ends in a vowel: 조, 해, 자."""
_ENDINGS_OF_WORDS = {**dict.fromkeys("aiouyrs", 0), "l": _RIEUL, "m": 16, "n": 4}
"""Ends of foreign words that are read one way only: 카메라, 버스, 호텔."""
_LONGEST_END = 200
_FRACTION = re.compile(r"(?<![\d./])(\d+)/\d+(?=\W*$)")
"""A fraction is read from below: 1/2 is 이분의 일."""
_OPENING, _CLOSING = "([{", ")]}"
_WIDE = {0xFF01 + i: 0x21 + i for i in range(94)}
"""Full-width characters as ASCII: ７ is 7."""
_FILLERS = str.maketrans(dict.fromkeys("\u115f\u1160\u3164\uffa0"))
"""Hangul fillers: letters by their category, though nothing is seen of them."""


def final_consonant(character: str) -> int | None:
    """The number of a syllable's final consonant, 0 for none; None if it is not a Hangul syllable.

    (code point - U+AC00) mod 28

    Example:
        >>> final_consonant("을"), final_consonant("과"), final_consonant("A")
        (8, 0, None)
    """
    character = unicodedata.normalize("NFC", character)
    if len(character) != 1 or not _FIRST <= ord(character) <= _LAST:
        return None
    return (ord(character) - _FIRST) % 28


def _before_brackets(word: str) -> str:
    """The word without what stands in brackets at its end."""
    letter = re.search(r"\w", word)
    depth, end = 0, len(word)
    for at in range(len(word) - 1, letter.start() if letter else len(word), -1):
        if word[at] in _CLOSING:
            depth += 1
        elif word[at] in _OPENING:
            depth -= 1
            end = at if depth == 0 else end
        if depth < 0 or (depth == 0 and word[at].isalnum()):
            break
    return word[:end]


def _final(word: str) -> int | None:
    """The number of the consonant in which the reading of a word ends, 0 for a vowel."""
    word = _before_brackets(unicodedata.normalize("NFC", word).translate(_WIDE))
    word = _FRACTION.sub(r"\1", word[-_LONGEST_END:])
    if re.search(r"\d\s*[%℃°]\W*$", word):
        return 0  # 퍼센트, 도
    found = re.search(
        r"(?P<digits>[0-9][0-9,]*)\W*$|(?P<latin>[A-Za-z]+)\W*$|(?P<last>\w)\W*$", word
    )
    if found is None:
        return None
    if found["digits"]:
        digits = found["digits"].replace(",", "")
        zeros = len(digits) - len(digits.rstrip("0"))
        return 0 if 0 < zeros < len(digits) and zeros in _VOWELS else _DIGITS.get(digits[-1], 0)
    latin = found["latin"]
    if latin:
        named = len(latin) == 1 or latin.isupper()
        return _LETTERS.get(latin[-1].upper(), 0) if named else _ENDINGS_OF_WORDS.get(latin[-1])
    return final_consonant(found["last"])


def particle(word: str, pair: str = "이/가") -> str | None:
    """The form of a particle that follows a word, by the final consonant of its last letter; None
    where that is unknown.

    Args:
        word: what it follows; closing marks and what stands in brackets are skipped. Digits count
            by their reading (7: 칠), single and capital letters by their Korean name (URL: 엘), and
            foreign words where their last letter is read one way only.
        pair: the form after a consonant and the form after a vowel: "이/가", "은/는", "을/를",
            "와/과" (written in that order too), "으로/로" and its compounds, which take the second
            form after ㄹ.

    Example:
        >>> particle("가을"), particle("사과"), particle("지하철", "으로/로"), particle("cat")
        ('이', '가', '로', None)

    Source: 한국어 어문 규범, as every school grammar gives it.
    """
    consonant, vowel = pair.split("/")
    if pair == "와/과":
        consonant, vowel = vowel, consonant
    final = _final(word)
    if final is None:
        return None
    if pair.startswith("으로") and final == _RIEUL:
        return vowel
    return consonant if final else vowel


def split_answer(text: str) -> tuple[str, str]:
    """(answer, reason) by the published rule: the answer ends with the first "가 옳다", or else the
    first "이 옳다".

    Example:
        >>> split_answer('"가을"이 옳다. 까닭은 이렇다.')
        ('"가을"이 옳다', '까닭은 이렇다.')
        >>> split_answer("모르겠다")
        ('모르겠다', '')

    Source: the competition's `evaluation.py` (teddysum/korean_evaluation).
    """
    for ending in _ENDINGS:
        at = text.find(ending)
        if at >= 0:
            end = at + len(ending)
            return text[:end].strip(), text[end:].strip().lstrip("., ")
    return text.strip(), ""


def normalise_answer(text: str, *, rules: Rules = "official") -> str:
    """The answer as it is compared: "official" deletes ASCII quotes; "team" NFKC, deletes all
    quotes, joins white space.

    Example:
        >>> normalise_answer('“가을”이  옳다'), normalise_answer('“가을”이  옳다', rules="team")
        ('“가을”이  옳다', '가을이 옳다')

    Source: the competition's `evaluation.py`; the team's `reward.py` (Korean_QA_RAG_2025).
    """
    if rules == "official":
        return text.translate(_ASCII_QUOTES).strip()
    return " ".join(unicodedata.normalize("NFKC", text).translate(_QUOTES).split())


def _composed(text: str) -> str:
    """Syllables as one character each, without fillers; macOS writes the names of files as letters
    (NFD)."""
    return unicodedata.normalize("NFC", text).translate(_FILLERS)


def _said(text: str, source: Source) -> str:
    return _composed(final_answer(text, source=source) or "").strip()


def _is_blank(text: str) -> bool:
    return re.search(r"[^\W_]", text) is None


def _reasons(text: str, answer: Any, source: Source) -> tuple[str, str] | None:
    """(reason given, reason wanted); None where the reference has none."""
    wanted = split_answer(_composed(str(answer)))[1] if answer is not None else ""
    return (split_answer(_said(text, source))[1], wanted) if wanted else None


@REWARDS.register
def korean_format(
    text: str, *, strict: bool = True, form: Form = "quoted", source: Source = "final"
) -> float:
    """1 for the form `"{sentence}"이/가 옳다. {reason}`, or for the literal form.

    Args:
        text: the completion.
        strict: the whole answer must have the form, with a reason, and the particle must fit the
            sentence's last letter (both are accepted after a word whose reading is unknown).
            Otherwise the team's pattern applies: the answer begins with it, the particle is not
            checked, and no reason is needed. Both refuse a sentence without letters or digits, and
            "strict" such a reason too.
        form: "quoted" wants quotes around the sentence. "literal" is what the announcement of the
            task prints, `"{sentence}이/가 옳다. {reason}"`: no quotes around the sentence, and
            quotes around the whole answer or none.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    How it is gamed: any quoted sentence earns it, right or wrong, and one letter is reason enough;
        give it a small weight.

    Example:
        >>> korean_format('"가을"이 옳다. 까닭'), korean_format('"가을"가 옳다. 까닭')
        (1.0, 0.0)
        >>> korean_format('"가을"가 옳다', strict=False)
        1.0
        >>> korean_format('"가을이 옳다. 까닭"', form="literal")
        1.0

    Source: the team's `reward.py` (lenient); the blog's own form (literal).
    """
    said = _said(text, source)
    if form not in get_args(Form):
        raise UsageError(f"korean_format: form = {form!r}: {suggest(form, get_args(Form))}")
    if not strict:
        pattern = _LENIENT if form == "quoted" else _LENIENT_LITERAL
        return float(pattern.match(said) is not None)
    found = (_STRICT if form == "quoted" else _LITERAL).match(said)
    if found is None or _is_blank(found["reason"]):
        return 0.0
    return float(particle(found["sentence"]) in (None, found["particle"]))


@verifier
@REWARDS.register
def korean_exact_match(
    text: str, answer: Any, *, rules: Rules = "official", source: Source = "final"
) -> float | None:
    """1 if the first part of the answer equals that of the reference, or one of its alternatives
    between `#`.

    How it is gamed: hardly, but the published rules call some right answers wrong, such as those
        with curly quotes.

    Args:
        text: the completion.
        answer: the reference, in the form of an answer.
        rules: "official" deletes ASCII quotes before comparing; "team" applies NFKC, deletes all
            quotes, and joins white space.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Returns:
        0 for an answer without letters or digits; None where the reference has none.

    Example:
        >>> korean_exact_match('"가을"이 옳다. 다른 까닭', '"가을"이 옳다. 까닭')
        1.0
        >>> korean_exact_match('"가을"가 옳다. 까닭', '"가을"이 옳다. 까닭')
        0.0

    Source: the competition's `evaluation.py`; "team": `reward.py`.
    """
    if answer is None:
        return None
    said = normalise_answer(split_answer(_said(text, source))[0], rules=rules)
    wanted = normalise_answer(split_answer(_composed(str(answer)))[0], rules=rules)
    if _is_blank(said) or _is_blank(wanted):
        return None if _is_blank(wanted) else 0.0
    return float(any(said == choice.strip() for choice in wanted.split("#")))


@REWARDS.register
def korean_reason(
    text: str,
    answer: Any,
    *,
    kind: RougeKind = "1",
    tokens: Tokens = "characters",
    source: Source = "final",
) -> float | None:
    """ROUGE F1 between the reasons, 0 where the answer gives none.

    How it is gamed: by repeating the terms that reasons share ("어간", "받침", "한글 맞춤법"), and
    with `kind` "1" by any Korean text; kind "2" or "L" is harder to please.

    Args:
        text: the completion.
        answer: the reference, in the form of an answer.
        kind: "1" or "2" for n-grams, "L" for the longest common subsequence.
        tokens: "characters", "words", or Korean morphemes by "kiwi" or "mecab".
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Returns:
        From 0 to 1; None where the reference has no reason.

    Example:
        >>> korean_reason('"가을"이 옳다. 받침이 있다.', '"가을"이 옳다. 받침이 있다.')
        1.0

    Source: the competition's `evaluation.py`, which uses Mecab morphemes (`tokens="mecab"`).
    """
    reasons = _reasons(text, answer, source)
    return None if reasons is None else rouge_score(*reasons, kind=kind, tokens=tokens)
