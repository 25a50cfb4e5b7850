"""Puzzles with checkable answers, made from a seed: Knights and Knaves with one solution, and
countdown.

A statement is a nested tuple over people numbered from 0: ("telling-truth", i), ("lying", i),
("not", s), and (op, s, t) with op one of "and", "or", "->", "<=>". This is the form in which the
published data sets store them.

Left out on purpose: perturbed pairs of puzzles, and people who speak twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import import_module
from random import Random
from typing import Any, Literal

from groupwise.errors import UsageError, suggest
from groupwise.types import Prompt

Statement = tuple[Any, ...]
Split = Literal["train", "held_out"]

PEOPLE = range(2, 9)
"""How many inhabitants a Knights and Knaves puzzle can have: its difficulty."""
NAMES = (
    "Alda", "Bram", "Cleo", "Dario", "Elin", "Faris", "Greta", "Hugo", "Ines", "Jonas", "Kira",
    "Luca", "Mina", "Nils", "Orla", "Pablo", "Runa", "Silas", "Tova", "Ugo", "Vera", "Wim", "Yara",
    "Zeno",
)  # fmt: skip
KNIGHTS_KNAVES_PROMPT = (
    "{quiz}\nReason inside <think> </think>, then give every role inside <answer> </answer>, "
    "for example <answer>{example}</answer>."
)
COUNTDOWN_PROMPT = (
    "Reach {target} with the numbers {numbers}. Use +, -, * and / and each number at most once. "
    "Reason inside <think> </think>, then write one expression inside <answer> </answer>, "
    "for example <answer>(1 + 2) * 3</answer>."
)
REASONING_GYM_PROMPT = (
    "{question}\n\nReason inside <think> </think>, then write nothing but the final answer inside "
    "<answer> </answer>."
)

QUIZ = (
    "Everybody on an island is either a knight, who says only what is true, or a knave, "
    "who says only what is false. "
    "You meet {people}. {said} Who is a knight and who is a knave?"
)
"""A Knights and Knaves puzzle."""
CONNECTIVES = ("and", "or", "->", "<=>")
SAYINGS = (
    '{name} says: "{said}."',
    '"{said}," claims {name}.',
    '{name} tells you: "{said}."',
    'You hear {name} say: "{said}."',
)
CLAUSES = {
    "not": "it is not so that {}",
    "and": "{} and {}",
    "or": "{} or {}",
    "->": "if {} then {}",
    "<=>": "{} exactly when {}",
}
_MOST_TRIES = 2_000
_HELD_OUT_SHARE = 8
_REFUSED = {
    "codeio": "it executes program snippets that come with the package.",
    "composite": "it mixes other tasks; use those by name.",
}


def truth_table(statement: Statement, people: int) -> int:
    """The assignments under which a statement is true, as the bits of an integer.

    Bit a is set if the statement holds under assignment a, in which person i is a knight if bit i
    of a is set.

    Example:
        >>> bin(truth_table(("lying", 1), 2))
        '0b11'

    Raises:
        UsageError: not a statement.
    """
    full = (1 << (1 << people)) - 1
    match statement:
        case ("telling-truth" | "lying" as role, int(person)) if 0 <= person < people:
            knight = sum(1 << a for a in range(1 << people) if a >> person & 1)
            return knight if role == "telling-truth" else full ^ knight
        case ("not", inner):
            return full ^ truth_table(inner, people)
        case (str(op), left, right) if op in CONNECTIVES:
            a, b = truth_table(left, people), truth_table(right, people)
            return {"and": a & b, "or": a | b, "->": (full ^ a) | b, "<=>": full ^ a ^ b}[op]
    raise UsageError(
        f"statement = {statement!r}: must be a role of one of {people} people, "
        "not, and, or, -> or <=>."
    )


def solutions(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """Every assignment of roles (True: knight) under which each person's statement is true exactly
    if they are a knight.

    Example: A says "B is a knave", B says "A and B are both knights":
        >>> solutions([("lying", 1), ("and", ("telling-truth", 0), ("telling-truth", 1))])
        [(True, False)]

    Source: brute force over the 2^N assignments, all at once in truth tables.
    """
    people = len(statements)
    full = (1 << (1 << people)) - 1
    left = full
    for person, statement in enumerate(statements):
        left &= (
            full ^ truth_table(("telling-truth", person), people) ^ truth_table(statement, people)
        )
    return [
        tuple(bool(a >> i & 1) for i in range(people)) for a in range(1 << people) if left >> a & 1
    ]


def _random_statement(random: Random, speaker: int, people: int) -> Statement:
    """One role, or one connective over roles; a second one would make the sentence ambiguous.

    No one says outright that they are lying: neither a knight nor a knave could.
    """
    op = random.choice(("role", "not", *CONNECTIVES))
    roles = []
    for _ in range(1 if op in ("role", "not") else 2):
        person = random.randrange(people)
        lie = op != "role" or person != speaker
        roles.append(
            (random.choice(("telling-truth", "lying")) if lie else "telling-truth", person)
        )
    return roles[0] if op == "role" else (op, *roles)


def _wording(statement: Statement, names: Sequence[str]) -> str:
    op, *rest = statement
    if op in ("telling-truth", "lying"):
        return f"{names[rest[0]]} is a {'knight' if op == 'telling-truth' else 'knave'}"
    inner = [_wording(part, names) for part in rest]
    return CLAUSES[op].format(*inner)


def roles_text(names: Sequence[str], roles: Sequence[bool]) -> str:
    """An answer in the form that is asked for.

    Example:
        >>> roles_text(["Ann", "Bo"], [True, False])
        'Ann is a knight, Bo is a knave'
    """
    return ", ".join(
        f"{name} is a {'knight' if role else 'knave'}"
        for name, role in zip(names, roles, strict=True)
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def knights_knaves_puzzle(random: Random, *, people: int) -> dict[str, Any]:
    """One puzzle with exactly one solution: columns quiz, names, statements, solution.

    Raises:
        UsageError: `people` outside 2 to 8.

    Example:
        >>> puzzle = knights_knaves_puzzle(Random(0), people=3)
        >>> solutions(puzzle["statements"]) == [puzzle["solution"]]
        True

    Source: the puzzles of Xie et al. 2024 (2410.23123): trees of depth 2, accepted if
        exactly one assignment fits.
    Elsewhere: the wording, the names and the drawing of trees are our own.
    """
    if people not in PEOPLE:
        raise UsageError(f"people = {people}: must be from {PEOPLE[0]} to {PEOPLE[-1]}.")
    for _ in range(_MOST_TRIES):
        statements = tuple(_random_statement(random, speaker, people) for speaker in range(people))
        found = solutions(statements)
        if len(found) == 1:
            break
    else:
        raise UsageError(f"people = {people}: no puzzle with one solution in {_MOST_TRIES} draws.")
    names = random.sample(NAMES, people)
    said = []
    for name, statement in zip(names, statements, strict=True):
        sentence = _wording(statement, names)
        said.append(
            random.choice(SAYINGS).format(name=name, said=sentence[0].upper() + sentence[1:])
        )
    quiz = QUIZ.format(people=_listed(names), said=" ".join(said))
    return {"quiz": quiz, "names": tuple(names), "statements": statements, "solution": found[0]}


def _is_knight(role: Any) -> bool:
    """A role of a published file, where text says what a truth value cannot: "False" is true."""
    text = str(role).strip().lower()
    if text not in ("true", "false", "1", "0", "knight", "knave"):
        raise UsageError(f"solution = {role!r}: must be true or false for each person.")
    return text in ("true", "1", "knight")


def knights_knaves_prompt(row: dict[str, Any], *, id: str) -> Prompt:
    """The prompt of a puzzle; works on our rows and on those of the published files.

    The reference answer is the list of roles in words; the columns keep names and solution for the
    reward.
    """
    names, solution = tuple(row["names"]), tuple(map(_is_knight, row["solution"]))
    example = roles_text(("X", "Y"), (True, False))
    return Prompt(
        id=id,
        messages=(
            {
                "role": "user",
                "content": KNIGHTS_KNAVES_PROMPT.format(quiz=row["quiz"], example=example),
            },
        ),
        answer=roles_text(names, solution),
        columns={"names": names, "solution": solution, "people": len(names)},
    )


def knights_knaves(
    count: int, *, split: Split = "train", seed: int = 0, people: tuple[int, int] = (3, 5)
) -> list[Prompt]:
    """Distinct Knights and Knaves prompts; the number of people cycles through the range `people`.

    Args:
        count: how many.
        split: "train" and "held_out" never share a puzzle, whatever the seeds.
        seed: decides everything else.
        people: fewest and most inhabitants, from 2 to 8.

    Raises:
        UsageError: `people` out of range, or so small that there are not `count` different puzzles.

    Example:
        >>> [p.columns["people"] for p in knights_knaves(4, people=(2, 3))]
        [2, 3, 2, 3]
    """
    low, high = people
    if low not in PEOPLE or high not in PEOPLE or low > high:
        raise UsageError(
            f"people = {people}: must be two numbers from {PEOPLE[0]} to {PEOPLE[-1]}, "
            "the smaller one first."
        )
    random = Random(f"knights-knaves:{seed}")

    def draw(number: int) -> tuple[Any, Prompt] | None:
        row = knights_knaves_puzzle(random, people=low + number % (high - low + 1))
        id = f"knights-knaves-{split}-{seed}-{number}"
        return row["statements"], knights_knaves_prompt(row, id=id)

    return _distinct(draw, count=count, split=split, what=f"puzzles of {low} to {high} people")


def _distinct(
    draw: Callable[[int], tuple[Any, Prompt] | None], *, count: int, split: Split, what: str
) -> list[Prompt]:
    """Prompts of different content, from draws of (content, prompt) that may fail.

    Raises:
        UsageError: 2,000 draws in a row gave nothing new.
    """
    seen: set[Any] = set()
    made: list[Prompt] = []
    misses = 0
    while len(made) < count:
        drawn = draw(len(made))
        if drawn is None or drawn[0] in seen or split_of(drawn[0]) != split:
            misses += 1
            if misses > _MOST_TRIES:
                raise UsageError(f"count = {count}: there are only about {len(made)} {what}.")
            continue
        misses = 0
        seen.add(drawn[0])
        made.append(drawn[1])
    return made


def split_of(content: Any) -> Split:
    """One puzzle in eight is held out, by its content alone."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=2).digest()
    return "held_out" if int.from_bytes(digest) % _HELD_OUT_SHARE == 0 else "train"


