"""Puzzles of the study in few words: Knights and Knaves of two people, countdown of three numbers.

Both are rewarded by the library's `knights_knaves` and `countdown`, which read answers and execute
nothing.
"""

from __future__ import annotations

from random import Random
from typing import Any

from groupwise.prompts.generators.puzzles import Statement, knights_knaves_puzzle, roles_text
from groupwise.prompts.generators.word_problems import NAMES
from groupwise.training.stages.puzzles_base import allowed

Row = dict[str, Any]

KNIGHTS_SLIP = 0.7
COUNTDOWN_SLIP = 0.6
LARGEST, HIGHEST = 12, 60
"""The largest number given, and the largest target."""
WORDS = {"and": "and", "or": "or", "->": "only if", "<=>": "if and only if"}
Path = tuple[list[str], str, int]
"""Steps of a calculation, the same as one expression, and its value."""


def knights_row(random: Random) -> Row:
    """A puzzle of two people; a worked answer that may heed the first claim alone.

    The worked answer lists the roles that each claim allows and concludes the ones that all allow.
    One that slips concludes others that the first claim allows, if there are any.
    """
    puzzle = knights_knaves_puzzle(random, people=2)
    names, solution = random.sample(list(NAMES), 2), puzzle["solution"]
    claims = puzzle["statements"]
    said = " ".join(f"{name} says {_said(claims[i], names)}." for i, name in enumerate(names))
    possible = [allowed(claim, speaker, 2) for speaker, claim in enumerate(claims)]
    others = [roles for roles in possible[0] if roles != solution]
    given = random.choice(others) if others and random.random() < KNIGHTS_SLIP else solution
    chain = "; ".join(" ".join(map(_letters, each)) for each in possible)
    return {
        "key": claims,
        "prompt": f"{said} Who is who?",
        "answer": roles_text(names, solution),
        "names": names,
        "solution": list(solution),
        "worked": f"<reasoning>{chain}</reasoning><answer>{roles_text(names, given)}</answer>",
    }


def _said(claim: Statement, names: list[str]) -> str:
    """A claim in the words of the prompt."""
    match claim:
        case ("telling-truth", int(person)):
            return f"{names[person]} is a knight"
        case ("lying", int(person)):
            return f"{names[person]} is a knave"
        case ("not", inner):
            return f"it is not so that {_said(inner, names)}"
        case (op, left, right):
            return f"{_said(left, names)} {WORDS[op]} {_said(right, names)}"
    raise AssertionError(claim)


def _letters(roles: tuple[bool, ...]) -> str:
    return "".join("k" if knight else "v" for knight in roles)


def countdown_row(random: Random) -> Row:
    """Three numbers and what to reach with all of them; a worked answer that may reach another.

    A worked answer that slips calculates rightly and reaches something else.
    """
    numbers = [random.randint(1, LARGEST) for _ in range(3)]
    path = _path(random, numbers)
    while path[2] in numbers or path[2] > HIGHEST:
        path = _path(random, numbers)
    target = path[2]
    if random.random() < COUNTDOWN_SLIP:
        while path[2] == target:
            path = _path(random, numbers)
    steps, expression, _ = path
    return {
        "key": [target, sorted(numbers)],
        "prompt": f"Make {target} of {', '.join(map(str, numbers))}.",
        "answer": str(target),
        "numbers": numbers,
        "target": target,
        "worked": f"<reasoning>{'; '.join(steps)}</reasoning><answer>{expression}</answer>",
    }


def _path(random: Random, numbers: list[int]) -> Path:
    """Two steps over three numbers in random order, within the whole numbers from 0."""
    pool = [(number, str(number)) for number in random.sample(numbers, 3)]
    steps = []
    while len(pool) > 1:
        pair = sorted((pool.pop(), pool.pop()), reverse=True)
        (a, left), (b, right) = pair
        values = {"+": a + b, "-": a - b, "*": a * b}
        if b and a % b == 0:
            values["/"] = a // b
        sign = random.choice(list(values))
        steps.append(f"{a}{sign}{b}={values[sign]}")
        pool.append((values[sign], f"({left}{sign}{right})"))
    value, expression = pool[0]
    return steps, expression[1:-1], value
