"""Values of expression trees: numbers and matrices at given points, within strict limits.

Two expressions are the same if they agree at several points to 90 digits. Every operation that
could blow up (powers, factorials, series, trigonometry of huge arguments) is refused beyond a
limit, so that evaluating an answer takes milliseconds whatever it says.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from groupwise.rewards.math.ast import Node
from groupwise.rewards.math.exact import rational, root, same_root

DIGITS = 120
AGREE = 1e-90
NOISE = 1e-105  # relative to the terms of a sum; what is smaller is a rounding error
MAX_STEPS = 20_000
MAX_TERMS = 1_000
MAX_LOG2 = 2.0**40
MAX_ANGLE = 10.0**15
MAX_FACTORIAL = 10.0**8
MAX_BINOMIAL = 10.0**5
MAX_MATRIX = 12
ALIASES = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh",
    "arctanh": "atanh", "arsinh": "asinh", "arcosh": "acosh", "artanh": "atanh", "arccot": "acot",
    "arcsec": "asec", "arccsc": "acsc", "arccoth": "acoth", "arcsech": "asech", "arccsch": "acsch",
    "arcoth": "acoth", "arsech": "asech", "arcsch": "acsch", "Re": "re", "Im": "im", "abs": "fabs",
}  # fmt: skip


class NoValue(ValueError):
    """The expression has no value here, or finding it would cost too much."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix of values."""

    rows: tuple[tuple[Any, ...], ...]


@functools.cache
def context() -> Any:
    """Arithmetic of its own, so that nobody else's precision is touched."""
    from mpmath.ctx_mp import MPContext

    numbers = MPContext()
    numbers.dps = DIGITS
    return numbers


def symbols(node: Node) -> frozenset[str]:
    """Free symbols of a tree; the index of a series is bound."""
    found = {name for arg in node.args for name in symbols(arg)}
    if node.op == "symbol":
        found.add(node.value)
    if node.op == "indexed":
        found.add(node.value + "_")
    if node.op in ("sum", "prod"):
        found.discard(node.value)
    if node.op == "prime":
        found.add("'")
    if node.op == "call":
        found = {name for arg in node.args[1:] for name in symbols(arg)} | {"()"}
    return frozenset(found)


def whole_symbols(node: Node, *, inside: bool = False) -> frozenset[str]:
    """Symbols that only make sense as whole numbers: in factorials, binomials, limits of series."""
    counts = inside or node.op in ("factorial", "binomial")
    found: set[str] = {node.value} if node.op == "symbol" and inside else set()
    for place, arg in enumerate(node.args):
        limits = node.op in ("sum", "prod") and place < 2
        found |= whole_symbols(arg, inside=counts or limits)
    return frozenset(found)


