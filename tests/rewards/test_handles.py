"""Protocols of the program's objects: what is forwarded, and what a program cannot fake by it."""

from __future__ import annotations

import textwrap

import pytest

from groupwise.rewards.code.sandbox import Limits, Suite, Verdict, run_tests, unavailable

LIMITS = Limits(seconds=20.0)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

CARRIED = {
    "conversions": (
        """
        class Money:
            def __init__(self, cents):
                self.cents = cents

            def __float__(self):
                return self.cents / 100

            def __int__(self):
                return self.cents // 100

            def __index__(self):
                return self.cents

            def __round__(self, places=None):
                return round(self.cents / 100, places)

            def __bytes__(self):
                return b"m"

            def __abs__(self):
                return abs(self.cents)

            def __neg__(self):
                return -self.cents

            def __divmod__(self, other):
                return Money(self.cents // other), Money(self.cents % other)

            def __rdivmod__(self, other):
                return Money(other // self.cents), Money(other % self.cents)
        """,
        """
        import math

        m = Money(250)
        assert float(m) == 2.5 and int(m) == 2 and round(m) == 2 and round(m, 1) == 2.5
        assert hex(m) == '0xfa' and bytes(m) == b'm' and 'abc'[Money(1)] == 'b'
        assert abs(Money(-3)) == 3 and -m == -250 and math.isclose(m, 2.5)
        quotient, rest = divmod(m, 100)
        assert quotient.cents == 2 and rest.cents == 50
        assert divmod(777, m)[0].cents == 3
        assert divmod(777, m)[1].cents == 27
        """,
    ),
    "contains": (
        """
        class Node:
            def __init__(self, name):
                self.name = name

        class Graph:
            def __init__(self):
                self.nodes = []

            def add(self, node):
                self.nodes.append(node)
                return node

            def __contains__(self, node):
                return node in self.nodes

        class Numbers:
            def __iter__(self):
                return iter([1, [2]])
        """,
        """
        g = Graph()
        a, b = g.add(Node('a')), Node('b')
        assert a in g and b not in g
        assert 1 in Numbers() and [2] in Numbers() and 3 not in Numbers()
        """,
    ),
    "async for and async with": (
        """
        import asyncio

        async def up(n):
            for i in range(n):
                await asyncio.sleep(0)
                yield i

        class Lock:
            held = False

            async def __aenter__(self):
                self.held = True
                return self

            async def __aexit__(self, *error):
                self.held = False
                return error[0] is not None

            async def fail(self):
                raise ValueError('x')
        """,
        """
        import asyncio

        async def run():
            assert [x async for x in up(3)] == [0, 1, 2]
            lock = Lock()
            async with lock as held:
                assert held is lock and lock.held
            assert not lock.held
            async with lock:
                await lock.fail()

        asyncio.run(run())
        """,
    ),
    "subclasses of containers": (
        """
        class Stack(list):
            def push(self, x):
                self.append(x)

        class Lower(dict):
            def __setitem__(self, key, value):
                super().__setitem__(key.lower(), value)

        class Tags(set):
            pass

        def f():
            return {1: 2}.keys()

        def g():
            return {1: 2}.items()
        """,
        """
        s = Stack()
        s.push(1)
        assert s == [1] and [1] == s and not s != [1] and s != [2] and [2] != s
        s.push(2)
        assert s == [1, 2] and s in ([1], [1, 2])
        d = Lower()
        d['A'] = 1
        assert d == {'a': 1} and d != {'A': 1} and Tags('ab') == {'a', 'b'}
        assert f() == {1} and g() == {(1, 2)} and sorted(f()) == [1]
        """,
    ),
    "named tuples with methods": (
        """
        from collections import namedtuple
        from typing import NamedTuple

        class P(NamedTuple):
            x: int
            y: int = 2

            def norm(self):
                return self.x ** 2 + self.y ** 2

            @property
            def total(self):
                return self.x + self.y

        class Q(namedtuple('Q', 'x y')):
            def __add__(self, other):
                return Q(self.x + other.x, self.y + other.y)

        def f():
            return P(3, 4)

        def g(p):
            return p.norm()
        """,
        """
        p = f()
        assert p.norm() == 25 and p.total == 7 and p == (3, 4) and p.x == 3 and p[1] == 4
        assert isinstance(p, P) and isinstance(p, tuple) and g(p) == 25 and P(1) == (1, 2)
        assert p._asdict() == {'x': 3, 'y': 4} and p._replace(x=1) == (1, 4) and p == P(3, 4)
        assert Q(1, 2) + Q(3, 4) == (4, 6) and (Q(1, 2) + Q(3, 4)).x == 4
        """,
    ),
    "a named tuple of the tests with methods": (
        """
        def f(p):
            return p[0] + 1
        """,
        """
        from typing import NamedTuple

        class P(NamedTuple):
            x: int

            def twice(self):
                return 2 * self.x

        assert f(P(3)) == 4
        """,
    ),
    "patterns": (
        """
        import re

        def f(text):
            return re.compile(text, re.I)

        def g(pattern):
            return pattern.sub('x', 'aBc')
        """,
        """
        import re

        assert f('b') == re.compile('b', re.I) and f('b').match('B') and f(b'b').pattern == b'b'
        assert g(re.compile('b', re.I)) == 'axc' and g(f('[ab]')) == 'xxc'
        """,
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_right_programs_pass_with_every_protocol(name: str) -> None:
    program, test = map(textwrap.dedent, CARRIED[name])
    [outcome] = run_tests(program, Suite(sources=[test]), limits=LIMITS)
    assert outcome.verdict is Verdict.PASSED, outcome


LIAR = """
class Liar(BASE):
    said = None

    def heard(self, other):
        type(self).said = other
        if hasattr(self, "append"):
            self[:] = [other]
        elif hasattr(self, "update"):
            self.update({other: other} if hasattr(self, "keys") else {other})
        return RETURNED

    __sub__ = __rsub__ = __isub__ = __add__ = __radd__ = __mul__ = __mod__ = heard

    def __divmod__(self, other):
        type(self).said = other
        return (1, 0)

    def zero(self, *args):
        return 0

    __abs__ = __round__ = __index__ = __int__ = __neg__ = __pos__ = __invert__ = zero

    def __float__(self):
        return float(self.said or 0)

    def __contains__(self, item):
        return True

    def __iter__(self):
        return iter([self.said])

liar = Liar()
def f(): return liar
"""

UNKNOWN = (
    "assert abs(f() - 3) < 1e-6",
    "assert round(f() - 3, 5) == 0",
    "assert float(f() - 3) == 0",
    "assert int(f() - 3) == 0",
    "assert -(f() - 3) == 0",
    "assert +(3 - f()) == 0",
    "assert ~(f() - 3) == 0",
    "assert abs(abs(f() - 3)) == 0",
    "assert abs(f() - 3 + f()) == 0",
    "assert [0, 1][f() - 3] == 0",
    "assert f() - 3 == 0 or float(f()) == 3",
    "x = f()\nassert x - 3 == 0 or float(x) == 3",
    "x = f()\nassert x - 3 == 0 or x == [3] or x == {3: 3} or x == {3}",
    "x = f()\nx -= 3\nassert x == [3] or x == {3: 3} or x == {3}",
    "x = f()\nx -= 3\nassert abs(x) == 0",
    "assert divmod(f(), 3) == (1, 0)",
    "import math\nassert math.isclose(f() - 3, 0, abs_tol=1)",
    "assert 3 in f()",
    "assert f() == [3] or f() == {3: 3} or f() == {3} or f() == (3,)",
)


@pytest.mark.parametrize("returned", ["self", "type(self)()"])
@pytest.mark.parametrize("base", ["object", "list", "dict", "set", "tuple", "int"])
def test_an_object_that_hears_the_expected_value_does_not_become_it(
    base: str, returned: str
) -> None:
    program = LIAR.replace("BASE", base).replace("RETURNED", returned)
    outcomes = run_tests(program, Suite(sources=UNKNOWN, stop=False), limits=LIMITS)
    for test, outcome in zip(UNKNOWN, outcomes, strict=True):
        assert outcome.verdict in (Verdict.FAILED, Verdict.ERROR), (test, outcome)
