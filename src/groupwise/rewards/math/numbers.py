"""Plain numbers as people write them, read exactly and cheaply; most answers need nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400

CURRENCY = "$€£¥₩"

# Unit: (dimension, factor to the base unit of that dimension). A unit outside the table is ignored.
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(factor))
    for dimension, table in {
        "length": {
            "mm millimeter millimeters millimetre millimetres": "1/1000",
            "cm centimeter centimeters centimetre centimetres": "1/100",
            "m meter meters metre metres": "1",
            "km kilometer kilometers kilometre kilometres": "1000",
            "in inch inches": "127/5000",
            "ft foot feet": "381/1250",
            "mile miles mi": "201168/125",
        },
        "mass": {
            "mg milligram milligrams": "1/1000",
            "g gram grams": "1",
            "kg kilogram kilograms": "1000",
            "lb lbs pound pounds": "45359237/100000",
        },
        "time": {
            "s sec secs second seconds": "1",
            "min mins minute minutes": "60",
            "h hr hrs hour hours": "3600",
            "day days": "86400",
            "week weeks": "604800",
        },
        "volume": {
            "ml milliliter milliliters": "1/1000",
            "l liter liters litre litres": "1",
        },
        "money": {"dollar dollars usd": "1", "cent cents": "1/100"},
        "angle": {"degree degrees deg": "1"},
    }.items()
    for names, factor in table.items()
    for name in names.split()
}

SCALES = {
    name: Fraction(factor)
    for names, factor in {
        "dozen dozens": 12,
        "hundred hundreds": 100,
        "thousand thousands": 10**3,
        "million millions": 10**6,
        "billion billions": 10**9,
        "trillion trillions": 10**12,
    }.items()
    for name in names.split()
}
"""Words that multiply the number before them."""
POWERS = {"2": 2, "²": 2, "squared": 2, "3": 3, "³": 3, "cubed": 3}

_VAGUE = frozenset(
    "unit squar cubic sq total in of th a an per way tim possibl different distinct percent "
    "percentag pct peopl person number such and or is".split()
)

_DIGITS = r"(?:[1-9]\d{0,2}(?:[,  ]\d{3})+(?![\d,])|\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*[{CURRENCY}]?\s*(?P<sign2>[+-]?)
    (?:
      (?:(?P<whole>{_DIGITS})\ +)?(?P<top>\d+)\s*/\s*(?P<bottom>\d+)
      | (?P<integer>{_DIGITS})(?:\.(?P<fraction>\d*))?(?:[eE](?P<exponent>[+-]?\d+))?
      | \.(?P<only>\d+)(?:[eE](?P<exponent2>[+-]?\d+))?
    )
    \s*(?P<percent>%|percent|percentage|pct)?
    (?P<scale>(?:\s*(?i:{"|".join(SCALES)})\b){{0,3}})
    \s*[{CURRENCY}]?\s*(?P<shape>squared?|sq\.?|cubic|cubed)?\s*(?P<unit>[a-zA-Z]+\.?)?
    (?:\s*\^?\s*\{{?(?P<power>[23²³]|squared|cubed)\}}?)?\.?$""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number with what its notation says about it.

    Attributes:
        value: exactly as written, percent sign not applied.
        digits: significant digits of a decimal, 0 for an integer or a fraction.
        places: decimal places of a decimal.
        percent: written with a percent sign.
        unit: (dimension, factor) of a known unit, else None.
        word: the word after the number, which says what is counted.
        scale: what words such as "million" multiplied the value by.
    """

    value: Fraction
    digits: int = 0
    places: int = 0
    percent: bool = False
    unit: tuple[str, Fraction] | None = None
    word: str = ""
    scale: Fraction = Fraction(1)


def plain_number(text: str) -> Number | None:
    """The number that a whole string is, or None.

    Signs, thousands separators, decimals, scientific notation, fractions, mixed numbers, percent
    signs, currency signs, words such as "million" and one trailing unit are understood; nothing is
    ever evaluated.

    Example:
        >>> plain_number("$1,000.50").value
        Fraction(2001, 2)
        >>> plain_number("4 4/9").value, plain_number("12%").percent, plain_number("x")
        (Fraction(40, 9), True, None)
    """
    if len(text) > MAX_DIGITS:
        return None
    match = _NUMBER.match(text.strip())
    if match is None or (match["sign"] and match["sign2"]):
        return None
    exact = _exact(match)
    if exact is None:
        return None
    value, digits, places = exact
    unit = None
    word = (match["unit"] or "").rstrip(".")
    if word:
        apart = match.string[match.start("unit") - 1].isspace()
        if len(word) == 1 and not (apart and word in "msghlL"):
            return None  # one letter is a variable, unless it is a unit set apart
        shape = {"s": "2", "c": "3"}.get((match["shape"] or "")[:1])
        unit = known_unit(word, power=match["power"] or shape)
        if unit is None and len(word) < 3:
            return None
    elif match["power"]:
        return None
    if "-" in (match["sign"], match["sign2"]):
        value = -value
    if not word and (match["shape"] or "").endswith("ed"):  # 5 squared; 25 squared units are 25
        value, digits, places = value ** POWERS[match["shape"]], 0, 0
    scale, _ = multiplier(match["scale"])
    return Number(
        value=value * scale,
        digits=digits if scale == 1 else 0,
        places=places if scale == 1 else 0,
        percent=match["percent"] is not None,
        unit=unit,
        word=word,
        scale=scale,
    )


