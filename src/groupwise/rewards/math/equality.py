"""Whether two expression trees are the same answer: lists, sets, intervals, equations, values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from groupwise.rewards.math.ast import Node
from groupwise.rewards.math.numbers import Number, is_rounding, known_unit
from groupwise.rewards.math.real_sets import (
    FLIPPED,
    members,
    pieces,
    same_pieces,
    same_regions,
    settled,
)
from groupwise.rewards.math.values import (
    Evaluation,
    NoValue,
    as_node,
    context,
    proportion,
    same_values,
    symbols,
)

UNORDERED = ("list", "set", "pm")
REGIONS = ("set", "interval", "union", "intersection", "minus", "reals", "tuple")


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
    if ops <= {"tuple", "interval"}:
        return False
    if gold.op in UNORDERED and answer.op in UNORDERED:
        one, two = members(gold), members(answer)
        return _matched(one, two) or (ops == {"list"} and _same_inequalities(one, two))
    if ops & set(REGIONS) - {"tuple"}:
        return same_regions(gold, answer)
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
    gold, answer = settled(gold), settled(answer)
    if gold.op != "relation" or answer.op != "relation":
        one, two = _assigned(gold), _assigned(answer)
        if one is not None and two is not None and (gold is not one or answer is not two):
            return same(one, two)
        if "relation" in (gold.op, answer.op):
            return same_regions(gold, answer)
        return same(gold, answer)
    labels = [_label(node) for node in (gold, answer)]
    if labels[0] is not None and labels[1] is not None:
        values = [node.args[-1] for node in (gold, answer)]
        if labels[0] == labels[1] or (symbols(values[0]) and labels[0].op != "symbol"):
            return same(*values)
    return _same_comparisons(gold, answer)


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
        return symbols(gold) == symbols(answer) and same_regions(gold, answer)
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
    return same_pieces([p for n in one for p in pieces(n)], [p for n in two for p in pieces(n)])
