"""The study's own tasks: prompts to train on, prompts held out, and worked answers for the base.

    python studies/softrank/tasks.py

writes `data/TASK/{train,held_out,worked}.jsonl` beside this file. Every row follows from the seed
in it; which prompts are held out is decided by their content alone.

* `lists`: five small numbers, each to be raised by the same one. The answer is a list, so that part
  of it can be right. Worked answers slip, one too high, more often for numbers above five.
* `long-answers`: word problems, answered in many words that are chosen by chance and decide
  nothing. Worked answers slip at the last result, more often than not.
* `sharpening`: word problems whose worked answers slip less often than not, so that the base's
  greedy answer is right before reinforcement learning begins.
* `countdown`: three numbers and what to reach with all of them by + and -. Worked answers
  calculate rightly, but often take the wrong sign at last.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from groupwise.prompts.generators.word_problems import (
    NAMES,
    THINGS,
    Problem,
    demonstrations,
    problem,
)

HERE = Path(__file__).parent
COUNTS = {"worked": 12_000, "train": 1024, "held_out": 1024}
COUNTDOWN_HELD_OUT = 256
"""There are fewer puzzles than lists."""
HELD_OUT_SHARE = 8
"""One prompt in this many is held out."""

OPENERS = (
    "Now",
    "Then",
    "At first",
    "How many are there now?",
    "How many are left?",
    "Then there are more:",
)
CLOSERS = (
    "There are {n} {things} now.",
    "{name} has {n} {things}.",
    "Now {he} has {n}.",
    "Then there are {n} left.",
    "The shop has {n} in a box.",
    "A friend gives {name} {n} {things}.",
)
"""What stands before and after every calculation of a long answer."""

LARGEST = 15
"""The largest number of countdown."""
COUNTDOWN_SLIP = 0.6

Row = dict[str, Any]


def list_row(random: Random) -> Row:
    """Five numbers and what to add to each; a worked answer that slips here and there."""
    numbers, added = [random.randint(1, 9) for _ in range(5)], random.randint(1, 9)
    name = random.choice(list(NAMES))
    had = [
        f"{number} {thing}" for number, thing in zip(numbers, random.sample(THINGS, 5), strict=True)
    ]
    prompt = (
        f"{name} has {', '.join(had[:-1])} and {had[-1]}. {NAMES[name].title()} buys {added} more "
        "of each. How many of each are there now?"
    )
    right = [number + added for number in numbers]
    slips = [random.random() < (0.75 if number > 5 else 0.4) for number in numbers]
    given = [value + slip for value, slip in zip(right, slips, strict=True)]
    return {
        "key": [numbers, added],
        "prompt": prompt,
        "answer": " ".join(map(str, right)),
        "worked": f"<answer>{' '.join(map(str, given))}</answer>",
    }


def countdown_row(random: Random) -> Row:
    """Three numbers and what to reach with all of them; a worked answer that may reach another.

    A worked answer that slips takes the wrong sign at last, and calculates rightly with it.
    """
    numbers = [random.randint(1, LARGEST) for _ in range(3)]
    target = numbers[0]
    while target in numbers:
        order, signs = random.sample(numbers, 3), random.choices("+-", k=2)
        target = _calculated(order, signs)[2]
    if random.random() < COUNTDOWN_SLIP:
        signs[1] = {"+": "-", "-": "+"}[signs[1]]
    steps, expression, _ = _calculated(order, signs)
    return {
        "key": [target, sorted(numbers)],
        "prompt": f"Make {target} of {', '.join(map(str, numbers))}.",
        "answer": str(target),
        "numbers": numbers,
        "target": target,
        "worked": f"<reasoning>{'; '.join(steps)}</reasoning><answer>{expression}</answer>",
    }


def _calculated(numbers: Sequence[int], signs: Sequence[str]) -> tuple[list[str], str, int]:
    """Two steps over three numbers, the greater one first, so that no result is below 0.

    Returns:
        The steps, the same as one expression, and its value.
    """
    value, expression, steps = numbers[0], str(numbers[0]), []
    for number, sign in zip(numbers[1:], signs, strict=True):
        (a, left), (b, right) = sorted([(value, expression), (number, str(number))], reverse=True)
        value = a + b if sign == "+" else a - b
        steps.append(f"{a}{sign}{b}={value}")
        expression = f"({left}{sign}{right})"
    return steps, expression[1:-1], value


def long_answer(random: Random, solved: Problem) -> str:
    """A worked answer in many words; with a share of .65 its last result is one too high."""
    last, slip = solved.steps[-1], random.random() < 0.65
    told = []
    for step in solved.steps:
        name, things = random.choice(list(NAMES)), random.choice(THINGS)
        result = step.result + (slip and step is last)
        closer = random.choice(CLOSERS).format(n=result, name=name, he=NAMES[name], things=things)
        told.append(
            f"{random.choice(OPENERS)} {step.left}{step.operation}{step.right}={result}. {closer}"
        )
    return f"<reasoning>{' '.join(told)}</reasoning><answer>{last.result + slip}</answer>"


def worked(task: str) -> list[Row]:
    """Prompts with worked answers, for the base model of a task."""
    if task in DRAWN:
        return rows(task, "worked")
    if task == "sharpening":
        slips = demonstrations(size=COUNTS["worked"], slip=0.4, seed=11)
        return [{"prompt": str(e.prompt), "worked": e.completion} for e in slips]
    random = Random("long-answers:worked")
    problems = (problem(i, seed=12, levels=(2, 3)) for i in range(COUNTS["worked"]))
    return [{"prompt": p.question, "worked": long_answer(random, p)} for p in problems]


DRAWN: dict[str, Callable[[Random], Row]] = {
    "lists": list_row,
    "countdown": countdown_row,
}
"""Tasks whose prompts are drawn here, with one row of each."""


def rows(task: str, split: str) -> list[Row]:
    """A split of a task; prompts of "train" and "held_out" are distinct, worked ones are not."""
    random = Random(f"{task}:{split}")
    few = (task, split) == ("countdown", "held_out")
    count = COUNTDOWN_HELD_OUT if few else COUNTS[split]
    made: list[Row] = []
    seen = set()
    while len(made) < count:
        row = DRAWN[task](random)
        key = json.dumps(row.pop("key"))
        digest = hashlib.blake2b(f"{task}{key}".encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
        if held_out is not (split == "held_out") or (split != "worked" and key in seen):
            continue
        seen.add(key)
        made.append(row if split == "worked" else {k: v for k, v in row.items() if k != "worked"})
    return made


def write(folder: Path) -> None:
    """Write every file of every task."""
    files = {f"{task}/worked": worked(task) for task in (*DRAWN, "long-answers", "sharpening")}
    files |= {
        f"{task}/{split}": rows(task, split) for task in DRAWN for split in ("train", "held_out")
    }
    for name, made in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row in made]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data")
