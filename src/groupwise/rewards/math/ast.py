"""The nodes of expression trees, and the words and signs that the reader knows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from groupwise.rewards.math.numbers import MAX_EXPONENT
from groupwise.rewards.math.tokens import KNOWN, ReadError

RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "\\le": "<=", "\\leq": "<=",
    "\\leqslant": "<=", "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\lt": "<", "\\gt": ">",
    "\\ne": "!=", "\\neq": "!=", "\\approx": "~", "\\simeq": "~", "\\in": "in", "\\equiv": "==",
    "\\to": "->", "\\cong": "~", "\\mapsto": "->", "\\sim": "~",
}  # fmt: skip
SET_OPERATIONS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "minus",
                  "\\backslash": "minus"}  # fmt: skip
TIMES = {"*", "\\cdot", "\\times", "\\ast", "\\cdotp"}
OVER = {"/", "\\div"}
CLOSERS = {")", "]", "}", "\\}", "|", "&", "\\\\", "\\rangle", "\\rfloor", "\\rceil", "\\end",
           "\\mid", "\\|", "\\rvert", "\\Vert"}  # fmt: skip
MATRICES = {"pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "Bmatrix", "vmatrix"}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a tree; `value` holds what is not a sub-expression."""

    op: str
    args: tuple[Node, ...] = ()
    value: Any = None


UNREAD = {"int", "iint", "oint", "lim", "limsup", "liminf", "bigcup", "bigcap", "end", "text"}
BRACKETS = {
    "lfloor": ("\\rfloor", "floor"), "lceil": ("\\rceil", "ceiling"), "lvert": ("\\rvert", "abs"),
    "|": ("\\|", "norm"), "langle": ("\\rangle", "tuple"), "mid": ("\\mid", "abs"),
}  # fmt: skip


def is_literal(node: Node) -> bool:
    """A whole number or fraction as written, signed or not."""
    return node.op == "num" or (node.op == "neg" and node.args[0].op == "num")


def is_product(name: str) -> bool:
    """Whether a run of letters is a product of variables; other runs are words."""
    if name in KNOWN or len(name) <= 2:
        return True
    return set(name) <= set("abckmnpqrstuvwxyz") and len(set(name)) == len(name) <= 5


def number(text: str) -> Node:
    """A literal, exact; a decimal keeps its digits, which say how much it may be rounded."""
    mantissa, _, exponent = text.lower().partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise ReadError("exponent too large")
    value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
    return Node("decimal", (), (value, text)) if "." in mantissa else Node("num", (), value)


def constant(name: str) -> Node:
    """π, e, i or ∞ by any of its names."""
    alias = {"inf": "infty", "infinity": "infty", "oo": "infty"}
    return Node("constant", (), alias.get(name, name))


def plain(node: Node) -> str:
    """An exponent of a unit as text."""
    return str(node.value) if node.op == "num" else node.op


def mixed(left: Node, right: Node) -> Node:
    """What a whole number before a factor is: 2 1/3 and 12 1/2 % are sums, 2x is a product."""
    part = right.args[0] if right.op == "percent" else right
    if right.op == "div" and right.args[1].op == "percent":  # 1/2 % was read as 1 over 2 %
        part = Node("div", (right.args[0], right.args[1].args[0]))
    if part.op != "div" or not all(arg.op == "num" for arg in part.args):
        return Node("mul", (left, right))
    whole = left.args[0] if left.op == "neg" else left
    node = Node("add", (whole, part))
    node = Node("neg", (node,)) if left.op == "neg" else node
    return node if part is right else Node("percent", (node,))


def total(left: Node, sign: str, right: Node) -> Node:
    """A sum or difference; a set taken from a set is the difference of sets."""
    if sign == "-" and right.op == "set":
        return Node("minus", (as_set(left, braced=False), right))
    return Node("add", (left, right if sign == "+" else Node("neg", (right,))))


def as_set(node: Node, braced: bool) -> Node:
    """An operand of a set operation: R is the real numbers, {3} the set of 3."""
    if node.op == "symbol" and node.value == "R":
        return Node("reals")
    return Node("set", (node,)) if braced and node.op not in ("set", "list") else node