def _reachable(random: Random, numbers: Sequence[int], highest: int) -> tuple[int, str] | None:
    """A value that the numbers reach, all used, and how; None where this random path leaves the
    positive integers."""
    pool = [(number, str(number)) for number in numbers]
    while len(pool) > 1:
        (a, left), (b, right) = (
            pool.pop(random.randrange(len(pool))),
            pool.pop(random.randrange(len(pool))),
        )
        if a < b:
            (a, left), (b, right) = (b, right), (a, left)
        choices = [
            (a + b, "+"),
            (a * b, "*"),
            *([(a - b, "-")] if a > b else []),
            *([(a // b, "/")] if a % b == 0 else []),
        ]
        value, op = random.choice(choices)
        pool.append((value, f"({left} {op} {right})"))
    value, how = pool[0]
    return (value, how[1:-1]) if value <= highest else None


def countdown(
    count: int,
    *,
    split: Split = "train",
    seed: int = 0,
    numbers: tuple[int, int] = (3, 4),
    largest: int = 50,
    highest: int = 100,
) -> list[Prompt]:
    """Distinct countdown prompts that can be solved; columns numbers, target.

    Args:
        count: how many.
        split: "train" and "held_out" never share a puzzle, whatever the seeds.
        seed: decides everything else.
        numbers: fewest and most numbers given.
        largest: the largest number given.
        highest: the largest target.

    Raises:
        UsageError: settings out of range, or too few different puzzles.

    Example:
        >>> sorted(countdown(1)[0].columns)
        ['numbers', 'target']
    """
    low, high = numbers
    if not 2 <= low <= high <= 8 or largest < 2 or highest < 2:
        raise UsageError(
            f"countdown: numbers = {numbers} must lie in 2 to 8, largest and highest above 1."
        )
    random = Random(f"countdown:{seed}")

    def draw(number: int) -> tuple[Any, Prompt] | None:
        given = tuple(random.randint(1, largest) for _ in range(random.randint(low, high)))
        found = _reachable(random, given, highest)
        if found is None or found[0] in given:
            return None
        id = f"countdown-{split}-{seed}-{number}"
        return (found[0], tuple(sorted(given))), _countdown_prompt(given, *found, id=id)

    return _distinct(draw, count=count, split=split, what="such countdown puzzles")


def _countdown_prompt(given: Sequence[int], target: int, how: str, *, id: str) -> Prompt:
    words = COUNTDOWN_PROMPT.format(target=target, numbers=_listed([str(n) for n in given]))
    return Prompt(
        id=id,
        messages=({"role": "user", "content": words},),
        answer=how,
        columns={"numbers": tuple(given), "target": target},
    )


def reasoning_gym(
    count: int,
    *,
    task: str,
    split: Split = "train",
    seed: int = 0,
    settings: dict[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts of a task of reasoning-gym; columns task, metadata, for the reward of that name.

    Args:
        count: how many; small tasks repeat themselves.
        task: the name of the task.
        split: "train" and "held_out" never share a question, whatever the seeds.
        seed: decides everything else.
        settings: of the task, such as its size or difficulty, by the package's own names.

    Raises:
        UsageError: the package is not installed, the task is refused or has too few questions, or a
            setting is none of the task's.

    Example:
        >>> reasoning_gym(1, task="leg_counting")[0].columns["task"]
        'leg_counting'
    """
    entries = _gym_entries(task, size=32 * count + 256, seed=seed, settings=settings or {})
    made: list[Prompt] = []
    for index in range(len(entries)):
        if len(made) == count:
            return made
        entry = entries[index]
        question = entry["question"].strip()
        if split_of(question) != split:
            continue
        words = REASONING_GYM_PROMPT.format(question=question)
        made.append(
            Prompt(
                id=f"{task}-{seed}-{index}",
                messages=({"role": "user", "content": words},),
                answer=None if entry["answer"] is None else str(entry["answer"]),
                columns={"task": task, "metadata": entry["metadata"]},
            )
        )
    raise UsageError(f"task = {task!r}: has too few questions for the split {split!r}.")


def _gym_entries(task: str, *, size: int, seed: int, settings: dict[str, Any]) -> Any:
    try:
        package = import_module("reasoning_gym")
    except ImportError:
        raise UsageError("reasoning-gym is not installed; pip install reasoning-gym.") from None
    if task in _REFUSED or task not in package.factory.DATASETS:
        reason = _REFUSED.get(task) or suggest(task, package.factory.DATASETS)
        raise UsageError(f"task = {task!r}: {reason}")
    try:
        return package.create_dataset(task, size=size, seed=seed, **settings)
    except (TypeError, AssertionError) as error:
        raise UsageError(f"task = {task!r}: {error}") from error
