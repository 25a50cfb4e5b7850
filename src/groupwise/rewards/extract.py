"""Finding the answer in a completion. Every style returns the text of the answer, or None."""

from __future__ import annotations

import ast
import re
from typing import Literal

from groupwise.errors import UsageError, suggest
from groupwise.rewards.code.extraction import parsed
from groupwise.rewards.math.numbers import MAX_DIGITS, SCALES
from groupwise.rewards.math.phrases import LONE_STATEMENT, is_language, is_program

Style = Literal["auto", "answer_tag", "boxed", "gsm8k", "last_number", "choice"]

_TAIL = 20_000  # characters from the end that are looked at: the answer stands there
_SPECIAL = re.compile(r"<\|[a-z_]+\|>|</s>|<eos>", re.IGNORECASE)
_CJK = "\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\uac00-\ud7af"
_TOPIC = "은는是为為は"  # "is" in Chinese, and the particles of the topic in Korean and Japanese
_GIVES = _TOPIC + "于於得到"  # the ends of 等于 (equals) and 得到 (gives) as well
# A number may follow Hangul or CJK letters directly; a sign only what gives a value, since the
# hyphen of a range follows letters as well; a point only that and 약 (about), since a sentence ends
# in a letter and a point.
_NUMBER = re.compile(
    rf"(?:(?<![\w.])[-+]?|(?<=[{_GIVES}])[-+]|(?<=[{_CJK}]))[$€£]?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?(?![a-zA-Z]*\d)"
    rf"|(?:(?<![\w.])[-+]?|(?<=[{_GIVES}])[-+]?|(?<=약)(?<!\w약))\.\d+"
)
_ITEM = r"[-+−]?(?:\d+(?:\.\d+)?(?:/\d+)?|\.\d+)"
_BRACES = r"\s*\{(?:[^{}\n]|\{[^{}\n]{0,40}\}){1,40}\}"
_AFTER_CJK = rf"(?<=[{_GIVES}])|(?<=[{_CJK}])(?![-+−])"
# Numbers as plain text writes them with more than digits: tuples, powers, roots, and LaTeX without
# the marks of a formula around it.
_WRITTEN = re.compile(
    rf"[(\[]\s*{_ITEM}(?:\s*,\s*{_ITEM}){{1,9}}\s*[)\]]"
    rf"|(?:(?<![\w.)])|{_AFTER_CJK})(?:{_ITEM}\s*[*·×]\s*)?{_ITEM}"
    rf"(?:\^(?:\{{{_ITEM}\}}|\({_ITEM}\)|{_ITEM})|[⁰¹²³⁴-⁹⁻]+)"
    rf"|(?:(?<![\w.])|{_AFTER_CJK})[-+−]?(?:\d+(?:\.\d+)?\s*\*?\s*)?(?:[√∛∜]\s*(?:\d+|\([^()\n]{{1,40}}\))"
    rf"|sqrt\([^()\n]{{1,40}}\))(?:/\d+)?"
    rf"|(?:(?<![\w.\\])|{_AFTER_CJK})[-+−]?(?:\d+(?:\.\d+)?\s*)?\\(?:[dt]?frac{_BRACES}{_BRACES}"
    rf"|sqrt(?:\[\d\])?{_BRACES}(?:/\d+)?)"
)
_FENCED = re.compile(
    r"^[ \t]*(`{3,}(?!`)|~{3,}(?!~))[ \t]*([\w+#.]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)",
    re.M | re.S,
)
_CODE = re.compile(r"\w\(|[=;{]")
_DENIED = re.compile(
    r"(?:[,;]\s{0,9})?(?:\b(?:and|but)\s{1,9})?\b(?:not|rather than|instead of)\s+"
    r"(?:[^\s.,;]|[.,](?=\w)|[ \t](?!but\b))+"
    # 6이 아니다, 6ではない, 不是6; but not the questions 6이 아닌가, 6ではないか, 是不是6
    r"|(?:(?<![0-9A-Za-z.,/+-])[-+]?\d[\d.,/]*%?|\$[^$\n]{1,40}\$)[^\W\d_]{0,4}?"
    r"(?:[이가은는도] ?아(?:니(?![겠냐])|닌(?![가지])|님|닙)"
    r"|では(?:な[いく](?!か|でしょう)|ありません(?!か)))"
    r"|(?<!是)(?:不是|而非|并非|並非) ?(?:[-+]?\d[\d.,/]*%?|\$[^$\n]{1,40}\$)"
)
_NUMERALS = "십백천만억조반할푼리퍼十百千万萬億亿兆半割"  # they change the value
_COUNTED = re.compile(
    rf"(?:[총약] ?|모두 )?([-+]?[\d,]*\.?\d+) ?((?![{_NUMERALS}])[{_CJK}]+)[.。]?"
)
_MIXED = re.compile(r"[-+]?\d{1,4} \d{1,4}/\d{1,4}$")
_PERCENT = re.compile(r"\s*(?:\\?%|percent(?:age)?\b|pct\b)")
_SCALE = re.compile(
    r"(?:[^\S\n]|[~$]|\\[,;: ]|\\(?:text|mathrm)\{)*"
    rf"((?:(?i:{'|'.join(SCALES)})\b(?!-)[^\S\n]*){{1,3}})"
)
_MATH = re.compile(
    r"\$\$(?P<a>.+?)\$\$|\\\[(?P<b>.+?)\\\]|\\\((?P<c>.+?)\\\)|(?<!\\)\$(?P<d>[^$\n]+?)(?<!\\)\$",
    re.DOTALL,
)
_PHRASE = re.compile(
    r"(?:final\s+answer|answer)\s*(?:\*\*)?\s*(?:is|are|:|=)+\s*(?:\*\*)?\s*:?\s*"
    r"(?:`{3}\w*\s)?\s*",
    re.IGNORECASE,
)
_FINAL = re.compile(r"final\s+answer\s+is\s*:?\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|\.\s+(?=[A-Z])|\.\s*$|<\|")
# The pronoun I and the article A are not choices: they need a mark, or the end of their sentence.
_CHOICE = re.compile(
    r"(?<![A-Za-z\\])([A-HJ]|(?<=\()I)\s*[).:](?!\w)|(?<![\w'’-])([B-HJ])(?![\w'’])"
    r"|(?<![\w'’-])([AI])(?=\s*(?:[.,;:)*]|$)|\s+(?:and|or|but|because|since|as|is|not)\b)"
    # Korean, Chinese and Japanese write no space before the copula or after the topic's particle.
    r"|(?:(?<![\w'’-])|(?<=[은는是为為は]))([A-J])(?=입니다|이다|이에요|예요|です|だ)"
    r"|(?<=[은는是为為は])([A-J])(?![\w'’])"
)
_CHOICE_PHRASE = re.compile(
    r"(?i:answer|option|choice)\s*(?:\*\*)?\s*(?P<is>(?i:is)\b|:)?\s*"
    r"(?:\*\*|\\boxed\{|\\text\{|\$)*\s*(?P<open>\()?(?P<letter>[A-Ja-j])\b(?!['’])"
    r"(?P<end>\s*(?:[).,:;*}$]|$))?(?!\w)"
)
_JOINED = re.compile(
    r"(?:\s|[$,;&]|\\[()\[\]]|\\q?quad|\\text\{[^{}]{0,40}\}|(?:[a-z]+\s)?\b(?:and|or)\b"
    r"|[a-zA-Z](?:_\{?\w+\}?)?\s*=)*"
)


