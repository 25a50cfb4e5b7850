"""A calculator: exact arithmetic, read by a parser and never evaluated as a program."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from groupwise.environments.base import ENVIRONMENTS, Reply, TagEnvironment, Tags

LONGEST = 200
"""Maximum characters of an expression."""
LARGEST_BITS = 4096
"""Maximum size of a number that is computed with."""
_LITERAL = re.compile(r"[\d_]*\.?[\d_]+(?:[eE][+-]?\d{1,3})?|[\d_]+\.")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


@ENVIRONMENTS.register
def calculator(
    *,
    opening: str = "<calculate>",
    closing: str = "</calculate>",
    max_calls: int = 8,
) -> TagEnvironment:
    """Computes + − * / // % ** and parentheses over whole and decimal numbers, exactly.

    Args:
        opening, closing: tags around an expression.
        max_calls: calls of one completion.

    Example:
        >>> from groupwise.types import Prompt, Stream
        >>> tool = calculator()
        >>> state = tool.begin(Prompt(id="a", text=""), stream=Stream(0, 0, 0, 0))
        >>> tool.reply(state, "so <calculate>(1 + 2) / 4</calculate>").text
        '<result>0.75</result>'
    """
    tags = Tags(call=(opening, closing), result=("<result>", "</result>"))
    return TagEnvironment(_answer, tags=tags, max_calls=max_calls)


def _answer(expression: str) -> Reply:
    """The value as text, or what is wrong with the expression."""
    try:
        return Reply(text=written(compute(expression)))
    except ZeroDivisionError:
        problem = "division by zero"
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        problem = str(error) if type(error) is ValueError else "not an arithmetic expression"
    return Reply(text=f"error: {problem}", values={"malformed": 1.0})


def compute(expression: str) -> Fraction:
    """The exact value of an arithmetic expression.

    Raises:
        ValueError: it is too long, too large, or no arithmetic.
        ZeroDivisionError: it divides by 0.

    Example:
        >>> compute("2 ** 10 - 0.5")
        Fraction(2047, 2)
    """
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    expression = expression.strip()
    return _value(ast.parse(expression, mode="eval").body, expression)


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant):
        return _number(ast.get_source_segment(source, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, source)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, source), _value(node.right, source)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(node.op)](left, right))
    raise ValueError("not an arithmetic expression")


def _number(literal: str) -> Fraction:
    """A number as it was written: a float would round it."""
    if not _LITERAL.fullmatch(literal):
        raise ValueError("not an arithmetic expression")
    return _bounded(Fraction(literal.replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("exponents must be whole numbers")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > LARGEST_BITS:
        raise ValueError("the number is too large")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ValueError("the number is too large")
    return value


def written(value: Fraction) -> str:
    """A number as people write it: whole or decimal where that is exact, else a fraction.

    Example:
        >>> [written(Fraction(x)) for x in ("7", "3/4", "1/3")]
        ['7', '0.75', '1/3']
    """
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    places = value.denominator.bit_length()
    if rest != 1 or places > 30:
        return f"{value.numerator}/{value.denominator}"
    sign, digits = (
        "-" if value < 0 else "",
        str(abs(value.numerator) * 10**places // value.denominator),
    )
    digits = digits.rjust(places + 1, "0")
    return f"{sign}{digits[:-places]}.{digits[-places:]}".rstrip("0").rstrip(".")
