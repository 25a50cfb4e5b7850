"""Answers that are neither numbers nor formulas: times of day, directions, program text."""

from __future__ import annotations

import re

_CLOCK = re.compile(
    r"(?:at |um )?(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?(?::(?P<second>[0-5]\d))?\s*"
    r"(?:o'?clock)?\s*"
    r"(?P<half>[ap]\.?\s?m\b\.?|in the (?:morning|afternoon|evening)|noon|midnight|at night)?\.?",
    re.IGNORECASE,
)
_NAMED = {"noon": 12 * 3600, "midday": 12 * 3600, "midnight": 0}
_LONGEST = 80
_LATE = ("midnight", "atnight")
_NAMES = {"n": "north", "s": "south", "e": "east", "w": "west"}
_DIRECTION = r"north[- ]?(?:east|west)|south[- ]?(?:east|west)|north|south|east|west"
_AFTER = re.compile(
    rf"(?P<value>.*\d.*?)\s*(?:\b(?:to|towards?|due|of)\b(?: the)?\s*)*"
    rf"(?:\b(?P<word>(?:{_DIRECTION}))(?:ern|wards?)?|(?<=[°}}\s])(?P<letter>[NSEW]))\.?",
    re.IGNORECASE | re.DOTALL,
)
_BEFORE = re.compile(
    rf"(?:(?P<letter>[NS])(?=[\s\d])|(?i:due\s+)?(?P<word>(?i:{_DIRECTION}))(?i:wards?)?(?=[\s\d]))"
    r"\s*(?P<rest>[-+\d].*)",
    re.DOTALL,
)
_VALUE = r"[-+]?\w+(?:\.\w+)*(?:[(\[][^()\[\]\n]*[)\]])*"
_STATEMENT = re.compile(
    r"^[ \t]*(?:def \w+\s*\(|class \w+.*:[ \t]*$|import \w+|from [\w.]+ import |for .+ in .+:"
    r"|(?:if|elif|while|with) .+:[ \t]*$|(?:else|try):[ \t]*$|lambda \w*:|#include"
    r"|(?:function|func|fn) \w+\(|assert\s+\S*(?:\(|\s*[=<>!]=)|SELECT\s+\S|(?:std::)?cout\s*<<"
    rf"|(?:echo|puts|print)\s+\S+[ \t]*$|return\s+{_VALUE}(?:\s*[-+*/%,]\s*{_VALUE})*;?[ \t]*$"
    r"|(?:int|float|double|long|char|bool|auto|[sS]tring)\s+\w+\s*(?:=[^=\n]*;|\([^\n]*\)\s*\{)"
    r"|[a-z_]\w*(?:\.[a-z_]\w*)+\s*=\s*[^=\s]"
    r"|[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*){1,9}\s*=\s*[^=\s]"
    # x = [1, 2, 3], and later x[0] = 42
    r"|(?P<name>[A-Za-z_]\w*)\s*=[^=\n]*\n(?:[^\n]*\n){0,9}?[ \t]*(?P=name)\[[^\]\n]*\]\s*="
    r"|(?:var|let|const) \w+\s*=|[A-Za-z_]\w*\s*(?:[-+*/%|&]|//|\*\*|<<|>>)=\s*\S)"
    r"|^[ \t]+return\b|\b(?:[Pp]rint(?:f|ln)?|console\.log|Console\.Write(?:Line)?|alert|disp|puts"
    r"|range|len|input)\(",
    re.MULTILINE,
)
_LANGUAGES = re.compile(
    r"(?:python|py|ipython|javascript|js|typescript|ts|java|kotlin|scala|swift|c|cpp|c\+\+|csharp|cs"
    r"|c#|go|golang|rust|ruby|rb|php|perl|lua|r|julia|matlab|octave|haskell|sql|bash|sh|shell|zsh"
    r"|console|powershell|html|css)[\d.]*",
    re.IGNORECASE,
)
_LINE_OF_CODE = re.compile(r"[ \t]|[A-Za-z_]\w*\s*=[^=]|(?:#|//)[^#]|[})\];]*$")
_PROSE = re.compile(r"[^\W\d_]{2}|[\\$]|[\u3040-\u9fff\uac00-\ud7af]|####")
_WINDOW = 4000  # characters from the end in which statements are looked for


def clock(text: str) -> tuple[int, bool] | None:
    """Seconds after midnight of a time of day, and whether it says which half of the day.

    Example:
        >>> clock("8:34 P.M."), clock("20:34"), clock("8")
        ((74040, True), (74040, True), None)
    """
    named = _NAMED.get(text.strip().lower().removeprefix("at ").rstrip("."))
    if named is not None:
        return named, True
    match = _CLOCK.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None or not (match["minute"] or match["half"]):
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    half = (match["half"] or "").lower().replace(".", "").replace(" ", "")
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        morning = half in ("am", "inthemorning") or (half in _LATE and hour == 12)
        hour = hour % 12 + (0 if morning else 12)
    return hour % 24 * 3600 + minute * 60 + second, bool(half) or hour > 12 or hour == 0


def same_time(one: tuple[int, bool], two: tuple[int, bool]) -> bool:
    """Whether two times of day agree; 8:34 may be either half of the day."""
    if one[1] and two[1]:
        return one[0] == two[0]
    return (one[0] - two[0]) % (12 * 3600) == 0


def directed(text: str) -> tuple[str, str]:
    """A quantity and the compass directions written with it; other text, and "".

    Example:
        >>> directed("east 5 km"), directed("N 30° E"), directed("5 km")
        (('5 km', 'east'), ('30°', 'north east'), ('5 km', ''))
    """
    if len(text) > _LONGEST:
        return text, ""
    match = _AFTER.fullmatch(text.strip())
    if match is None:
        first = _BEFORE.fullmatch(text.strip())
        return (first["rest"].strip(), _way(first)) if first and first["word"] else (text, "")
    value, letter = match["value"].strip(), match["letter"] or ""
    if letter and not letter.isupper():
        return text, ""
    first = _BEFORE.fullmatch(value)
    if first:
        return first["rest"].strip(), f"{_way(first)} {_way(match)}"
    return value, _way(match)


def _way(match: re.Match[str]) -> str:
    """The direction that a match found, as one word."""
    return _NAMES.get((match["letter"] or "").lower()) or re.sub(r"[- ]", "", match["word"].lower())


def is_program(text: str) -> bool:
    """Whether a text has lines of a program, so that a number in it is not what it answers.

    Example:
        >>> is_program("x = 1\\nprint(42)"), is_program("x = 42"), is_program("if x > 1: 2")
        (True, False, False)
    """
    return _STATEMENT.search(text[-_WINDOW:]) is not None


def is_language(label: str) -> bool:
    """Whether the label of a fenced block names a programming language."""
    return _LANGUAGES.fullmatch(label) is not None


def without_program(text: str) -> str:
    """The sentences after the last statement of a program, "" where there are none; other text.

    Example:
        >>> without_program("print(6 * 7)\\nIt prints 42."), without_program("x = 42\\nprint(x)")
        ('It prints 42.', '')
    """
    window = text[-_WINDOW:]
    statements = list(_STATEMENT.finditer(window))
    if not statements:
        return text
    _, _, rest = window[statements[-1].end() :].partition("\n")
    prose = "\n".join(line for line in rest.split("\n") if not _LINE_OF_CODE.match(line))
    return prose if _PROSE.search(prose) else ""