def extract_answer(text: str, *, style: Style = "auto") -> str | None:
    """The answer that a completion gives.

    Args:
        text: the completion; reasoning that ends in `</think>` is left out.
        style: "boxed" takes the last `\\boxed{…}` with its nested braces (neighbouring boxes are
            joined), "answer_tag" the last `<answer>…</answer>`, "gsm8k" what follows the last
            `####`, "last_number" the last number, "choice" a letter A to J; "auto" tries answer
            tag, box, `####`, the words "answer is", and last formula or number, in this order.

    Returns:
        The answer as written, trimmed (a last number without its thousands separators, but with
        words such as "million"), or None. A program without a sentence has no last number.

    Raises:
        UsageError: an unknown style.

    Example:
        >>> extract_answer("so \\\\boxed{\\\\frac{1}{2}}.", style="boxed")
        '\\\\frac{1}{2}'
        >>> extract_answer("It costs $1,250.", style="last_number")
        '1250'
    """
    if style not in _STYLES:
        raise UsageError(f"style = {style!r}: no such style of answer; {suggest(style, _STYLES)}")
    found = _STYLES[style](_answering_part(text[-_TAIL:]))
    return found if found else None


def _answering_part(text: str) -> str:
    after = text.rpartition("</think>")[2]
    return after if after.strip() else text


