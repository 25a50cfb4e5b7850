"""Answers that are neither numbers nor formulas: times of day, directions, program text."""

from __future__ import annotations

import re

_CLOCK = re.compile(
    r"(?:at |um )?(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?(?::(?P<second>[0-5]\d))?\s*"
    r"(?:o'?clock)?\s*"
    r"(?P<half>[ap]\.?\s?m\b\.?|in the (?:morning|afternoon|evening)|noon|at night)?\.?",
    re.IGNORECASE,
)
_LONGEST = 80
_NAMES = {"n": "north", "s": "south", "e": "east", "w": "west"}
_DIRECTION = r"north[- ]?(?:east|west)|south[- ]?(?:east|west)|north|south|east|west"
_AFTER = re.compile(
    rf"(?P<value>.*\d.*?)\s*(?:\b(?:to|towards?|due|of)\b(?: the)?\s*)*"
    rf"(?:\b(?P<word>(?:{_DIRECTION}))(?:ern|wards?)?|(?<=[°}}\s])(?P<letter>[NSEW]))\.?",
    re.IGNORECASE | re.DOTALL,
)
_BEFORE = re.compile(r"(?P<letter>[NS])(?=[\s\d])\s*(?P<rest>.*)", re.DOTALL)
_STATEMENT = re.compile(
    r"^[ \t]*(?:def \w+\s*\(|class \w+.*:[ \t]*$|import \w+|from [\w.]+ import |for .+ in .+:"
    r"|(?:if|elif|while|with) .+:[ \t]*$|(?:else|try):[ \t]*$|lambda \w*:|#include|function \w+\("
    r"|(?:var|let|const) \w+\s*=|[A-Za-z_]\w*\s*(?:[-+*/%|&]|//|\*\*|<<|>>)=\s*\S)"
    r"|^[ \t]+return\b|\b(?:print|range|len|input)\(",
    re.MULTILINE,
)


def clock(text: str) -> tuple[int, bool] | None:
    """Seconds after midnight of a time of day, and whether it says which half of the day.

    Example:
        >>> clock("8:34 P.M."), clock("20:34"), clock("8")
        ((74040, True), (74040, True), None)
    """
    match = _CLOCK.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None or not (match["minute"] or match["half"]):
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    half = (match["half"] or "").lower().replace(".", "").replace(" ", "")
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        morning = half in ("am", "inthemorning") or (half == "atnight" and hour == 12)
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
        >>> directed("5 km east"), directed("N 30° E"), directed("5 km")
        (('5 km', 'east'), ('30°', 'north east'), ('5 km', ''))
    """
    match = _AFTER.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        return text, ""
    value, letter = match["value"].strip(), match["letter"] or ""
    if letter and not letter.isupper():
        return text, ""
    found = _NAMES.get(letter.lower(), "") or match["word"].lower().replace("-", "").replace(
        " ", ""
    )
    first = _BEFORE.fullmatch(value)
    if first:
        return first["rest"].strip(), f"{_NAMES[first['letter'].lower()]} {found}"
    return value, found


def is_program(text: str) -> bool:
    """Whether a text has lines of a program, so that a number in it is not what it answers.

    Example:
        >>> is_program("x = 1\\nprint(42)"), is_program("x = 42"), is_program("if x > 1: 2")
        (True, False, False)
    """
    return _STATEMENT.search(text[-4000:]) is not None
