"""Knights and Knaves: reading the roles out of an answer, and the reward of Logic-RL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.rewards.base import REWARDS, verifier
from groupwise.rewards.builtin.format import ordered_tags
from groupwise.rewards.builtin.text import between

_KNIGHT, _KNAVE = ("true", "1", "1.0", "knight"), ("false", "0", "0.0", "knave")
_ROLE = re.compile(r"knight|knave", re.IGNORECASE)


def read_roles(text: str, names: Sequence[str]) -> dict[str, bool] | None:
    """The role of every person (True: knight) as an answer states it; None where it does not state
    all of them once.

    Each name must be followed by "is a knight" or "is a knave", and the two words must occur
    exactly as often as there are people, which refuses both halves of "Ann is a knave, not a
    knight".

    Example:
        >>> read_roles("(1) ann is a knight (2) Bo is a knave", ["Ann", "Bo"])
        {'Ann': True, 'Bo': False}
        >>> read_roles("Ann is a knight", ["Ann", "Bo"]) is None
        True

    Source: Logic-RL, `kk.py`.
    """
    if len(_ROLE.findall(text)) != len(names):
        return None
    roles = {}
    for name in names:
        found = re.search(
            rf"\b{re.escape(name)}\b\s+is\s+a\s+\b(knight|knave)\b", text, re.IGNORECASE
        )
        if found is None:
            return None
        roles[name] = found[1].lower() == "knight"
    return roles


def _role(value: Any) -> bool | None:
    """A role as data writes it: True, 1, "True" and "knight" are a knight."""
    text = str(value).strip().lower()
    return True if text in _KNIGHT else False if text in _KNAVE else None


def _wanted(answer: Any, columns: Mapping[str, Any]) -> dict[str, bool] | None:
    """The reference: names and solution of the row, else what its answer says in words."""
    names, solution = columns.get("names"), columns.get("solution")
    if names is not None and solution is not None and len(names) == len(solution):
        roles = {name: _role(value) for name, value in zip(names, solution, strict=True)}
        known = {name: role for name, role in roles.items() if role is not None}
        return known if len(known) == len(roles) else None
    stated = re.findall(r"(\w+)\s+is\s+a\s+(knight|knave)\b", str(answer or ""), re.IGNORECASE)
    return {name: role.lower() == "knight" for name, role in stated} or None


def _said(text: str, names: Sequence[str]) -> dict[str, bool] | None:
    blocks = between(text, "<answer>", "</answer>")
    return read_roles(blocks[-1], names) if blocks else None


@verifier
@REWARDS.register
def knights_knaves(text: str, columns: Mapping[str, Any], answer: Any = None) -> float | None:
    """1 if the last `<answer>` block gives every person the right role.

    Args:
        text: the completion.
        columns: the row, with `names` and `solution` (True: knight).
        answer: the roles in words; used where the row has no such columns.

    Returns:
        1.0 or 0.0; None where the row has no readable solution.

    Example:
        >>> row = {"names": ["Ann", "Bo"], "solution": [True, False]}
        >>> knights_knaves("<answer>Ann is a knight, Bo is a knave</answer>", row)
        1.0

    Source: Logic-RL (2502.14768), section 2.2.
    """
    wanted = _wanted(answer, columns)
    return None if wanted is None else float(_said(text, list(wanted)) == wanted)


@verifier
@REWARDS.register
def logic_rl(
    text: str,
    columns: Mapping[str, Any],
    answer: Any = None,
    *,
    format: float = 1.0,
    right: float = 2.0,
    wrong: float = -1.5,
    unreadable: float = -2.0,
    prefix: str = "",
) -> float | None:
    """The reward of Logic-RL: ±`format`, plus `right`, `wrong` or `unreadable` for the answer: 3,
    -0.5, -1 or -3 in total.

    A wrong format makes the answer unreadable whatever it says.

    Args:
        text: the completion.
        columns, answer: see `knights_knaves`.
        format: earned for the four tags once each in order, lost otherwise.
        right, wrong, unreadable: for all roles right, some wrong, some not stated.
        prefix: what the prompt ends in, such as "<think>", so that the completion lacks it.

    Returns:
        The total; None where the row has no readable solution. As a verifier's value it counts as
        correct only if right, because every other total is below 0.

    Example:
        >>> row = {"names": ["Ann", "Bo"], "solution": [True, False]}
        >>> logic_rl("<think>hm</think><answer>Ann is a knight, Bo is a knight</answer>", row)
        -0.5

    Source: Logic-RL (2502.14768), section 2.2; `verl/utils/reward_score/kk.py`.
    Elsewhere: the original cuts the completion out of prompt and completion at the first
        "Assistant:", so a completion that writes that word shifts what is read; here the completion
        is given as such.
    """
    wanted = _wanted(answer, columns)
    if wanted is None:
        return None
    if ordered_tags(text, prefix=prefix) < 0:
        return -format + unreadable
    said = _said(text, list(wanted))
    if said is None:
        return format + unreadable
    return format + (right if said == wanted else wrong)