def counted(text: str) -> tuple[str, str]:
    """A number and the Korean, Chinese or Japanese counter behind it; other text, and "".

    Example:
        >>> counted("총 99개"), counted("x")
        (('99', '개'), ('x', ''))
    """
    match = _COUNTED.fullmatch(text) if len(text) <= MAX_DIGITS else None
    return (match[1], match[2]) if match else (text, "")


def answer_tag(text: str) -> str | None:
    """The last complete `<answer>` block."""
    before, closing, _ = text.rpartition("</answer>")
    if not closing:
        return None
    _, opening, inside = before.rpartition("<answer>")
    return inside.strip() if opening else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of every box, nested braces matched; a box never closed is none."""
    found: list[tuple[int, int, str]] = []
    closed = _closed(text)
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(\{|(?=[\w-]))", text):
        if not match[1]:
            token = re.match(r"-?[\w.]+", text[match.end() :])
            if token:
                found.append((match.start(), match.end() + token.end(), token[0]))
            continue
        end = closed.get(match.end() - 1)
        if end is not None:
            found.append((match.start(), end, text[match.end() : end - 1].strip()))
    outer: list[tuple[int, int, str]] = []
    for box in found:
        if not outer or box[0] >= outer[-1][1]:
            outer.append(box)
    return outer


def _closed(text: str) -> dict[int, int]:
    """Where each brace that is closed was opened, and the place after the one that closes it; in
    one pass, because a text may hold thousands that never close."""
    opened: list[int] = []
    closed: dict[int, int] = {}
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closed[opened.pop()] = match.end()
    return closed


def boxed(text: str) -> str | None:
    """Content of the last box, joined with neighbours that only "and" or a comma sets apart."""
    found = boxes(text)
    if not found:
        return None
    start, end, content = found[-1]
    contents = [content]
    for box in reversed(found[:-1]):
        if start - box[1] > 60 or not _JOINED.fullmatch(text[box[1] : start]):
            break
        start = box[0]
        if box[2] not in contents:
            contents.insert(0, box[2])
    return ", ".join(contents) + (_suffix(text[end:].lstrip("$ "), 0) if len(contents) == 1 else "")


def _hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    return after.strip().split("\n")[0].strip() if mark else None


def last_number(text: str) -> str | None:
    """The last number, a fraction a/b included, without thousands separators; a percent sign is
    left out, words that multiply ("million") are not."""
    text = _prose(text)
    if _only_program(text):
        return None
    text = _asserted(text.replace("−", "-"))
    found = next(reversed(list(_NUMBER.finditer(text))), None)
    if found is None:
        return None
    return re.sub(r"[,$€£+]", "", found[0]) + _suffix(text, found.end()).rstrip("%")


def choice(text: str) -> str | None:
    """The chosen letter: tagged, boxed, after "answer is", or the last one standing alone."""
    marked = answer_tag(text) or boxed(text)
    if marked is not None:
        match = re.match(r"(?:\\text(?:bf)?\{)?\s*\(?\s*([A-Ja-j])\s*(?:[).:}]|$|\s)", marked)
        if match:
            return match[1].upper()
    phrases = [match for match in _CHOICE_PHRASE.finditer(text) if _names_choice(match)]
    if phrases:
        return phrases[-1]["letter"].upper()
    letters = ["".join(found) for found in _CHOICE.findall(_asserted(text))]
    return letters[-1] if letters else None


def _names_choice(match: re.Match[str]) -> bool:
    """Whether "answer A" names a choice: "the answer I found" and "an answer a child sees" do
    not."""
    letter, marked = match["letter"], match["end"] is not None or match["open"] is not None
    if letter.islower():
        return marked
    return letter not in "AI" or marked or (letter == "A" and bool(match["is"]))


def _asserted(text: str) -> str:
    """The text without alternatives that it denies ("5, not 6"), if anything is left."""
    rest = _DENIED.sub(" ", text)
    return rest if re.search(r"\d|\b[A-J]\b", rest) else text


def _prose(text: str) -> str:
    """The text without fenced programs: the last number of a program is not an answer."""

    def kept(match: re.Match[str]) -> str:
        labelled = is_language(match[2]) and _CODE.search(match[3])
        return " " if labelled or is_program(match[3]) else match[0]

    return _FENCED.sub(kept, text)


def _only_program(text: str) -> bool:
    """Whether a text is nothing but a program: one statement, or Python that ends in no value."""
    if LONE_STATEMENT.fullmatch(text):
        return True
    tree = parsed(text) if is_program(text) else None
    if tree is None or not tree.body:
        return tree is not None
    last = tree.body[-1]
    if isinstance(last, ast.AnnAssign):
        return last.value is not None  # not "result: 42"
    calls = any(isinstance(node, ast.Call) for node in ast.walk(last))
    return calls or not isinstance(last, ast.Expr)


def _auto(text: str) -> str | None:
    text = _SPECIAL.split(text)[0] or text
    final = list(_FINAL.finditer(text))
    box = boxes(text)
    if final and box and final[-1].end() > box[-1][1]:
        said = _last_formula(_sentence(text[final[-1].end() :]))
        if said:
            return said
    for style in (answer_tag, boxed, _hashes):
        found = style(text)
        if found:
            inner = boxed(found) if style is answer_tag else None
            return inner or found
    text = _prose(text)
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        said = _sentence(text[phrases[-1].end() :])
        found = _last_formula(said) or (said if len(said.split()) <= 6 else None)
        if found:
            return found
    return None if is_program(text) else _last_formula(text)


def _sentence(text: str) -> str:
    end = _SENTENCE_END.search(text)
    return (text[: end.start()] if end else text).strip().lstrip("*\"' ").rstrip("*.\"' ")


def _last_formula(text: str) -> str | None:
    """The last formula or number of a text, with the percent sign or "million" that follows."""
    text = _asserted(text)
    formula = next(reversed(list(_MATH.finditer(text))), None)
    plain = text.replace("−", "-")
    number = next(reversed(list(_NUMBER.finditer(plain))), None)
    written = next(reversed(list(_WRITTEN.finditer(plain))), None)
    if number and written and written.start() <= number.start() < written.end():
        number = written
    if formula is not None and (number is None or number.start() < formula.end()):
        content = next(group for group in formula.groups() if group is not None)
        return content.strip() + _suffix(text, formula.end())
    if number is None:
        return None
    mixed = _MIXED.search(text[: number.end()])
    found = mixed[0] if mixed else number[0].lstrip("+")
    return found + _suffix(text, number.end())


def _suffix(text: str, end: int) -> str:
    """The percent sign or the multiplying words ("million") that follow a number."""
    if _PERCENT.match(text, end):
        return "%"
    words = _SCALE.match(text, end)
    return " " + words[1].strip() if words else ""


_STYLES = {
    "auto": _auto,
    "answer_tag": answer_tag,
    "boxed": boxed,
    "gsm8k": _hashes,
    "last_number": last_number,
    "choice": choice,
}