def points(names: frozenset[str], whole: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Five points for the symbols: three positive, one negative, one of mixed signs."""
    ctx = context()
    for index, signs in enumerate(("+", "+", "+", "-", "+-")):
        point: dict[str, Any] = {"": index}
        for place, name in enumerate(sorted(names)):
            fraction = _hashed(f"{name}/{index}")
            value = ctx.mpf(0.3) + 2 * fraction
            if name in whole:
                value = ctx.mpf(3 + (index * 2 + place * 3 + int(7 * fraction)) % 9)
            elif signs == "-" or (signs == "+-" and place % 2):
                value = -value
            point[name] = value
        yield point


def _hashed(name: str) -> Any:
    """A number in [0, 1) that depends on a name only."""
    digest = hashlib.blake2b(name.encode(), digest_size=12).digest()
    return context().mpf(int.from_bytes(digest, "big")) / 2**96


def same_values(left: Node, right: Node) -> bool:
    """Whether two expressions agree at every point where both have a value.

    At points with a negative coordinate complex values are left out: √x·√x is x, and ln x² is
    2 ln x, for the positive x that these are written for.
    """
    names = symbols(left) | symbols(right)
    if not names:
        exact = rational(left), rational(right)
        if None not in exact:
            return exact[0] == exact[1]
        one, two = root(left), root(right)
        if one and two and (equal := same_root(one, two)) is not None:
            return equal
    whole = whole_symbols(left) | whole_symbols(right)
    compared = 0
    for index, point in enumerate(points(names, whole)):
        try:
            one, two = (Evaluation(point).value(node) for node in (left, right))
        except (NoValue, ZeroDivisionError):
            if not names:
                raise
            continue
        if index > 2 and not (_real(one) and _real(two)):
            continue
        if not agree(one, two):
            return False
        compared += 1
        if not names:
            return True
    if not compared:
        raise NoValue("no point where both sides have a value")
    return True


def proportion(left: Node, right: Node) -> Any:
    """The constant c with left = c · right at every point, or None."""
    names = symbols(left) | symbols(right)
    whole = whole_symbols(left) | whole_symbols(right)
    ratio = None
    for point in points(names, whole):
        try:
            one, two = (Evaluation(point).value(node) for node in (left, right))
        except (NoValue, ZeroDivisionError):
            continue
        if isinstance(one, Grid) or isinstance(two, Grid):
            return None
        if one == two == 0:
            continue
        if 0 in (one, two):
            return None
        current = one / two
        if ratio is not None and not agree(current, ratio):
            return None
        ratio = current
    return ratio


def agree(one: Any, two: Any) -> bool:
    """Equal to 90 digits, relative to the larger; matrices cell by cell."""
    if isinstance(one, Grid) or isinstance(two, Grid):
        if not (isinstance(one, Grid) and isinstance(two, Grid)):
            return False
        if [len(r) for r in one.rows] != [len(r) for r in two.rows]:
            return False
        pairs = zip(one.rows, two.rows, strict=True)
        return all(agree(a, b) for r, s in pairs for a, b in zip(r, s, strict=True))
    if one == two:
        return True
    if context().isinf(one) or context().isinf(two):
        return False
    return abs(one - two) <= AGREE * max(abs(one), abs(two))


def _real(value: Any) -> bool:
    if isinstance(value, Grid):
        return all(_real(cell) for row in value.rows for cell in row)
    return abs(context().im(value)) <= AGREE * abs(value)


class Evaluation:
    """The value of trees at one point; counts its steps and stops when there are too many."""

    def __init__(self, point: Mapping[str, Any]) -> None:
        self.point = dict(point)
        self.steps = 0
        self.ctx = context()

    def value(self, node: Node) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise NoValue("too many steps")
        method = getattr(self, "_" + node.op, None)
        if method is None:
            raise NoValue(f"{node.op} has no value")
        return method(node)

    def scalar(self, node: Node) -> Any:
        value = self.value(node)
        if isinstance(value, Grid):
            raise NoValue("a number expected")
        return value

    def _num(self, node: Node) -> Any:
        return self.ctx.mpf(node.value.numerator) / node.value.denominator

    def _decimal(self, node: Node) -> Any:
        return self.ctx.mpf(node.value[0].numerator) / node.value[0].denominator

    def _constant(self, node: Node) -> Any:
        named = {"pi": self.ctx.pi, "e": self.ctx.e, "i": self.ctx.mpc(0, 1)}
        return self.ctx.inf if node.value == "infty" else +named[node.value]

    def _symbol(self, node: Node) -> Any:
        return self.point[node.value]

    def _indexed(self, node: Node) -> Any:
        return self.unknown(f"{node.value}_{self._label(node.args[0])}")

    def _call(self, node: Node) -> Any:
        name = f"{node.args[0].op}{node.args[0].value}"
        return self.unknown(name + "".join(self._label(a) for a in node.args[1:]))

    def _prime(self, node: Node) -> Any:
        return self.unknown("'" + self._label(node.args[0]))

    def unknown(self, name: str) -> Any:
        """A number for x₂, f(3) or f′, whose value only depends on what they are applied to."""
        return _hashed(f"{name}/{self.point.get('')}") + 0.5

    def _label(self, node: Node) -> str:
        if node.op == "text":
            return node.value
        return "|" + self.ctx.nstr(self.value(node), 15)

    def _neg(self, node: Node) -> Any:
        return _times(-1, self.value(node.args[0]))

    def _add(self, node: Node) -> Any:
        one, two = map(self.value, node.args)
        if isinstance(one, Grid) and isinstance(two, Grid):
            if [len(r) for r in one.rows] != [len(r) for r in two.rows]:
                raise NoValue("matrices of different shapes")
            pairs = zip(one.rows, two.rows, strict=True)
            return Grid(
                tuple(tuple(_plus(a, b) for a, b in zip(r, s, strict=True)) for r, s in pairs)
            )
        if isinstance(one, Grid) or isinstance(two, Grid):
            raise NoValue("a matrix plus a number")
        return _plus(one, two)

    def _mul(self, node: Node) -> Any:
        return _times(self.value(node.args[0]), self.value(node.args[1]))

    def _div(self, node: Node) -> Any:
        bottom = self.scalar(node.args[1])
        if bottom == 0:
            raise NoValue("division by zero")
        return _times(1 / bottom, self.value(node.args[0]))

    def _unit(self, node: Node) -> Any:
        return self.value(node.args[0])

    def _percent(self, node: Node) -> Any:
        return self.scalar(node.args[0]) / 100

    def _degree(self, node: Node) -> Any:
        return self.scalar(node.args[0]) * self.ctx.pi / 180

    def _pow(self, node: Node) -> Any:
        base, exponent = self.value(node.args[0]), self.scalar(node.args[1])
        if isinstance(base, Grid):
            count = int(exponent) if exponent in (2, 3, 4, 5, 6) else 0
            if not count:
                raise NoValue("this power of a matrix is not read")
            return functools.reduce(_times, [base] * count)
        return self.power(base, exponent)

    def power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            if self.ctx.re(exponent) > 0:
                return self.ctx.mpf(0)
            if exponent == 0:
                return self.ctx.mpf(1)
            raise NoValue("division by zero")
        if self.ctx.isinf(base) or self.ctx.isinf(exponent):
            raise NoValue("infinity in a power")
        if abs(exponent) * (abs(self.ctx.log(abs(base), 2)) + 1) > MAX_LOG2:
            raise NoValue("power too large")
        if self.ctx.im(base) == 0 and self.ctx.im(exponent) == 0 and self.ctx.re(base) < 0:
            odd = _odd_root(exponent)
            if odd:
                return odd * self.ctx.power(-base, exponent)
        return self.ctx.power(base, exponent)

    def _factorial(self, node: Node) -> Any:
        count = self.scalar(node.args[0])
        if abs(count) > MAX_FACTORIAL or (self.ctx.im(count) == 0 and count < 0):
            raise NoValue("factorial too large")
        return self.ctx.factorial(count)

    def _binomial(self, node: Node) -> Any:
        top, bottom = map(self.scalar, node.args)
        if abs(top) > MAX_BINOMIAL or abs(bottom) > MAX_BINOMIAL:
            raise NoValue("binomial too large")
        return self.ctx.binomial(top, bottom)

    def _abs(self, node: Node) -> Any:
        value = self.value(node.args[0])
        return self.determinant(value) if isinstance(value, Grid) else abs(value)

    _norm = _abs

    def _floor(self, node: Node) -> Any:
        return self.ctx.floor(self._bounded(self.scalar(node.args[0])))

    def _ceiling(self, node: Node) -> Any:
        return self.ctx.ceil(self._bounded(self.scalar(node.args[0])))

    def _bounded(self, value: Any) -> Any:
        if abs(value) > MAX_ANGLE:
            raise NoValue("argument too large")
        return value

    def _matrix(self, node: Node) -> Grid:
        height, width = node.value
        if height > MAX_MATRIX or width > MAX_MATRIX:
            raise NoValue("matrix too large")
        cells = [self.scalar(arg) for arg in node.args]
        return Grid(tuple(tuple(cells[i * width : (i + 1) * width]) for i in range(height)))

    def determinant(self, grid: Grid) -> Any:
        if len(grid.rows) != len(grid.rows[0]):
            raise NoValue("a determinant needs a square matrix")
        return self.ctx.det(self.ctx.matrix([list(row) for row in grid.rows]))

    def _sum(self, node: Node) -> Any:
        return self._series(node, lambda a, b: a + b, self.ctx.mpf(0))

    def _prod(self, node: Node) -> Any:
        return self._series(node, lambda a, b: a * b, self.ctx.mpf(1))

    def _series(self, node: Node, join: Any, start: Any) -> Any:
        low, high = (self._bounded(self.scalar(arg)) for arg in node.args[:2])
        if low != self.ctx.floor(low) or high != self.ctx.floor(high) or high - low > MAX_TERMS:
            raise NoValue("limits of a series")
        outer = self.point.get(node.value)
        for index in range(int(low), int(high) + 1):
            self.point[node.value] = self.ctx.mpf(index)
            start = join(start, self.scalar(node.args[2]))
        if outer is not None:
            self.point[node.value] = outer
        return start

    def _function(self, node: Node) -> Any:
        name: str = node.value[0]
        indexed: bool = node.value[1]
        if name == "det":
            value = self.value(node.args[0])
            return self.determinant(value) if isinstance(value, Grid) else value
        args = [self.scalar(arg) for arg in node.args]
        if name == "sqrt":
            return self.power(args[0], 1 / args[1] if indexed else self.ctx.mpf(0.5))
        if name in ("log", "ln", "lg"):
            return self._logarithm(name, args, indexed)
        if name in ("gcd", "lcm", "max", "min"):
            return self._several(name, args)
        if name == "exp":
            return self.power(+self.ctx.e, args[0])
        if len(args) != 1 or name == "deg":
            raise NoValue(f"arguments of {name}")
        value = getattr(self.ctx, ALIASES.get(name, name))(self._bounded(args[0]))
        return value if abs(value) > NOISE else value * 0

    def _logarithm(self, name: str, args: list[Any], indexed: bool) -> Any:
        if args[0] == 0:
            raise NoValue("logarithm of zero")
        if not indexed:
            return self.ctx.log10(args[0]) if name == "lg" else self.ctx.log(args[0])
        if args[1] in (0, 1):
            raise NoValue("base of a logarithm")
        return self.ctx.log(args[0]) / self.ctx.log(args[1])

    def _several(self, name: str, args: list[Any]) -> Any:
        import math

        if name in ("max", "min"):
            return max(args) if name == "max" else min(args)
        whole = [int(self._bounded(arg)) for arg in args if arg == self.ctx.floor(arg)]
        if len(whole) != len(args):
            raise NoValue(f"arguments of {name}")
        return self.ctx.mpf(math.gcd(*whole) if name == "gcd" else math.lcm(*whole))


def _plus(one: Any, two: Any) -> Any:
    """A sum; what cancels down to rounding errors is zero, so that nothing else need be.

    Raises:
        NoValue: one term is lost in the rounding of the other.
    """
    total = one + two
    small, large = sorted((abs(one), abs(two)))
    if 0 < small < NOISE * large and not context().isinf(large):
        raise NoValue("a sum of terms too far apart")
    return total if abs(total) > NOISE * large else total * 0


def _times(one: Any, two: Any) -> Any:
    if isinstance(one, Grid) and isinstance(two, Grid):
        if len(one.rows[0]) != len(two.rows):
            raise NoValue("matrices of shapes that do not multiply")
        columns = list(zip(*two.rows, strict=True))
        return Grid(
            tuple(
                tuple(sum(a * b for a, b in zip(row, column, strict=True)) for column in columns)
                for row in one.rows
            )
        )
    if isinstance(one, Grid):
        return Grid(tuple(tuple(two * cell for cell in row) for row in one.rows))
    if isinstance(two, Grid):
        return Grid(tuple(tuple(one * cell for cell in row) for row in two.rows))
    return one * two


def _odd_root(exponent: Any) -> int:
    """Sign of a negative number to the power p/q with odd q ≤ 9, 0 for other exponents.

    ∛(-8) is -2 in school and in answers; the principal complex root is not what is meant.
    """
    for bottom in (3, 5, 7, 9):
        scaled = exponent * bottom
        nearest = context().nint(scaled)
        if abs(scaled - nearest) < 1e-30 and nearest != 0 and abs(nearest) < 1000:
            return -1 if int(nearest) % 2 else 1
    return 0


def as_node(value: int | Fraction) -> Node:
    """A literal."""
    return Node("num", (), Fraction(value))
