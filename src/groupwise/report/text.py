"""Escaping of untrusted text, such as model output."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from typing import Any

# C0 and C1 controls (terminal escapes among them), line and paragraph separators, marks that
# reverse or hide text, zero-width characters, and lone surrogates, which UTF-8 cannot hold.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: object) -> str:
    """Text with invisible and control characters spelled out.

    Line breaks and tabs stay; ASCII controls become their pictures (␛), the rest `⟨U+202E⟩`.

    Example:
        >>> visible("a\\x1b[31m b\\u202ec")
        'a␛[31m b⟨U+202E⟩c'
    """
    return _UNSEEN.sub(_spell, str(text).replace("\r\n", "\n"))


def escaped(text: object) -> str:
    """Visible text, escaped for HTML content and for quoted attributes.

    Example:
        >>> escaped('<b onclick="x">')
        '&lt;b onclick=&quot;x&quot;&gt;'
    """
    return html.escape(visible(text), quote=True)


def embedded(value: Any) -> str:
    """JSON that is safe inside a `<script type="application/json">` element.

    `<`, `>` and `&` are written as \\u escapes, so neither `</script>` nor `<!--` can appear.

    Example:
        >>> embedded({"a": "</script>", "b": float("nan")})
        '{"a":"\\\\u003c/script\\\\u003e","b":null}'
    """
    text = json.dumps(
        _json_value(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def number(value: object) -> float | None:
    """A finite number, or None for anything else.

    Example:
        >>> number(3), number(True), number("7"), number(float("inf")), number(10**400)
        (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _spell(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def _json_value(value: Any) -> Any:
    """JSON values with visible strings and numbers rounded to five digits."""
    if isinstance(value, Mapping):
        return {visible(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return _short(value)
    return value


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
