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
