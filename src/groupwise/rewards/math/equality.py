"""Whether two expression trees are the same answer: lists, sets, intervals, equations, values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from groupwise.rewards.math.ast import Node
from groupwise.rewards.math.exact import rational
from groupwise.rewards.math.grids import as_matrix
from groupwise.rewards.math.numbers import (
    MAX_EXPONENT,
    Number,
    differ,
    is_rounding,
    known_unit,
    multiplier,
)
from groupwise.rewards.math.real_sets import (
    FLIPPED,
    members,
    pieces,
    same_pieces,
    same_regions,
    settled,
    spelled_out,
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
    gold, answer = spelled_out(_bare(gold)), spelled_out(_bare(answer))
    if gold == answer:
        return True
    if "relation" in (gold.op, answer.op):
        return _same_relations(gold, answer)
    if gold.op == "unit" or answer.op == "unit":
        return _same_units(gold, answer)
    if "percent" in (gold.op, answer.op) and gold.op != answer.op:
        marked, other = (gold, answer) if gold.op == "percent" else (answer, gold)
        return same(marked.args[0], other) or same(Node("div", (*marked.args, as_node(100))), other)
    if gold.op == answer.op == "percent":
        return same(gold.args[0], answer.args[0])
    if "text" in (gold.op, answer.op):
        return words(gold) == words(answer) != ""
    if "based" in (gold.op, answer.op):
        return _same_based(gold, answer)
    return _same_collections(gold, answer)


def _same_collections(gold: Node, answer: Node) -> bool:
    ops = {gold.op, answer.op}
    if "matrix" in ops and ops & {"tuple", "ratio", "interval"}:
        return _same_vectors(*((answer, gold) if gold.op == "matrix" else (gold, answer)))
    if gold.op == answer.op == "matrix":
        return gold.value == answer.value and _pairwise(gold.args, answer.args)
    if gold.op == answer.op and gold.op in ("tuple", "ratio"):
        return _pairwise(gold.args, answer.args)
    if gold.op == answer.op == "interval":
        return gold.value == answer.value and _pairwise(gold.args, answer.args)
    if ops == {"tuple", "list"}:
        listed = gold if gold.op == "list" else answer
        bounds = all(map(_inequality, listed.args))
        return same_regions(gold, answer) if bounds else _pairwise(gold.args, answer.args)
    if ops <= {"tuple", "interval"}:
        return False
    if gold.op in UNORDERED and answer.op in UNORDERED:
        one, two = members(gold), members(answer)
        return _matched(one, two) or (ops == {"list"} and _same_inequalities(gold, answer))
    if ops & set(REGIONS) - {"tuple"}:
        return same_regions(gold, answer)
    if ops & {"list", "pm", "tuple", "ratio"}:
        return False
    return same_scalars(gold, answer)


def _same_vectors(vector: Node, grid: Node) -> bool:
    """A matrix, and a list of its entries (if it is a vector) or a tuple of its rows."""
    rows = as_matrix(vector)
    if rows is not None and rows.value == grid.value:
        return _pairwise(rows.args, grid.args)
    listed = vector.op in ("tuple", "ratio") or vector.value == (True, True)
    return listed and 1 in grid.value and _pairwise(vector.args, grid.args)


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
    shift = 0
    if node.op == "mul" and node.args[1].op == "pow" and node.args[1].args[0] == as_node(10):
        power = rational(node.args[1].args[1])
        if power is None or power.denominator != 1 or abs(power) > MAX_EXPONENT:
            return None
        node, shift = node.args[0], power.numerator
    if node.op != "decimal":
        return None
    value, literal = node.value
    value *= Fraction(10) ** shift
    mantissa, _, exponent = literal.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0) - shift
    digits = len(mantissa.replace(".", "").lstrip("0"))
    return Number(value=-value if negative else value, digits=digits, places=max(places, 0))


def _same_units(gold: Node, answer: Node) -> bool:
    (one, _), (two, unmultiplied) = _multiplied(gold), _multiplied(answer)
    if one != gold or two != answer:  # a bare reference of 2 may count millions
        return same(one, two) or (gold.op != "unit" and same(gold, unmultiplied))
    inner = [node.args[0] if node.op == "unit" else node for node in (gold, answer)]
    units = [_unit(node) for node in (gold, answer)]
    if gold.op == answer.op and differ(gold.value, answer.value):
        return False
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


def _multiplied(node: Node) -> tuple[Node, Node]:
    """A unit of "million people" with the number multiplied, and with the word left out."""
    if node.op != "unit":
        return node, node
    found = _multiplied(node.args[0])
    factor, rest = multiplier(node.value)
    if factor != 1:
        found = Node("mul", (found[0], as_node(factor))), found[1]
    one, two = (Node("unit", (inner,), rest) if rest else inner for inner in found)
    return one, two


def _is_percent(name: str) -> bool:
    return name.strip().lower() in ("percent", "percentage", "pct", "%")


def _unit(node: Node) -> tuple[str, Any] | None:
    if node.op != "unit":
        return None
    match = re.fullmatch(r"([a-zA-Z]+)\.?\s*\^?([23²³]|squared|cubed)?", node.value.strip())
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
    if any(node.op == "relation" and _false_chain(node) for node in (gold, answer)):
        return False
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
        marks = {"angle", "measuredangle", "triangle"} & {str(n.value) for n in leaves}
        small = {*marks, "m"} if marks else set()
        named = all(
            n.op in ("symbol", "indexed", "text") and (n.value.isupper() or n.value in small)
            for n in leaves
        )
        return left if named else None  # AB = 5, |AB| = 5, m∠ABC = 5: several letters, one name
    return None


def _leaves(node: Node) -> list[Node]:
    if not node.args or node.op == "indexed":
        return [node]
    return [leaf for arg in node.args for leaf in _leaves(arg)]


def _assigned(node: Node) -> Node | None:
    """The value of an assignment, the node itself where it is not a relation, None for the rest."""
    if node.op != "relation":
        return node
    if _label(node) is not None:
        return node.args[-1]
    return node.args[-1] if node.value == ("=",) and not symbols(node) else None


def _false_chain(node: Node) -> bool:
    """Whether a computation written as a chain, 2 + 3 = 5, does not hold."""
    if set(node.value) != {"="} or symbols(node) or any(map(_wordlike, node.args)):
        return False
    try:
        return not all(map(same, node.args, node.args[1:]))
    except NoValue:
        return False


def _wordlike(node: Node) -> bool:
    return node.op in ("text", "unit", "constant") or any(map(_wordlike, node.args))


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


def _inequality(node: Node) -> bool:
    return node.op == "relation" and "=" not in node.value


def _same_inequalities(one: Node, two: Node) -> bool:
    """Two lists of inequalities of one variable that allow the same values."""
    nodes = (*one.args, *two.args)
    if not all(map(_inequality, nodes)):
        return False
    if len(frozenset().union(*map(symbols, nodes))) != 1:
        return False
    return same_pieces(pieces(one), pieces(two))
