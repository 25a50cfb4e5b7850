"""How matrices are written: LaTeX environments, and lists of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from groupwise.rewards.math.ast import MATRICES, Node
from groupwise.rewards.math.tokens import ReadError, Token


class Reader(Protocol):
    """What of a parser reading an environment needs."""

    def token(self, ahead: int = 0) -> Token: ...
    def peek(self) -> str: ...
    def take(self) -> Token: ...
    def expect(self, text: str) -> None: ...
    def relation(self) -> Node: ...


def read_matrix(reader: Reader) -> Node:
    """A matrix, from what follows `\\begin` to its `\\end{…}`."""
    kind = _environment(reader)
    if kind not in MATRICES:
        raise ReadError(f"unknown environment {kind}")
    while kind == "array" and reader.token().text not in ("}", ""):
        reader.take()
    if kind == "array":
        reader.expect("}")
    rows: list[list[Node]] = [[]]
    while reader.peek() != "\\end":
        if reader.peek() == "\\\\":
            reader.take()
            rows.append([])
        elif reader.peek() in ("&", "\\hline"):
            reader.take()
        else:
            rows[-1].append(reader.relation())
    reader.take()
    _environment(reader)
    rows = [row for row in rows if row]
    if not rows or len({len(row) for row in rows}) != 1:
        raise ReadError("a matrix with ragged rows")
    node = _matrix(rows)
    return Node("function", (node,), ("det", False)) if kind == "vmatrix" else node


def _environment(reader: Reader) -> str:
    reader.expect("{")
    name = ""
    while reader.token().kind == "word":
        name += reader.take().text
    reader.expect("}")
    return name


def _matrix(rows: Sequence[Sequence[Node]]) -> Node:
    return Node("matrix", tuple(cell for row in rows for cell in row), (len(rows), len(rows[0])))


def bracketed(items: Node, square: tuple[bool, bool]) -> Node:
    """What brackets around several items are: an interval, a tuple, or the rows of a matrix."""
    if all(square) and all(_row(item) for item in items.args):
        if len({len(item.args) for item in items.args}) == 1:
            return _matrix([item.args for item in items.args])
    if len(items.args) == 2 and any(square):
        return Node("interval", items.args, square)
    return Node("tuple", items.args, "square" if all(square) else None)


def _row(node: Node) -> bool:
    if node.op == "interval":
        return node.value == (True, True)
    return node.op == "tuple" and node.value == "square"


def as_matrix(node: Node) -> Node | None:
    """The matrix that a tuple of tuples of one length may stand for."""
    rows = [arg.args for arg in node.args if arg.op == "tuple"]
    if node.op != "tuple" or len(rows) != len(node.args) or len({len(r) for r in rows}) != 1:
        return None
    return _matrix(rows)
