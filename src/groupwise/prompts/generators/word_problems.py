"""Grade-school word problems with checkable answers, made only from a seed and an index.

A problem is a chain of one to three operations on small integers (its level), told in one of
several wordings. Three splits never overlap with training: `held_out` (chains of operations that no
training problem has, in any wording), `held_out_templates` (sentences that no training problem
uses) and `larger_numbers` (starting numbers above every training one). Demonstrations can contain a
systematic error, the last result one too high. A base model trained on them can solve the problems,
but its most likely answer is wrong.

Fractions, distractors and several people are left out on purpose: a model of half a million
parameters can show that reinforcement learning works without them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from groupwise.errors import UsageError, suggest
from groupwise.prompts.examples import Example
from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt

Split = Literal["train", "held_out", "held_out_templates", "larger_numbers"]
Operation = Literal["+", "-", "*"]

NAMES = {
    "Tom": "he", "Ben": "he", "Sam": "he", "Leo": "he", "Max": "he", "Jin": "he",
    "Mia": "she", "Ada": "she", "Eva": "she", "Zoe": "she", "Amy": "she", "Sora": "she",
}  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs",
    "flowers", "marbles", "pens", "shells", "stamps", "stones",
)  # fmt: skip
LEVELS = (1, 2, 3)
_START: Mapping[str, tuple[int, int]] = {
    "train": (2, 24),
    "held_out": (2, 24),
    "held_out_templates": (2, 24),
    "larger_numbers": (25, 29),
}
"""The lowest and highest number a problem begins with."""
_HIGHEST = {"train": 36, "held_out": 36, "held_out_templates": 36, "larger_numbers": 38}
"""No result exceeds this."""
_HELD_OUT_SHARE = 8
"""One chain of operations in this many is held out."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """A wording: an opening, one sentence per operation, a question. Fields: {name} {He} {he} {n}
    {things}."""

    name: str
    start: str
    add: str
    subtract: str
    multiply: str
    question: str

    def sentence(self, operation: Operation) -> str:
        """The sentence that tells an operation."""
        return {"+": self.add, "-": self.subtract, "*": self.multiply}[operation]


TRAIN_TEMPLATES = (
    Template(
        name="owner",
        start="{name} has {n} {things}.",
        add="{He} buys {n} more.",
        subtract="{He} gives {n} away.",
        multiply="Now {he} gets {n} times as many.",
        question="How many {things} does {name} have?",
    ),
    Template(
        name="box",
        start="There are {n} {things} in a box.",
        add="{name} puts in {n} more.",
        subtract="{name} takes {n} out.",
        multiply="Then there are {n} times as many.",
        question="How many {things} are in the box?",
    ),
    Template(
        name="finder",
        start="{name} finds {n} {things}.",
        add="Then {he} finds {n} more.",
        subtract="Then {he} loses {n}.",
        multiply="{He} makes it {n} times as many.",
        question="How many {things} are left?",
    ),
    Template(
        name="shop",
        start="A shop has {n} {things}.",
        add="It gets {n} more.",
        subtract="It sells {n}.",
        multiply="Then it has {n} times as many.",
        question="How many {things} does the shop have now?",
    ),
    Template(
        name="collector",
        start="At first {name} has {n} {things}.",
        add="A friend gives {name} {n} more.",
        subtract="A friend takes {n} away.",
        multiply="{name} now has {n} times as many.",
        question="How many are there now?",
    ),
)

HELD_OUT_TEMPLATES = (
    Template(
        name="gift",
        start="A friend gives {name} {n} {things}.",
        add="{He} gets {n} more.",
        subtract="Then {he} gives {n} away.",
        multiply="Now there are {n} times as many.",
        question="How many {things} does {he} have now?",
    ),
    Template(
        name="shelf",
        start="In a shop there are {n} {things}.",
        add="Then {name} buys {n} more.",
        subtract="Then the shop sells {n}.",
        multiply="Then {name} makes it {n} times as many.",
        question="How many {things} are there in the shop?",
    ),
    Template(
        name="chest",
        start="The box of {name} has {n} {things} in it.",
        add="A friend puts {n} more in.",
        subtract="{He} sells {n}.",
        multiply="Now it has {n} times as many.",
        question="How many {things} are left in it?",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation: `left operation right = result`."""

    left: int
    operation: Operation
    right: int

    @property
    def result(self) -> int:
        if self.operation == "+":
            return self.left + self.right
        return self.left - self.right if self.operation == "-" else self.left * self.right

    def __str__(self) -> str:
        return f"{self.left}{self.operation}{self.right}={self.result}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A word problem with its solution.

    Attributes:
        id: names split, seed and index, so it is stable across runs and machines.
        steps: the operations in order; each starts from the result of the one before.
        template: name of the wording.
    """

    id: str
    question: str
    steps: tuple[Step, ...]
    template: str

    @property
    def level(self) -> int:
        """How many operations it takes."""
        return len(self.steps)

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    def prompt(self) -> Prompt:
        """The problem as one user message, with its answer and, as columns, level, template,
        question and a worked solution."""
        return Prompt(
            id=self.id,
            messages=({"role": "user", "content": self.question},),
            answer=str(self.answer),
            columns={
                "level": self.level,
                "template": self.template,
                "question": self.question,
                "solution": demonstration(self),
            },
        )


def problem(
    index: int, *, seed: int = 0, split: Split = "train", levels: Sequence[int] = LEVELS
) -> Problem:
    """The word problem number `index` of a split; it depends on nothing but the arguments.

    Args:
        index: 0 or more; every split is endless.
        seed: another seed gives another series of the same split.
        split: "train", or one of the three kinds of problem never trained on.
        levels: numbers of operations to choose from, each from 1 to 3.

    Raises:
        UsageError: unknown split, or a level outside 1 to 3.

    Example:
        >>> p = problem(0, seed=1, levels=(2,))
        >>> p.level, p.answer == p.steps[-1].result
        (2, True)
        >>> p == problem(0, seed=1, levels=(2,))
        True
    """
    _check(split, levels)
    rng = np.random.default_rng([seed, index, get_args(Split).index(split)])
    templates = HELD_OUT_TEMPLATES if split == "held_out_templates" else TRAIN_TEMPLATES
    template = templates[int(rng.integers(len(templates)))]
    level = int(levels[int(rng.integers(len(levels)))])
    steps = _chain(rng, level, split)
    while split in ("train", "held_out") and is_held_out(steps) is not (split == "held_out"):
        steps = _chain(rng, level, split)
    name = list(NAMES)[int(rng.integers(len(NAMES)))]
    things = THINGS[int(rng.integers(len(THINGS)))]
    return Problem(
        id=f"word_problems/{split}/{seed}/{index}",
        question=_tell(template, steps, name, things),
        steps=steps,
        template=template.name,
    )


def word_problems(
    count: int,
    *,
    seed: int = 0,
    split: Split = "train",
    levels: Sequence[int] = LEVELS,
    start: int = 0,
    careless: float = 0.0,
) -> list[Prompt]:
    """Prompts `start` … `start + count - 1` of a split, ready for training or evaluation.

    Args:
        careless: share of the worked solutions whose answer is one too high after right reasoning.
            The reference answers stay right.

    Raises:
        UsageError: count below 1, unknown split, a level outside 1 to 3, or `careless` outside 0
            to 1.

    Example:
        >>> [p.answer == str(problem(i).answer) for i, p in enumerate(word_problems(3))]
        [True, True, True]
    """
    if count < 1:
        raise UsageError(f"count = {count}: must be at least 1.")
    if not 0 <= careless <= 1:
        raise UsageError(f"careless = {careless}: must be a share between 0 and 1.")
    _check(split, levels)
    made = []
    for index in range(start, start + count):
        solved, prompt = _made(index, seed, split, tuple(levels))
        columns = dict(prompt.columns)  # A reward may change them.
        if careless and np.random.default_rng([seed, index, 8]).random() < careless:
            reasoning, _ = demonstration(solved).split("<answer>")
            columns["solution"] = f"{reasoning}<answer>{solved.answer + 1}</answer>"
        messages = tuple(map(dict, prompt.messages))
        made.append(replace(prompt, messages=messages, columns=columns))
    return made


@functools.lru_cache(maxsize=8192)
def _made(index: int, seed: int, split: Split, levels: tuple[int, ...]) -> tuple[Problem, Prompt]:
    """A problem and its prompt. Stages of a pipeline and runs of an experiment share theirs, and
    4,096 take half a second to make."""
    solved = problem(index, seed=seed, split=split, levels=levels)
    return solved, solved.prompt()


def demonstration(solved: Problem, *, slip: bool = False) -> str:
    """A worked answer; with `slip` the last result, and the answer with it, is one too high.

    Example:
        >>> steps = (Step(left=3, operation="+", right=4), Step(left=7, operation="*", right=2))
        >>> p = Problem(id="x", question="", steps=steps, template="owner")
        >>> demonstration(p)
        '<reasoning>3+4=7; 7*2=14</reasoning><answer>14</answer>'
        >>> demonstration(p, slip=True)
        '<reasoning>3+4=7; 7*2=15</reasoning><answer>15</answer>'
    """
    last = solved.steps[-1]
    given = last.result + 1 if slip else last.result
    reasoning = [str(step) for step in solved.steps[:-1]] + [
        f"{last.left}{last.operation}{last.right}={given}"
    ]
    return f"<reasoning>{'; '.join(reasoning)}</reasoning><answer>{given}</answer>"


def demonstrations(
    *, size: int, slip: float = 0.0, seed: int = 0, levels: Sequence[int] = LEVELS
) -> LazySequence[Example]:
    """Training problems with worked answers, made when they are asked for.

    Which ones slip depends on (seed, index) alone, so a longer series starts with the shorter one.

    Args:
        size: how many there are.
        slip: share of them in which the last result, and the answer with it, is one too high.
        seed: another seed gives another series.

    Raises:
        UsageError: size below 1, `slip` outside 0 to 1, or a level outside 1 to 3.

    Example:
        >>> [example.completion for example in demonstrations(size=1, levels=(1,))]
        ['<reasoning>16+5=21</reasoning><answer>21</answer>']
    """
    _check("train", levels)
    if size < 1:
        raise UsageError(f"size = {size}: must be at least 1.")
    if not 0 <= slip <= 1:
        raise UsageError(f"slip = {slip}: must be a share between 0 and 1.")

    def made(index: int) -> Example:
        solved = problem(index, seed=seed, levels=levels)
        drawn = np.random.default_rng([seed, index, len(get_args(Split))]).random()
        return Example(prompt=solved.prompt(), completion=demonstration(solved, slip=drawn < slip))

    return LazySequence(size, made)


def is_held_out(steps: Sequence[Step]) -> bool:
    """Whether a chain of operations belongs to the held-out problems: decided by a hash of its
    content alone."""
    digest = hashlib.blake2b(";".join(map(str, steps)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0


def _check(split: str, levels: Sequence[int]) -> None:
    if split not in get_args(Split):
        raise UsageError(
            f"split = {split!r}: word problems have no such split; "
            + suggest(split, get_args(Split))
        )
    wrong = [level for level in levels if level not in LEVELS]
    if wrong or not levels:
        raise UsageError(f"levels = {tuple(levels)}: must name one or more of {LEVELS}.")


def _chain(rng: np.random.Generator, level: int, split: Split) -> tuple[Step, ...]:
    """A random chain whose results stay between 1 and the highest number of the split."""
    low, high = _START[split]
    value = int(rng.integers(low, high + 1))
    highest = _HIGHEST[split]
    steps: list[Step] = []
    for _ in range(level):
        choices = []
        add, subtract = min(9, highest - value), min(9, value - 1)
        if add >= 1:
            choices.append(Step(left=value, operation="+", right=int(rng.integers(1, add + 1))))
        if subtract >= 1:
            right = int(rng.integers(1, subtract + 1))
            choices.append(Step(left=value, operation="-", right=right))
        if 2 <= value <= highest // 2:
            right = int(rng.integers(2, min(3, highest // value) + 1))
            choices.append(Step(left=value, operation="*", right=right))
        steps.append(choices[int(rng.integers(len(choices)))])
        value = steps[-1].result
    return tuple(steps)


def _tell(template: Template, steps: Sequence[Step], name: str, things: str) -> str:
    he = NAMES[name]
    fields = {"name": name, "he": he, "He": he.capitalize(), "things": things}
    sentences = [template.start.format(n=steps[0].left, **fields)]
    sentences += [
        template.sentence(step.operation).format(n=step.right, **fields) for step in steps
    ]
    return " ".join([*sentences, template.question.format(**fields)])
