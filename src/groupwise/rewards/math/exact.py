"""Exact values of trees that are rational numbers (integers of any size, fractions, powers) or one
root of such a number."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from groupwise.rewards.math.ast import Node

MAX_BITS = 1 << 17  # of numerator and denominator
MAX_STEPS = 2_000
MAX_INDEX = 60


class _Inexact(Exception):
    """Not a rational number, or one beyond the limits."""


def rational(node: Node) -> Fraction | None:
    """The value of a tree without symbols as a fraction; None where it is not known to be one.

    Example:
        >>> from groupwise.rewards.math.expressions import read
        >>> rational(read("10^{50} + 1")) - 10**50
        Fraction(1, 1)
        >>> rational(read(r"\\sqrt{2}"))
    """
    try:
        return _value(node, [MAX_STEPS])
    except (_Inexact, ZeroDivisionError):
        return None


def _value(node: Node, steps: list[int]) -> Fraction:
    steps[0] -= 1
    if steps[0] < 0:
        raise _Inexact
    if node.op == "num":
        return node.value
    if node.op == "decimal":
        return node.value[0]
    args = [_value(arg, steps) for arg in node.args]
    found = _combined(node, args)
    if max(found.numerator.bit_length(), found.denominator.bit_length()) > MAX_BITS:
        raise _Inexact
    return found


def _combined(node: Node, args: list[Fraction]) -> Fraction:
    match node.op, args:
        case "neg", [one]:
            return -one
        case "add", [one, two]:
            return one + two
        case "mul", [one, two]:
            return one * two
        case "div", [one, two]:
            return one / two
        case "percent", [one]:
            return one / 100
        case "unit", [one]:
            return one
        case "abs", [one]:
            return abs(one)
        case "pow", [base, exponent]:
            return _power(base, exponent)
        case "factorial", [count] if count.denominator == 1 and 0 <= count:
            if count * max(count.numerator.bit_length(), 1) <= MAX_BITS:
                return Fraction(math.factorial(count.numerator))
        case "binomial", [top, bottom] if top.denominator == bottom.denominator == 1:
            if 0 <= bottom <= top <= MAX_BITS:
                return Fraction(math.comb(top.numerator, bottom.numerator))
    raise _Inexact


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS or base == exponent == 0:
        raise _Inexact
    return base**exponent.numerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """sign · radicand^(1/index), with a positive radicand."""

    sign: int
    radicand: Fraction
    index: int


def root(node: Node) -> Root | None:
    """The value of a tree without symbols as one root of a rational number, None where it is not
    known to be one.

    Example:
        >>> from groupwise.rewards.math.expressions import read
        >>> root(read(r"-2\\sqrt{3}")), root(read(r"1+\\sqrt{3}"))
        (Root(sign=-1, radicand=Fraction(12, 1), index=2), None)
    """
    try:
        return _root(node)
    except (_Inexact, ZeroDivisionError):
        return None


def same_root(one: Root, two: Root) -> bool | None:
    """Whether two roots are the same number; None where telling would take too large numbers."""
    if one.sign != two.sign:
        return False
    index = math.lcm(one.index, two.index)
    try:
        return _raised(one, index) == _raised(two, index)
    except _Inexact:
        return None


def _root(node: Node) -> Root:
    if node.op == "neg":
        inner = _root(node.args[0])
        return replace(inner, sign=-inner.sign)
    if node.op in ("mul", "div"):
        one, two = map(_root, node.args)
        index = math.lcm(one.index, two.index)
        radicand = _raised(one, index) * _raised(two, index) ** (1 if node.op == "mul" else -1)
        return Root(sign=one.sign * two.sign, radicand=radicand, index=index)
    exponent = _exponent(node)
    base = _root(node.args[0]) if exponent is not None else None
    if exponent is not None and base is not None and base.sign > 0:
        radicand = _power(base.radicand, Fraction(exponent.numerator))
        return Root(sign=1, radicand=radicand, index=base.index * exponent.denominator)
    value = rational(node)
    if not value:
        raise _Inexact
    return Root(sign=1 if value > 0 else -1, radicand=abs(value), index=1)


def _exponent(node: Node) -> Fraction | None:
    """The exponent of a power or root, None for other nodes."""
    if node.op == "pow":
        return rational(node.args[1])
    if node.op != "function" or node.value[0] != "sqrt":
        return None
    index = rational(node.args[1]) if node.value[1] else Fraction(2)
    return 1 / index if index else None


def _raised(number: Root, index: int) -> Fraction:
    """The absolute value of a root to the power `index`, a multiple of its own index."""
    if index > MAX_INDEX:
        raise _Inexact
    return _power(number.radicand, Fraction(index // number.index))
