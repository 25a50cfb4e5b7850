"""Answers to word problems whose order is known: a right one, and wrong ones that look like it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from groupwise.prompts.generators.word_problems import Problem, Split, Step, demonstration, problem

NAME = "word_problem_rankings"
"""Name of this data in a recipe."""


def ranking_rows(count: int, *, seed: int = 0, split: Split = "train") -> Iterator[dict[str, Any]]:
    """Rankings of a right and up to three wrong answers, in TRL's style, with scores 1 and 0.

    The wrong ones are as long as the right one and differ from it in one number or operation: the
    last result one too high or too low, or another operation in the last step. So nothing but the
    arithmetic tells them apart.

    Example:
        >>> row = next(ranking_rows(1))
        >>> [turns[0]["content"] for turns in row["completions"]][:2]
        ['<reasoning>16+5=21</reasoning><answer>21</answer>', \
'<reasoning>16+5=22</reasoning><answer>22</answer>']
        >>> row["scores"], row["source"]
        ([1.0, 0.0, 0.0, 0.0], 'level 1')
    """
    for index in range(count):
        solved = problem(index, seed=seed, split=split)
        answers = [demonstration(solved), *dict.fromkeys(_wrong(solved))]
        yield {
            "prompt": [dict(message) for message in solved.prompt().messages],
            "completions": [[{"role": "assistant", "content": text}] for text in answers],
            "scores": [1.0] + [0.0] * (len(answers) - 1),
            "source": f"level {solved.level}",
        }


def _wrong(solved: Problem) -> Iterator[str]:
    """Answers that slip in the last step."""
    last = solved.steps[-1]
    yield _told(solved, f"{last.left}{last.operation}{last.right}={last.result + 1}")
    yield _told(solved, f"{last.left}{last.operation}{last.right}={last.result - 1}")
    other = Step(left=last.left, operation="-" if last.operation == "+" else "+", right=last.right)
    if other.result not in (last.result, 0) and other.result > 0:
        yield _told(solved, str(other))


def _told(solved: Problem, last: str) -> str:
    """A worked answer that ends with another last step."""
    reasoning = "; ".join([*map(str, solved.steps[:-1]), last])
    return f"<reasoning>{reasoning}</reasoning><answer>{last.partition('=')[2]}</answer>"
