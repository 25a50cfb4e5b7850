"""The study's own tasks: prompts to train on, prompts held out, and worked answers for the base.

    python studies/softrank/tasks.py

writes `data/TASK/{train,held_out,worked}.jsonl` beside this file. Every row follows from the seed
in it; which prompts are held out is decided by their content alone.

* `lists`: five small numbers, each to be raised by the same one. The answer is a list, so that part
  of it can be right. Worked answers slip, one too high, more often for numbers above five.
* `countdown`: reach a target with three numbers. Worked answers calculate first, half of them once
  in vain, and answer last; many puzzles have several right answers. Nothing slips: what the base
  lacks is practice.
* `sharpening`: word problems whose worked answers slip less often than not, so that the base's
  greedy answer is right before reinforcement learning begins.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from groupwise.prompts.word_problems import NAMES, THINGS, Demonstrations

HERE = Path(__file__).parent
COUNTS = {"worked": 12_000, "train": 1024, "held_out": 128}
HELD_OUT_SHARE = 8
"""One prompt in this many is held out."""

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


def countdown_row(random: Random) -> Row | None:
    """Three numbers and a target; a worked answer, after one try that fails or none."""
    numbers = sorted(random.sample(range(1, 13), 3))
    ways = _ways(*numbers)
    target = random.choice(ways)[0]
    if not 3 <= target <= 36 or target in numbers:
        return None
    right = random.choice([way for way in ways if way[0] == target])
    failing = [way for way in ways if way[0] != target]
    tries = [random.choice(failing)[1] for _ in range(random.randint(0, 1))]
    steps = ". ".join([*tries, right[1]])
    return {
        "key": [numbers, target],
        "prompt": f"Get {target} of {numbers[0]}, {numbers[1]} and {numbers[2]}.",
        "answer": right[2],
        "numbers": numbers,
        "target": target,
        "worked": f"<reasoning>{steps}</reasoning><answer>{right[2]}</answer>",
    }


@lru_cache
def _ways(*numbers: int) -> list[tuple[int, str, str]]:
    """Values up to 36 that numbers reach in two steps, with the steps and the expression."""
    return [
        (second, f"{a}{op}{b}={first}; {first}{then}{c}={second}", f"({a}{op}{b}){then}{c}")
        for a, b, c in permutations(numbers)
        for first, op in _results(a, b)
        for second, then in _results(first, c)
    ]


def _results(left: int, right: int) -> Iterator[tuple[int, str]]:
    for value, op in ((left + right, "+"), (left - right, "-"), (left * right, "*")):
        if 1 <= value <= 36:
            yield value, op


TASKS: dict[str, Callable[[Random], Row | None]] = {"lists": list_row, "countdown": countdown_row}


def rows(task: str, split: str) -> list[Row]:
    """The rows of a split; prompts of "train" and "held_out" are distinct, worked answers are
    not."""
    if task == "sharpening":
        worked = Demonstrations(size=COUNTS["worked"], slip=0.4, seed=11)
        return [{"prompt": str(e.prompt), "worked": e.completion} for e in worked]
    random = Random(f"{task}:{split}")
    made: list[Row] = []
    seen = set()
    while len(made) < COUNTS[split]:
        row = TASKS[task](random)
        if row is None:
            continue
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
    wanted = [(task, split) for task in TASKS for split in COUNTS] + [("sharpening", "worked")]
    for task, split in wanted:
        path = folder / task / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row in rows(task, split)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data")
