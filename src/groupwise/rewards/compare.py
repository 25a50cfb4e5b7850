"""Whether two expression trees are the same answer: lists, sets, intervals, equations, values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.rewards.expressions import Node
from groupwise.rewards.numbers import Number, is_rounding, known_unit
from groupwise.rewards.values import (
    Evaluation,
    NoValue,
    agree,
    as_node,
    context,
    proportion,
    same_values,
    symbols,
)

MAX_ITEMS = 40
UNORDERED = ("list", "set", "pm")
REGIONS = ("set", "interval", "union", "intersection", "minus", "reals", "tuple")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "=", "==": "=="}
Piece = tuple[Any, bool, Any, bool]


def same(gold: Node, answer: Node) -> bool:
    """Whether two trees mean the same answer.

    Raises:
        NoValue: this cannot be decided, because something in them has no value.
    """
    gold, answer = _bare(gold), _bare(answer)
    if gold == answer:
        return True
    if gold.op == "unit" or answer.op == "unit":
        return _same_units(gold, answer)
    if "percent" in (gold.op, answer.op) and gold.op != answer.op:
        marked, other = (gold, answer) if gold.op == "percent" else (answer, gold)
        return same(marked.args[0], other) or same(Node("div", (*marked.args, as_node(100))), other)
    if gold.op == answer.op == "percent":
        return same(gold.args[0], answer.args[0])
    if "relation" in (gold.op, answer.op):
        return _same_relations(gold, answer)
    if "text" in (gold.op, answer.op):
        return words(gold) == words(answer) != ""
    if "based" in (gold.op, answer.op):
        return _same_based(gold, answer)
    return _same_collections(gold, answer)


def _same_collections(gold: Node, answer: Node) -> bool:
    ops = {gold.op, answer.op}
    if ops & {"tuple", "ratio"} and "matrix" in ops:
        vector, grid = (answer, gold) if gold.op == "matrix" else (gold, answer)
        return 1 in grid.value and _pairwise(vector.args, grid.args)
    if gold.op == answer.op == "matrix":
        return gold.value == answer.value and _pairwise(gold.args, answer.args)
    if gold.op == answer.op and gold.op in ("tuple", "interval", "ratio"):
        return gold.value == answer.value and _pairwise(gold.args, answer.args)
    if ops == {"tuple", "list"}:
        return _pairwise(gold.args, answer.args)
    if ops <= {"tuple", "interval"} or ops == {"tuple", "set"}:
        return False
    if gold.op in UNORDERED and answer.op in UNORDERED:
        one, two = members(gold), members(answer)
        return _matched(one, two) or (ops == {"list"} and _same_inequalities(one, two))
    if ops & set(REGIONS) - {"tuple"}:
        return _same_regions(gold, answer)
    if ops & {"list", "pm", "tuple", "ratio"}:
        return False
    return same_scalars(gold, answer)


def _bare(node: Node) -> Node:
    """Without degree sign, signs before a text, and a set or list of one element that is a ±."""
    while True:
        if node.op == "degree":
            node = node.args[0]
        elif node.op in ("list", "set") and len(node.args) == 1 and node.args[0].op == "pm":
            node = node.args[0]
        else:
            return node


# -- scalars ------------------------------------------------------------------------------------


def same_scalars(gold: Node, answer: Node) -> bool:
    """Equal values; a decimal of enough digits may stand for the exact value that it rounds."""
    if same_values(gold, answer):
        return True
    decimals = [_decimal(node) for node in (gold, answer)]
    if (decimals[0] is None) == (decimals[1] is None) or symbols(gold) | symbols(answer):
        return False
    decimal = decimals[0] or decimals[1]
    exact = answer if decimals[0] else gold
    if decimal is None or _has_decimal(exact) or exact.op in ("num", "neg") and _whole(exact):
        return False
    difference = Evaluation({}).scalar(exact) - context().mpf(decimal.value.numerator) / (
        decimal.value.denominator
    )
    return is_rounding(decimal, float(abs(difference)))


def _whole(node: Node) -> bool:
    node = node.args[0] if node.op == "neg" else node
    return node.op == "num" and node.value.denominator == 1


def _has_decimal(node: Node) -> bool:
    return node.op == "decimal" or any(map(_has_decimal, node.args))


def _decimal(node: Node) -> Number | None:
    """A node that is one decimal literal, signed or not."""
    negative = node.op == "neg"
    node = node.args[0] if negative else node
    if node.op != "decimal":
        return None
    value, literal = node.value
    mantissa, _, exponent = literal.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0)
    digits = len(mantissa.replace(".", "").lstrip("0"))
    return Number(value=-value if negative else value, digits=digits, places=max(places, 0))


def _same_units(gold: Node, answer: Node) -> bool:
    inner = [node.args[0] if node.op == "unit" else node for node in (gold, answer)]
    units = [_unit(node) for node in (gold, answer)]
    if units[0] and units[1]:
        if units[0][0] != units[1][0]:
            return False
        if units[0][1] != units[1][1]:
            inner = [
                Node("mul", (node, as_node(unit[1])))
                for node, unit in zip(inner, units, strict=True)
                if unit is not None
            ]
    percent = [node.op == "unit" and _is_percent(node.value) for node in (gold, answer)]
    wrapped = [
        Node("percent", (node,)) if flag else node
        for node, flag in zip(inner, percent, strict=True)
    ]
    return same(*wrapped)


def _is_percent(name: str) -> bool:
    return name.strip().lower() in ("percent", "percentage", "pct", "%")


def _unit(node: Node) -> tuple[str, Any] | None:
    if node.op != "unit":
        return None
    match = re.fullmatch(r"([a-zA-Z]+)\.?\s*\^?([23²³])?", node.value.strip())
    return known_unit(match[1], power=match[2]) if match else None


def _same_based(gold: Node, answer: Node) -> bool:
    """Digits in a base equal the same digits without one; between two bases, values decide."""
    if gold.op == answer.op:
        if gold.args[0] == answer.args[0]:
            return gold.value == answer.value
        return _based_value(gold) == _based_value(answer)
    based, other = (gold, answer) if gold.op == "based" else (answer, gold)
    return other.op == "num" and str(other.value) == based.value


def _based_value(node: Node) -> int:
    base = node.args[0]
    if base.op != "num" or not 2 <= base.value <= 36:
        raise NoValue("base of a number")
    try:
        return int(node.value, int(base.value))
    except ValueError:
        raise NoValue("digit outside the base") from None


# -- words --------------------------------------------------------------------------------------


def words(node: Node) -> str:
    """The words of a text answer, lower case; letters that were read as symbols count too."""
    if node.op == "text":
        return plain_words(node.value)
    if node.op in ("symbol", "constant"):
        return str(node.value).lower()
    if node.op in ("mul", "list", "tuple", "unit", "set"):
        joint = " " if any(a.op == "text" for a in node.args) or node.op == "unit" else ""
        tail = " " + plain_words(node.value) if node.op == "unit" else ""
        return (joint.join(map(words, node.args)) + tail).strip()
    return str(node.value) if node.op == "num" else ""


def plain_words(text: str) -> str:
    """Lower case words without punctuation, brackets and articles.

    Example:
        >>> plain_words("(C)"), plain_words("The even function.")
        ('c', 'even function')
    """
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*|\\[,;:! ]|[{}$]", " ", text.lower())
    text = re.sub(r"[^\w\s%<>=+*/^-]|_", " ", text)
    kept = [word for word in text.split() if word not in ("the", "a", "an")]
    return " ".join(kept or text.split())


# -- collections --------------------------------------------------------------------------------


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


def _branch(node: Node, sign: int) -> Node:
    args = tuple(_branch(arg, sign) for arg in node.args)
    if node.op == "pm":
        right = args[1] if sign * node.value > 0 else Node("neg", (args[1],))
        return Node("add", (args[0], right))
    return Node(node.op, args, node.value)


def _contains(node: Node, op: str) -> bool:
    return node.op == op or any(_contains(arg, op) for arg in node.args)


def _pairwise(one: Sequence[Node], two: Sequence[Node]) -> bool:
    return len(one) == len(two) and all(map(same, one, two))


def _matched(one: Sequence[Node], two: Sequence[Node]) -> bool:
    """A perfect matching by `same`; equality is transitive here, so greedy is enough."""
    one, two = _distinct(one), _distinct(two)
    if len(one) != len(two):
        return False
    rest = list(two)
    for item in one:
        place = next((i for i, other in enumerate(rest) if _surely(item, other)), None)
        if place is None:
            return False
        del rest[place]
    return True


def _distinct(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(_surely(item, other) for other in kept):
            kept.append(item)
    return kept


def _surely(one: Node, two: Node) -> bool:
    try:
        return same(one, two)
    except NoValue:
        return False


# -- equations and inequalities -----------------------------------------------------------------


def _same_relations(gold: Node, answer: Node) -> bool:
    gold, answer = _settled(gold), _settled(answer)
    if gold.op != "relation" or answer.op != "relation":
        one, two = _assigned(gold), _assigned(answer)
        if one is not None and two is not None and (gold is not one or answer is not two):
            return same(one, two)
        if "relation" in (gold.op, answer.op):
            return _same_regions(gold, answer)
        return same(gold, answer)
    labels = [_label(node) for node in (gold, answer)]
    if labels[0] is not None and labels[1] is not None:
        values = [node.args[-1] for node in (gold, answer)]
        if labels[0] == labels[1] or (symbols(values[0]) and labels[0].op != "symbol"):
            return same(*values)
    return _same_comparisons(gold, answer)


def _settled(node: Node) -> Node:
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


def _label(node: Node) -> Node | None:
    """What an equation names, if its left side is only a name: x, f(x), D, a text."""
    if node.op != "relation" or node.value != ("=",):
        return None
    left, right = node.args
    if left.op in ("symbol", "indexed", "call", "text", "unit", "constant", "prime"):
        return left if left.op in ("call", "text") or left not in _leaves(right) else None
    if left.op == "tuple" and all(arg.op in ("symbol", "indexed") for arg in left.args):
        return left
    if left.op in ("mul", "abs", "ratio", "div") and not symbols(right):
        leaves = _leaves(left)
        named = all(n.op in ("symbol", "indexed") and n.value.isupper() for n in leaves)
        return left if named else None  # AB = 5, |AB| = 5: a length has a name of several letters
    return None


def _leaves(node: Node) -> list[Node]:
    if not node.args or node.op == "indexed":
        return [node]
    return [leaf for arg in node.args for leaf in _leaves(arg)]


def _assigned(node: Node) -> Node | None:
    """The value of an assignment, the node itself where it is no relation, None for the rest."""
    if node.op != "relation":
        return node
    if _label(node) is not None:
        return node.args[-1]
    numbered = node.value == ("=",) and node.args[0].op == "num" and not symbols(node.args[1])
    return node.args[-1] if numbered else None


def _same_comparisons(gold: Node, answer: Node) -> bool:
    """Equations up to a factor, inequalities up to a positive one, chains term by term."""
    if len(gold.value) == len(answer.value) == 1:
        signs = gold.value[0], answer.value[0]
        sides = [Node("add", (n.args[0], Node("neg", (n.args[1],)))) for n in (gold, answer)]
        try:
            factor = proportion(*sides)
        except NoValue:
            factor = None
        if factor is not None:
            if signs[0] in ("=", "!=", "=="):
                return signs[0] == signs[1]
            real = context().im(factor) == 0
            wanted = signs[0] if context().re(factor) > 0 else FLIPPED.get(signs[0])
            return real and signs[1] == wanted
        if signs[0] in ("=", "==") or signs[1] in ("=", "=="):
            return False
    one, two = _ascending(gold), _ascending(answer)
    if one.value == two.value and _pairwise(one.args, two.args):
        return True
    try:
        return symbols(gold) == symbols(answer) and _same_regions(gold, answer)
    except NoValue:
        return False


def _ascending(node: Node) -> Node:
    if node.value[0] in (">", ">="):
        return Node("relation", node.args[::-1], tuple(FLIPPED[s] for s in node.value[::-1]))
    return node


def _same_inequalities(one: Sequence[Node], two: Sequence[Node]) -> bool:
    """x < 2 or x > 5: a list of inequalities is the union of what each allows."""
    nodes = (*one, *two)
    if not all(n.op == "relation" and "=" not in n.value for n in nodes):
        return False
    if len(frozenset().union(*map(symbols, nodes))) != 1:
        return False
    return _same_pieces([p for n in one for p in pieces(n)], [p for n in two for p in pieces(n)])


# -- regions of the real line -------------------------------------------------------------------


def _same_regions(gold: Node, answer: Node) -> bool:
    return _same_pieces(pieces(gold), pieces(answer))


def _same_pieces(one: list[Piece], two: list[Piece]) -> bool:
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
        NoValue: an end is no real number, or the node is no set of reals.
    """
    ctx = context()
    if node.op == "reals":
        return [(-ctx.inf, False, ctx.inf, False)]
    if node.op in ("set", "list"):
        points = [piece for arg in members(node) for piece in _points(arg)]
        return points
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
        return _allowed(_settled(node))
    raise NoValue(f"{node.op} is no set of reals")


def _points(node: Node) -> list[Piece]:
    if node.op == "relation":
        return _allowed(_settled(node))
    value = _end(node)
    return [(value, True, value, True)]


def _end(node: Node) -> Any:
    value = Evaluation({}).scalar(node) if not symbols(node) else None
    if value is None or context().im(value) != 0:
        raise NoValue("an end that is no real number")
    return context().re(value)


def _allowed(node: Node) -> list[Piece]:
    """What a chain of comparisons with one bare variable allows."""
    if node.op != "relation":
        return pieces(node)
    ctx = context()
    places = [i for i, arg in enumerate(node.args) if _variable(arg)]
    if len(places) != 1:
        raise NoValue("an inequality without a bare variable")
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
    if node.args[places[0]].op == "abs":
        found = _intersected(found, [(ctx.mpf(0), True, ctx.inf, False)])
        found += [(-high, hc, -low, lc) for low, lc, high, hc in found]
    return found


def _variable(node: Node) -> bool:
    inner = node.args[0] if node.op == "abs" else node
    return inner.op in ("symbol", "indexed", "call")


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
