"""A formula written in Python's syntax, turned into a sympy expression without executing any of
it."""

from __future__ import annotations

import ast
import cmath
import operator
from collections.abc import Callable
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS = (
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "exp", "log", "sqrt", "Abs",
)  # fmt: skip
_LONGEST = 500
_DIGITS = 30
_LARGEST_POWER = 100
_LARGEST_NUMBER = 4096
"""Bits of a number that a power may make."""


def read_formula(text: str, *, symbols: frozenset[str] = frozenset()) -> Any | None:
    """The sympy expression that a text writes, built node by node from a list of what is allowed.

    Allowed are numbers, the given symbols, pi and E, + - * /, powers, and the elementary functions.
    A power of numbers must have an exponent of at most 100, so that no tower of powers is computed.

    Args:
        text: at most 500 characters in Python's syntax; `^` is read as a power, `ln` as `log`.
        symbols: names that stand for themselves; single letters other than E always do.

    Returns:
        The expression; None for everything else.

    Example:
        >>> read_formula("x*(x + 1) - x**2")
        -x**2 + x*(x + 1)
        >>> read_formula("().__class__"), read_formula("9**9**9")
        (None, None)

    Elsewhere: sympy's `sympify` and `parse_expr` hand the text to `eval` and so run what an answer
        contains.
    """
    if len(text) > _LONGEST:
        return None
    try:
        return _build(ast.parse(text.strip().replace("^", "**"), mode="eval").body, symbols)
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _build(node: ast.expr, symbols: frozenset[str]) -> Any:
    import sympy

    match node:
        case ast.Constant(value=int(value)) if type(value) is int and len(str(value)) <= _DIGITS:
            return sympy.Integer(value)
        case ast.Constant(value=float(value)):
            return sympy.Rational(repr(value))
        case ast.Name(id="pi"):
            return sympy.pi
        case ast.Name(id="E" | "e"):
            return sympy.E
        case ast.Name(id=name) if name in symbols or (len(name) == 1 and name.isalpha()):
            return sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_build(inner, symbols)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _build(inner, symbols)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_build(left, symbols), _build(right, symbols))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_build(left, symbols), _build(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]):
            name = {"ln": "log", "abs": "Abs"}.get(name, name)
            if name in _FUNCTIONS:
                return getattr(sympy, name)(_build(inner, symbols))
    raise ValueError(f"{type(node).__name__} is not allowed in a formula")


def _power(base: Any, exponent: Any) -> Any:
    """A power that is safe to compute: sympy multiplies out numbers and joins nested exponents."""
    if base.is_Rational and exponent.is_Rational:
        size = max(abs(base.p), base.q).bit_length() * abs(exponent.p)
        if size > _LARGEST_NUMBER or exponent.q > _LARGEST_POWER:
            raise ValueError("the power is too large")
    made = base**exponent
    if made.is_Pow and made.exp.is_number:
        known = made.exp.is_Rational and abs(made.exp) <= _LARGEST_POWER
        if not known:
            raise ValueError("the exponent is too large, or no fraction")
    return made


def same_values(left: Any, right: Any, *, variable: str) -> bool:
    """Whether two expressions of one variable agree at five points, to nine digits.

    Points at which either side has no finite value are left out; three must remain.

    Example:
        >>> a, b = read_formula("sin(x)**2"), read_formula("1 - cos(x)**2")
        >>> same_values(a, b, variable="x"), same_values(a, b + 1, variable="x")
        (True, False)
    """
    import sympy

    agreeing = 0
    for point in (sympy.Rational(n, 97) for n in (31, 58, 113, 199, 271)):
        values = [
            complex(side.subs(sympy.Symbol(variable), point).evalf()) for side in (left, right)
        ]
        if not all(map(cmath.isfinite, values)):
            continue
        if abs(values[0] - values[1]) > 1e-9 * (1 + abs(values[1])):
            return False
        agreeing += 1
    return agreeing >= 3
