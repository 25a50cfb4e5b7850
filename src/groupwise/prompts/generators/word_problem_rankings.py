"""Answers to word problems with known correctness: rankings, and labels of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from groupwise.prompts.generators.word_problems import Problem, Split, Step, demonstration, problem

RANKINGS = ("word_problem_rankings", "word_problem_slips")
"""Names of these data in a recipe."""

STEPS = "word_problem_steps"
"""The name of the data with a label for each step."""


def ranking_rows(
    count: int, *, name: str = "word_problem_rankings", seed: int = 0, split: Split = "train"
) -> Iterator[dict[str, Any]]:
    """Rankings of a right and two or three wrong answers, with scores 1 and 0.

    Wrong answers are as long as the right one and differ from it by one number or operation, so
    nothing but the content tells them apart:

    word_problem_rankings   the final answer is one too high or too low, after right reasoning
    word_problem_slips      the last step is wrong, and the answer with it: its result is one too
                            high or too low, or its operation is another

    Example:
        >>> row = next(ranking_rows(1))
        >>> [turns[0]["content"] for turns in row["completions"]][1]
        '<reasoning>13+3=16; 16+1=17</reasoning><answer>18</answer>'
        >>> row["scores"], row["source"]
        ([1.0, 0.0, 0.0], 'level 2')
    """
    wrong = _slips if name == "word_problem_slips" else _contradictions
    for index in range(count):
        solved = problem(index, seed=seed, split=split)
        answers = [demonstration(solved), *dict.fromkeys(wrong(solved))]
        yield {
            "prompt": [dict(message) for message in solved.prompt().messages],
            "completions": [[{"role": "assistant", "content": text}] for text in answers],
            "scores": [1.0] + [0.0] * (len(answers) - 1),
            "source": f"level {solved.level}",
        }


def step_rows(count: int, *, seed: int = 0, split: Split = "train") -> Iterator[dict[str, Any]]:
    """A right and a wrong answer to every problem, step by step, in TRL's stepwise format.

    In the wrong answer one step is one too high or too low; later steps continue from it. The
    label of a step says whether it and all before it are right.

    Example:
        >>> right, wrong = step_rows(1)
        >>> right["completions"], right["labels"]
        (['<reasoning>13+3=16', '16+1=17</reasoning><answer>17</answer>'], [True, True])
        >>> wrong["completions"], wrong["labels"]
        (['<reasoning>13+3=16', '16+1=16</reasoning><answer>16</answer>'], [True, False])
    """
    for index in range(count):
        solved = problem(index, seed=seed, split=split)
        random = np.random.default_rng([seed, index, 7])
        place = int(random.integers(len(solved.steps)))
        off = 1 if random.random() < 0.5 else -1
        for wrong in (None, place):
            told, value = [], solved.steps[0].left
            for number, step in enumerate(solved.steps):
                result = Step(left=value, operation=step.operation, right=step.right).result
                result += off if number == wrong else 0
                told.append(f"{value}{step.operation}{step.right}={result}")
                value = result
            told[0] = f"<reasoning>{told[0]}"
            told[-1] = f"{told[-1]}</reasoning><answer>{value}</answer>"
            yield {
                "prompt": [dict(message) for message in solved.prompt().messages],
                "completions": told,
                "labels": [wrong is None or number < wrong for number in range(len(told))],
            }


def _contradictions(solved: Problem) -> Iterator[str]:
    """Answers whose reasoning is right and whose final number is not."""
    for off in (1, -1):
        yield _told(solved, str(solved.steps[-1]), solved.answer + off)


def _slips(solved: Problem) -> Iterator[str]:
    """Answers that slip in the last step."""
    last = solved.steps[-1]
    for off in (1, -1):
        result = last.result + off
        yield _told(solved, f"{last.left}{last.operation}{last.right}={result}", result)
    other = Step(left=last.left, operation="-" if last.operation == "+" else "+", right=last.right)
    if other.result > 0 and other.result != last.result:
        yield _told(solved, str(other), other.result)


def _told(solved: Problem, last: str, answer: int) -> str:
    """A worked answer that ends with another last step, and an answer."""
    reasoning = "; ".join([*map(str, solved.steps[:-1]), last])
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"