def multiplier(words: str) -> tuple[Fraction, str]:
    """What the first words after a number multiply it by, and the words that follow them.

    Example:
        >>> multiplier("hundred million people"), multiplier("people")
        ((Fraction(100000000, 1), 'people'), (Fraction(1, 1), 'people'))
    """
    first, *rest = words.split(maxsplit=1) or [""]
    if first.lower() not in SCALES:
        return Fraction(1), words
    factor, left = multiplier(rest[0] if rest else "")
    return SCALES[first.lower()] * factor, left


def differ(one: str, two: str) -> bool:
    """Whether the words after two numbers count different things. Words that only one of them has
    (red balls, balls), known units, and words without a meaning of their own do not count.

    Example:
        >>> differ("apples", "oranges"), differ("apple", "red apples"), differ("km", "metres")
        (True, False, False)
    """
    words = [_counted(text) for text in (one, two)]
    if not words[0] or not words[1]:
        return False
    if all(any(known_unit(word) for word in each) for each in words):
        return False
    return not (words[0] <= words[1] or words[1] <= words[0])


def _counted(text: str) -> frozenset[str]:
    found = re.findall(r"[^\W\d_]+", text.lower().replace(".", ""))
    return frozenset(
        name
        for word in found
        if (name := word if known_unit(word) else word.removesuffix("s").removesuffix("e"))
        and name not in _VAGUE
    )


def known_unit(word: str, *, power: str | None = None) -> tuple[str, Fraction] | None:
    """Dimension and factor of a unit, None for a word that is not in the table."""
    found = UNITS.get(word) or UNITS.get(word.lower())
    if found is None:
        return None
    exponent = POWERS.get(power or "", 1)
    return (f"{found[0]}{exponent}" if exponent > 1 else found[0], found[1] ** exponent)


def _exact(match: re.Match[str]) -> tuple[Fraction, int, int] | None:
    """Value, significant digits and decimal places of what the pattern found."""
    if match["top"]:
        bottom = int(match["bottom"])
        if bottom == 0:
            return None
        part = Fraction(int(match["top"]), bottom)
        if match["whole"] and part >= 1:
            return None
        return part + (_integer(match["whole"]) if match["whole"] else 0), 0, 0
    exponent = int(match["exponent"] or match["exponent2"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    decimals = match["only"] if match["only"] is not None else match["fraction"] or ""
    whole = _integer(match["integer"] or "0")
    value = (whole + Fraction(int(decimals or 0), 10 ** len(decimals))) * Fraction(10) ** exponent
    digits = len((str(whole) + decimals).lstrip("0")) if decimals else 0
    return value, digits, max(len(decimals) - exponent, 0) if decimals else 0


def _integer(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two written numbers mean the same.

    A decimal of at least four significant digits equals an exact value that it is a rounding of;
    two decimals must be equal as written. A percent sign on one side only may be meant either way
    (12% is 12 and 0.12; 50% is not 50 people), on both sides it must agree. Known units are
    converted.
    """
    if differ(gold.word, answer.word):
        return False
    if gold.unit and answer.unit:
        if gold.unit[0] != answer.unit[0]:
            return False
        if gold.unit[1] != answer.unit[1]:
            return gold.value * gold.unit[1] == answer.value * answer.unit[1]
    if gold.percent != answer.percent:
        written, other = (gold, answer) if gold.percent else (answer, gold)
        if other.word or written.value / 100 == other.value:
            return written.value / 100 == other.value
    return _close(gold, answer)


def _close(gold: Number, answer: Number) -> bool:
    if gold.value == answer.value:
        return True
    if bool(gold.digits) == bool(answer.digits):
        return False
    decimal, exact = (gold, answer) if gold.digits else (answer, gold)
    return exact.value.denominator > 1 and is_rounding(decimal, decimal.value - exact.value)


def is_rounding(decimal: Number, error: float | Fraction) -> bool:
    """Whether a decimal may stand for an exact value that it misses by `error`.

    It needs four significant digits and an error of half a unit in the last place, or six digits
    and a whole unit (digits cut off instead of rounded).
    """
    ulp = 10.0**-decimal.places
    limit = 0.5 * ulp if decimal.digits < 6 else ulp
    return decimal.digits >= 4 and abs(error) <= limit * (1 + 1e-9)
