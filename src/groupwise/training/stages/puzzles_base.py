"""The base model of the small Knights and Knaves recipe: it can reason, and often slips.

Its chain of thought restates every claim with letters for the people, and lists the roles that the
claim allows; the roles that every list has are the answer:

    A says A or -B: kk kv
    B says A and B: kk vk
    so kk

In the first phase all demonstrations are right. In the second most of them slip: after the same
chain they conclude what the first claim allows, whatever the others say. RL then has to bring out
what the model can do. Held-out puzzles never occur.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import UsageError
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.puzzles import (
    CONNECTIVES,
    Statement,
    knights_knaves_prompt,
    knights_knaves_puzzle,
    roles_text,
    split_of,
    truth_table,
)
from groupwise.prompts.generators.puzzles_tokenizer import puzzles_tokenizer
from groupwise.prompts.lazy import LazySequence
from groupwise.training.stages.base_model import Base

PEOPLE = (2, 3, 4)
"""Numbers of people that demonstrations can have."""
LETTERS = "ABCD"


def knights_knaves_demonstrations(
    *, size: int, people: Sequence[float], slip: float = 0.0, seed: int = 0
) -> LazySequence[Example]:
    """Puzzles with chains of thought, made when they are asked for.

    Args:
        size: how many there are.
        people: shares of puzzles of 2, 3 and 4 people.
        slip: share of demonstrations that conclude any of the roles that the first claim allows,
            which may happen to be right.
        seed: another seed gives another series.

    Raises:
        UsageError: size below 1, or shares outside [0, 1] or that do not sum to 1.

    Example:
        >>> made = knights_knaves_demonstrations(size=1, people=(1.0, 0.0, 0.0))
        >>> print(made[0].completion)
        <think>A says -B or B: kk kv
        B says -B and -A: kv
        so kv</think><answer>Orla is a knight, Tova is a knave</answer>
    """
    if size < 1:
        raise UsageError(f"size = {size}: must be at least 1.")
    if len(people) != len(PEOPLE) or abs(sum(people) - 1) > 1e-6 or min(people) < 0:
        raise UsageError(f"people = {list(people)}: must be three shares that sum to 1.")
    if not 0 <= slip <= 1:
        raise UsageError(f"slip = {slip}: must be between 0 and 1.")

    def made(index: int) -> Example:
        rng = random.Random(f"knights-knaves demonstration {seed} {index}")
        (count,) = rng.choices(PEOPLE, weights=people)
        row = knights_knaves_puzzle(rng, people=count)
        while split_of(row["statements"]) != "train":
            row = knights_knaves_puzzle(rng, people=count)
        roles = row["solution"]
        if rng.random() < slip:
            roles = rng.choice(allowed(row["statements"][0], 0, count))
        completion = _reasoned(row, roles)
        return Example(prompt=knights_knaves_prompt(row, id="puzzle"), completion=completion)

    return LazySequence(size, made)


def _reasoned(row: Mapping[str, Any], roles: Sequence[bool]) -> str:
    """A right chain of thought, and a conclusion."""
    names = row["names"]
    chain = "".join(
        f"{LETTERS[speaker]} says {_restated(said)}:{_listed(allowed(said, speaker, len(names)))}\n"
        for speaker, said in enumerate(row["statements"])
    )
    return f"<think>{chain}so{_listed([roles])}</think><answer>{roles_text(names, roles)}</answer>"


def allowed(statement: Statement, speaker: int, people: int) -> list[tuple[bool, ...]]:
    """The roles (True: knight) under which a statement is true exactly if its speaker is a knight.

    Example:
        >>> allowed(("lying", 1), 0, 2)
        [(True, False), (False, True)]
    """
    table = truth_table(statement, people)
    every = itertools.product((True, False), repeat=people)
    return [
        roles
        for roles in every
        if (table >> sum(role << place for place, role in enumerate(roles)) & 1) == roles[speaker]
    ]


def _restated(statement: Statement) -> str:
    """A statement with letters; a minus stands before knaves."""
    op, *rest = statement
    if op in ("telling-truth", "lying"):
        return ("-" if op == "lying" else "") + LETTERS[rest[0]]
    return f" {op} ".join(map(_restated, rest)) if len(rest) > 1 else f"{op} {_restated(rest[0])}"


def _listed(lists: Sequence[Sequence[bool]]) -> str:
    return "".join(" " + "".join("k" if role else "v" for role in roles) for roles in lists)


def _phrases() -> list[str]:
    """What the chain is made of."""
    people = [*LETTERS, *(f"-{letter}" for letter in LETTERS)]
    roles = [
        _listed([each])
        for count in PEOPLE
        for each in itertools.product((True, False), repeat=count)
    ]
    operations = [*(f" {op} " for op in CONNECTIVES), "not "]
    return [*people, *(f"{letter} says " for letter in LETTERS), *operations, *roles, "so"]


KNIGHTS_KNAVES = Base(
    demonstrations=knights_knaves_demonstrations,
    about=frozenset({"people", "slip"}),
    tokenizer=lambda: puzzles_tokenizer(_phrases()),
)
"""The base model of the recipe "knights-knaves-small"."""
