"""Answers that are neither numbers nor formulas: times of day, directions, program text."""

from __future__ import annotations

import re

_CLOCK = re.compile(
    r"(?:at |um )?(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?(?::(?P<second>[0-5]\d))?\s*"
    r"(?:o'?clock)?\s*"
    r"(?P<half>[ap]\.?\s?m\b\.?|in the (?:morning|afternoon|evening)|noon|midnight|at night)?\.?",
    re.IGNORECASE,
)
_NAMED = {"noon": 12 * 3600, "midnight": 0}
_LONGEST = 80
_NAMES = {"n": "north", "s": "south", "e": "east", "w": "west"}
_DIRECTION = r"north[- ]?(?:east|west)|south[- ]?(?:east|west)|north|south|east|west"
_AFTER = re.compile(
    rf"(?P<value>.*\d.*?)\s*(?:\b(?:to|towards?|due|of)\b(?: the)?\s*)*"
    rf"(?:\b(?P<word>(?:{_DIRECTION}))(?:ern|wards?)?|(?<=[°}}\s])(?P<letter>[NSEW]))\.?",
    re.IGNORECASE | re.DOTALL,
)
_BEFORE = re.compile(
    rf"(?:(?P<letter>[NS])|(?i:(?:due )?(?P<word>{_DIRECTION})(?:wards?)?))(?=[\s\d])\s*"
    r"(?P<rest>.*)",
    re.DOTALL,
)
_STATEMENT = re.compile(
    r"^[ \t]*(?:def \w+\s*\(|class \w+.*:[ \t]*$|import \w+|from [\w.]+ import |for .+ in .+:"
    r"|(?:if|elif|while|with) .+:[ \t]*$|(?:else|try):[ \t]*$|lambda \w*:|#include|function \w+\("
    r"|(?:var|let|const) \w+\s*=|[A-Za-z_]\w*\s*(?:[-+*/%|&]|//|\*\*|<<|>>)=\s*\S"
    r"|assert\s.*[=!]=|(?:std::)?cout\s*<<"
    # x = [1, 2, 3], and then x[0] = 42
    r"|(?P<name>[A-Za-z_]\w*)\s*=\s*[\[{].*\n(?:.*\n){0,9}?[ \t]*(?P=name)\[[^\]\n]*\]\s*=)"
    r"|^[ \t]+return\b|\b(?:print|printf|println|console\.log|range|len|input)\(",
    re.MULTILINE,
)
_OPERAND = r"[-+]?\w+(?:\.\w+)*(?:[(\[][^()\[\]\n]*[)\]])*"
# These may stand in a sentence too: they count only as a whole text.
LONE_STATEMENT = re.compile(
    rf"\s*(?:return[ \t]+{_OPERAND}(?:\s*[-+*/%]\s*{_OPERAND})*|echo[ \t]+\S+|SELECT[ \t]+\S+"
    r"|(?:std::)?cout\s*<<[^\n]*|(?:int|long|float|double|auto)[ \t]+\w+\s*=[^=\n]*;"
    # open("5.txt"), exec(open("5.txt")), but not g(f'(5))
    r"|(?:lambda[^:\n]*:\s*)?[A-Za-z_][\w.]*\((?:[^\n'\"]*[(,]\s*)?['\"][^\n]*\));?\s*"
)
_LANGUAGE = re.compile(
    r"(?:i?python|py|javascript|js|typescript|ts|java|kotlin|scala|swift|c|cpp|c\+\+|csharp|cs|c#"
    r"|go|golang|rust|ruby|rb|php|perl|lua|r|julia|matlab|octave|haskell|sql|bash|sh|shell)[\d.]*",
    re.IGNORECASE,
)


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
        morning = half in ("am", "inthemorning") or (half in ("atnight", "midnight") and hour == 12)
        hour = hour % 12 + (0 if morning else 12)
    return hour * 3600 + minute * 60 + second, bool(half) or hour > 12 or hour == 0


def same_time(one: tuple[int, bool], two: tuple[int, bool]) -> bool:
    """Whether two times of day agree; 8:34 may be either half of the day."""
    if one[1] and two[1]:
        return one[0] == two[0]
    return (one[0] - two[0]) % (12 * 3600) == 0


def directed(text: str) -> tuple[str, str]:
    """A quantity and the compass directions written with it; other text, and "".

    Example:
        >>> directed("5 km east"), directed("N 30° E"), directed("east 5 km")
        (('5 km', 'east'), ('30°', 'north east'), ('5 km', 'east'))
    """
    if len(text) > _LONGEST:
        return text, ""
    text = text.strip()
    match, first = _AFTER.fullmatch(text), _BEFORE.fullmatch(text)
    if match is None:
        alone = first and first["word"] and re.match(r"[-+]?\d", first["rest"])
        return (first["rest"], _way(first)) if first and alone else (text, "")
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
    text = text[-4000:]
    return _STATEMENT.search(text) is not None or LONE_STATEMENT.fullmatch(text) is not None


def is_language(label: str) -> bool:
    """Whether the label of a fenced block names a programming language."""
    return _LANGUAGE.fullmatch(label) is not None
