"""Sets of real numbers: lists and ± spelled out, chains of relations, intervals and unions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groupwise.rewards.math.ast import Node
from groupwise.rewards.math.values import Evaluation, NoValue, agree, context, symbols

MAX_ITEMS = 40
COLLECTIONS = ("pm", "list", "set", "tuple", "interval", "ratio", "matrix", "relation", "text")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "=", "==": "=="}
Piece = tuple[Any, bool, Any, bool]


def members(node: Node) -> list[Node]:
    """Elements of a list, set or ±, every ± inside them expanded.

    Raises:
        NoValue: more than `MAX_ITEMS`.
    """
    if node.op == "pm":
        return expand(node)
    found = [branch for arg in node.args for branch in expand(arg)]
    if len(found) > MAX_ITEMS:
        raise NoValue("too many elements")
    return found


def expand(node: Node) -> list[Node]:
    """Both branches of an expression with ±; the signs go together, ∓ against them."""
    if not _contains(node, "pm"):
        return [node]
    return [_branch(node, 1), _branch(node, -1)]


def spelled_out(node: Node) -> Node:
    """An expression with ± inside it as the list of its values."""
    if node.op in COLLECTIONS or not _contains(node, "pm"):
        return node
    return Node("list", tuple(expand(node)))


def _branch(node: Node, sign: int) -> Node:
    args = tuple(_branch(arg, sign) for arg in node.args)
    if node.op == "pm":
        right = args[1] if sign * node.value > 0 else Node("neg", (args[1],))
        return Node("add", (args[0], right))
    return Node(node.op, args, node.value)


def _contains(node: Node, op: str) -> bool:
    return node.op == op or any(_contains(arg, op) for arg in node.args)


def settled(node: Node) -> Node:
    """A chain cut down to what it claims: approximations, membership and middle steps go."""
    if node.op != "relation":
        return node
    args, signs = list(node.args), list(node.value)
    while "~" in signs:
        place = signs.index("~")
        if place == 0 and len(args) == 2 and args[0].op in ("symbol", "indexed", "call", "text"):
            signs[0] = "="
        else:
            args, signs = args[: place + 1], signs[:place]
    if not signs:
        return args[0]
    if signs == ["in"] or signs == ["->"] and len(args) == 2:
        return args[1]
    if len(signs) > 1 and set(signs) == {"="}:
        args, signs = [args[0], args[-1]], ["="]
    return Node("relation", tuple(args), tuple(signs))


def same_regions(gold: Node, answer: Node) -> bool:
    """Whether two nodes describe the same set of reals."""
    return same_pieces(pieces(gold), pieces(answer))


def same_pieces(one: list[Piece], two: list[Piece]) -> bool:
    """Whether two unions of intervals are the same, however they are cut."""
    one, two = _merged(one), _merged(two)
    if len(one) != len(two):
        return False
    return all(
        a[1] == b[1] and a[3] == b[3] and agree(a[0], b[0]) and agree(a[2], b[2])
        for a, b in zip(one, two, strict=True)
    )


def pieces(node: Node) -> list[Piece]:
    """A set of reals as intervals (low, closed, high, closed).

    Raises:
        NoValue: an end is not a real number, or the node is not a set of reals.
    """
    ctx = context()
    if node.op == "reals":
        return [(-ctx.inf, False, ctx.inf, False)]
    if node.op in ("set", "list"):
        return _together([_points(arg) for arg in members(node)], node.value)
    if node.op in ("interval", "tuple") and len(node.args) == 2:
        low, high = map(_end, node.args)
        closed = node.value or (False, False)
        return [(low, closed[0] and low != -ctx.inf, high, closed[1] and high != ctx.inf)]
    if node.op == "union":
        return pieces(node.args[0]) + pieces(node.args[1])
    if node.op == "intersection":
        return _intersected(pieces(node.args[0]), pieces(node.args[1]))
    if node.op == "minus":
        return _intersected(pieces(node.args[0]), _complement(pieces(node.args[1])))
    if node.op == "relation":
        return _allowed(settled(node))
    raise NoValue(f"{node.op} is not a set of reals")


def _together(parts: list[list[Piece]], word: str | None) -> list[Piece]:
    """x > 1 and x < 3: all hold, unless nothing would be left. With "or", one holds; with a comma,
    one, unless that would leave nothing out."""
    ctx = context()
    union = [piece for part in parts for piece in part]
    everything = same_pieces(union, [(-ctx.inf, False, ctx.inf, False)])
    if word == "or" or not (word == "and" or everything):
        return union
    common = parts[0]
    for part in parts[1:]:
        common = _intersected(common, part)
    return common or union


def _points(node: Node) -> list[Piece]:
    if node.op == "relation":
        return _allowed(settled(node))
    value = _end(node)
    return [(value, True, value, True)]


def _end(node: Node) -> Any:
    value = Evaluation({}).scalar(node) if not symbols(node) else None
    if value is None or context().im(value) != 0:
        raise NoValue("an end that is not a real number")
    return context().re(value)


def _allowed(node: Node) -> list[Piece]:
    """What a chain of comparisons with one bare variable allows."""
    if node.op != "relation":
        return pieces(node)
    ctx = context()
    places = [i for i, arg in enumerate(node.args) if symbols(arg)]
    if len(places) != 1:
        raise NoValue("an inequality with a variable on both sides")
    slope, shift, absolute = _line(node.args[places[0]])
    found: list[Piece] = [(-ctx.inf, False, ctx.inf, False)]
    rules: dict[str, Callable[[Any], list[Piece]]] = {
        "<": lambda v: [(-ctx.inf, False, v, False)],
        "<=": lambda v: [(-ctx.inf, False, v, True)],
        ">": lambda v: [(v, False, ctx.inf, False)],
        ">=": lambda v: [(v, True, ctx.inf, False)],
        "=": lambda v: [(v, True, v, True)],
        "!=": lambda v: [(-ctx.inf, False, v, False), (v, False, ctx.inf, False)],
    }
    for i, arg in enumerate(node.args):
        if i != places[0]:
            sign = node.value[min(i, places[0])] if abs(i - places[0]) == 1 else None
            if sign not in rules:
                raise NoValue("this chain is not read")
            sign = sign if i > places[0] else FLIPPED[sign]
            found = _intersected(found, rules[sign](_end(arg)))
    if absolute:
        found = _intersected(found, [(ctx.mpf(0), True, ctx.inf, False)])
        found += [(-high, hc, -low, lc) for low, lc, high, hc in found]
    return [_scaled(piece, slope, shift) for piece in found]


def _scaled(piece: Piece, slope: Any, shift: Any) -> Piece:
    """The values of x for which slope · x + shift lies in an interval."""
    low, low_closed, high, high_closed = piece
    ends = ((low - shift) / slope, low_closed), ((high - shift) / slope, high_closed)
    (low, low_closed), (high, high_closed) = ends if slope > 0 else ends[::-1]
    return low, low_closed, high, high_closed


def _line(node: Node) -> tuple[Any, Any, bool]:
    """Slope and value at zero of a linear expression, and whether its absolute value is meant.

    Raises:
        NoValue: it is not linear in one variable.
    """
    ctx = context()
    inner = node.args[0] if node.op == "abs" else node
    if inner.op in ("symbol", "indexed", "call"):
        return ctx.mpf(1), ctx.mpf(0), node.op == "abs"
    names = symbols(inner)
    if len(names) != 1 or not names <= _letters(inner):
        raise NoValue("an inequality without a bare variable")
    [name] = names
    values = [Evaluation({name: ctx.mpf(x)}).scalar(inner) for x in (0, 1, 2, ctx.mpf(7) / 3)]
    shift, slope = values[0], values[1] - values[0]
    straight = agree(values[2] - shift, 2 * slope) and agree(3 * (values[3] - shift), 7 * slope)
    if not straight or slope == 0 or any(ctx.im(value) != 0 for value in values):
        raise NoValue("an inequality that is not linear")
    return slope, shift, node.op == "abs"


def _letters(node: Node) -> frozenset[str]:
    if node.op == "symbol":
        return frozenset({node.value})
    return frozenset().union(*map(_letters, node.args))


def _merged(found: list[Piece]) -> list[Piece]:
    """Sorted, empty pieces dropped, touching pieces joined."""
    kept = [p for p in found if p[0] < p[2] or (agree(p[0], p[2]) and p[1] and p[3])]
    kept.sort(key=lambda p: (p[0], not p[1]))
    merged: list[Piece] = []
    for piece in kept:
        if merged:
            low, lc, high, hc = merged[-1]
            touching = agree(high, piece[0]) and (hc or piece[1])
            if piece[0] < high or touching:
                if piece[2] > high:
                    merged[-1] = (low, lc, piece[2], piece[3])
                elif agree(piece[2], high):
                    merged[-1] = (low, lc, high, hc or piece[3])
                continue
        merged.append(piece)
    return merged


def _intersected(one: list[Piece], two: list[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for a in one:
        for b in two:
            low = max(a[0], b[0])
            high = min(a[2], b[2])
            low_closed = all(p[1] for p in (a, b) if p[0] == low)
            high_closed = all(p[3] for p in (a, b) if p[2] == high)
            found.append((low, low_closed, high, high_closed))
    return _merged(found)


def _complement(found: list[Piece]) -> list[Piece]:
    ctx = context()
    low, closed = -ctx.inf, False
    rest: list[Piece] = []
    for piece in _merged(found):
        rest.append((low, closed, piece[0], not piece[1]))
        low, closed = piece[2], not piece[3]
    rest.append((low, closed, ctx.inf, False))
    return _merged(rest)
