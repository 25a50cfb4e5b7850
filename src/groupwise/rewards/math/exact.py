"""Exact values of trees that are rational numbers: integers of any size, fractions, powers."""

from __future__ import annotations

import math
from fractions import Fraction

from groupwise.rewards.math.ast import Node

MAX_BITS = 1 << 17  # of numerator and denominator
MAX_STEPS = 2_000


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
