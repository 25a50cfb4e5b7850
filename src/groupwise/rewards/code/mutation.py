"""New inputs for programs, made from known ones: changed numbers, text and lists."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

_TRIES = 20
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def mutated_arguments(
    examples: Sequence[Sequence[Any]], count: int, draw: random.Random
) -> list[list[Any]]:
    """Argument lists that differ from the known ones and from each other.

    Each is a known list in which one argument, sometimes several, is changed: a number moved,
    doubled, negated or replaced by an edge case; an entry of a list or a character of a string
    dropped, doubled, swapped or changed; or an argument taken from another known list.

    Args:
        examples: known argument lists of literals: numbers, text, None, and lists, tuples, sets and
            dicts of them.
        count: how many are wanted; fewer where no more can be found.
        draw: the random numbers.

    Example:
        >>> found = mutated_arguments([[[3, 1, 2], "ab"]], 3, random.Random(0))
        >>> len(found), all(isinstance(a, list) and isinstance(b, str) for a, b in found)
        (3, True)

    Source: AlphaCode (2203.07814), section 4.5, draws new inputs from a model instead.
    """

    def change() -> list[Any]:
        made = list(draw.choice(examples))
        for _ in range(draw.choice((1, 1, 2))):
            place = draw.randrange(len(made))
            others = [each[place] for each in examples if len(each) > place]
            made[place] = _changed(made[place], others, draw)
        return made

    usable = [each for each in examples if each]
    return _distinct(change, usable, repr, count) if usable else []


def mutated_texts(examples: Sequence[str], count: int, draw: random.Random) -> list[str]:
    """Standard inputs that differ from the known ones and from each other in one to three numbers,
    or, where there is no number, in a character.

    The number in a first line often counts what follows, so numbers in other lines are preferred.

    Args:
        examples, count, draw: as in `mutated_arguments`.

    Example:
        >>> found = mutated_texts(["2\\n5 7\\n"], 4, random.Random(0))
        >>> len(found), all(text.startswith("2\\n") for text in found)
        (4, True)
    """

    def change() -> str:
        text = draw.choice(examples)
        for _ in range(draw.choice((1, 1, 2, 3))):
            numbers = list(_NUMBER.finditer(text))
            later = [each for each in numbers if "\n" in text[: each.start()]]
            if not numbers:
                return _changed(text, examples, draw)
            found = draw.choice(later or numbers)
            known = float(found[0]) if "." in found[0] else int(found[0])
            text = text[: found.start()] + str(_number(known, draw)) + text[found.end() :]
        return text

    return _distinct(change, examples, str, count) if examples else []


def _distinct(
    change: Callable[[], Any], examples: Sequence[Any], key: Callable[[Any], Hashable], count: int
) -> list[Any]:
    seen = {key(each) for each in examples}
    made: list[Any] = []
    for _ in range(_TRIES * count):
        if len(made) == count:
            break
        each = change()
        if key(each) not in seen:
            seen.add(key(each))
            made.append(each)
    return made


def _changed(value: Any, others: Sequence[Any], draw: random.Random) -> Any:
    """A value of the same type that is likely to differ; `others` are known values in its place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return _number(value, draw)
    if isinstance(value, str):
        letters = "".join(each for each in others if isinstance(each, str)) or "a"
        return "".join(_sequence(list(value), list(letters), draw, lambda _: draw.choice(letters)))
    if isinstance(value, list | tuple):
        pool = [x for each in others if isinstance(each, list | tuple) for x in each]
        made = _sequence(list(value), pool, draw, lambda x: _changed(x, pool, draw))
        return type(value)(made)
    if isinstance(value, set):
        entries = sorted(value, key=repr)
        return set(_sequence(entries, entries, draw, lambda x: _changed(x, entries, draw)))
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        if draw.random() < 0.3:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: _changed(value[key], list(value.values()), draw)}
    return draw.choice(list(others)) if others else value


def _number(value: float, draw: random.Random) -> float:
    """A number near the known one, or an edge case; a natural number stays one most of the time."""
    reach = max(2, int(2 * abs(value)))
    made = draw.choice(
        (value + 1, value - 1, value + draw.randint(-reach, reach), 2 * value, 0, 1, value // 2)
    )
    if value >= 0 and draw.random() < 0.9:
        made = abs(made)
    return type(value)(made)


def _sequence(
    entries: list[Any], pool: Sequence[Any], draw: random.Random, change: Callable[[Any], Any]
) -> list[Any]:
    """The entries with one dropped, doubled, changed, swapped, added or all in another order."""
    if not entries:
        return [draw.choice(pool)] if pool else []
    place = draw.randrange(len(entries))
    how = draw.choice(("drop", "double", "change", "change", "swap", "add", "shuffle"))
    if how == "drop":
        return entries[:place] + entries[place + 1 :]
    if how == "double":
        return entries[: place + 1] + entries[place:]
    if how == "change":
        return [*entries[:place], change(entries[place]), *entries[place + 1 :]]
    if how == "swap":
        other = draw.randrange(len(entries))
        entries[place], entries[other] = entries[other], entries[place]
        return entries
    if how == "add":
        return [*entries[:place], draw.choice(pool or entries), *entries[place:]]
    return draw.sample(entries, len(entries))
