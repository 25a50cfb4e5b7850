"""Countdown: an arithmetic expression judged without ever being executed."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from groupwise.rewards.base import REWARDS, verifier
from groupwise.rewards.builtin.text import Source, final_answer

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ALLOWED = re.compile(r"[0-9+\-*/() \t]+")
_LONGEST = 200
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression of +, -, *, / and whole numbers, and the numbers in it.

    Only these nodes of the syntax tree are walked; nothing is executed. Expressions are at most 200
    characters long, so no number in them can grow out of hand (there is no power).

    Returns:
        (value, numbers); None for anything else, for a division by zero and for what is too long.

    Example:
        >>> evaluate("(3 + 5) / 2 * 7")
        (Fraction(28, 1), [3, 5, 2, 7])
        >>> evaluate("2 ** 3"), evaluate("__import__('os')"), evaluate("1 / 0")
        (None, None, None)
    """
    expression = expression.translate(_SIGNS).strip()
    if len(expression) > _LONGEST or not _ALLOWED.fullmatch(expression):
        return None
    numbers: list[int] = []
    try:
        return _value(ast.parse(expression, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def solves(expression: str, numbers: list[int], target: Fraction, *, use_all: bool = False) -> bool:
    """Whether an expression has the target as its exact value and uses each given number at most
    once.

    A trailing "= target" is allowed, any other equation is not.

    Example:
        >>> solves("(1 + 2) * 3 = 9", [3, 2, 1, 7], Fraction(9))
        True
        >>> solves("3 * 3", [3, 2, 1], Fraction(9))
        False
    """
    left, *right = expression.split("=")
    if len(right) > 1 or (right and (evaluate(right[0]) or (None,))[0] != target):
        return False
    found = evaluate(left)
    if found is None or found[0] != target:
        return False
    used, given = Counter(found[1]), Counter(numbers)
    return used == given if use_all else used <= given


@verifier
@REWARDS.register
def countdown(
    text: str, columns: Mapping[str, Any], *, use_all: bool = False, source: Source = "final"
) -> float | None:
    """1 if the answer is an expression that reaches the target with the given numbers, each used at
    most once.

    Args:
        text: the completion.
        columns: the row: `numbers` and `target`.
        use_all: every number must be used.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Returns:
        1.0 or 0.0; None where the row lacks its columns.

    Example:
        >>> countdown("<answer>44 - 19 + 10</answer>", {"numbers": [44, 19, 10], "target": 35})
        1.0

    Source: the countdown task of TinyZero, with `use_all`.
    Elsewhere: TinyZero checks the characters and then calls `eval`, on which "9**9**9" hangs;
        reasoning-gym calls sympy's `parse_expr`, which executes names. TinyZero compares within
        1e-5 and gives 0.1 for a well-formed wrong answer.
    """
    numbers, target = columns.get("numbers"), columns.get("target")
    if numbers is None or target is None:
        return None
    said = final_answer(text, source=source)
    if said is None:
        return 0.0
    return float(solves(said, [int(n) for n in numbers], Fraction(str(target)), use_all=use_all))
