"""Objects of every kind travel between programs and tests."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from groupwise.rewards.code.inside.codec import DERIVED
from groupwise.rewards.code.sandbox import Limits, Suite, Verdict, run_tests, unavailable

LIMITS = Limits(seconds=20.0)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

CARRIED = {
    "namedtuple attr": (
        """
        from collections import namedtuple
        P = namedtuple('P', 'x y')

        def f():
            return P(1, 2)

        def g(p):
            return p.x + p.y
        """,
        """
        assert f().x == 1 and f() == (1, 2)
        assert isinstance(f(), P) and isinstance(f(), tuple)
        assert g(f()) == 3 and P(3, 4).y == 4 and f()._asdict() == {'x': 1, 'y': 2}
        from collections import namedtuple
        Q = namedtuple('Q', 'x')
        assert f() != Q(1)
        """,
    ),
    "enums of builtin values": (
        """
        from enum import Enum, IntEnum, StrEnum

        class Level(IntEnum):
            LOW = 1
            HIGH = 2

        class Color(str, Enum):
            RED = 'red'

        class Kind(StrEnum):
            A = 'a'

        def f():
            return Level.HIGH

        def g(x):
            return x is Level.HIGH

        def colors():
            return [Color.RED, Kind.A]
        """,
        """
        assert f() == 2 and f() + 1 == 3 and f() > 1 and [5, 6, 7][f()] == 7
        assert {2: 'b'}[f()] == 'b'
        assert f() is Level.HIGH and isinstance(f(), int) and isinstance(f(), Level)
        assert f().name == 'HIGH' and repr(f()) == '<Level.HIGH: 2>' and str(f()) == '2' and g(f())
        assert colors() == ['red', 'a'] and str(colors()[0]) == 'Color.RED' and 'e' in colors()[0]
        """,
    ),
    "flags with values": (
        """
        import re
        from enum import IntFlag

        class F(IntFlag):
            A = 1
            B = 2

        def f():
            return F.A | F.B

        def g(x):
            return x is F.A

        def r():
            return re.I | re.M
        """,
        """
        assert f() == 3 and int(f()) == 3 and f() in (3, 4) and [f()] == [3] and f() - 1 == 2
        assert f() == F.A | F.B == F(3) and f() ^ F.A == F.B and f() & 2 == 2 and 4 | F.A == 5
        assert list(f()) == [1, 2] and len(f()) == 2 and F.A in f() and F.B not in F.A
        assert ~F.A == 2 and ~F.A is F.B and ~f() == 0 and not F(0) and g(f() ^ F.B)
        assert (F.A | F.B).name == 'A|B' and isinstance(F.A | F.B, F) and r() == 10
        """,
    ),
    "subclasses that keep the operators": (
        """
        class Id(int):
            def label(self):
                return f'#{int(self)}'

        class Pair(tuple):
            pass

        def f():
            return [Id(7), Pair((1, 2.5)), True]
        """,
        """
        assert f() == [7, (1, 2.5), True] and f()[0].label() == '#7' and f()[2] is True
        """,
    ),
    "copies of what programs return": (
        """
        from enum import StrEnum

        class Kind(StrEnum):
            A = 'a'

        def f():
            return [Kind.A]
        """,
        """
        import copy

        made = f()
        assert copy.deepcopy(made) == ['a'] and copy.copy(made[0]) is made[0]
        """,
    ),
    "lists that change in a tuple": (
        """
        class Pair(tuple):
            pass

        kept = Pair(([], 'sum'))

        def add(x):
            kept[0].append(x)
            return kept

        def same():
            return kept
        """,
        """
        assert add(1) == ([1], 'sum')
        assert add(2) == ([1, 2], 'sum') and same() is same()
        """,
    ),
    "subclasses with operators of their own": (
        """
        class Mod(int):
            def __add__(self, other):
                return Mod((int(self) + int(other)) % 7)

        class Stack(list):
            def push(self, x):
                self.append(x)
        """,
        """
        assert Mod(5) + Mod(4) == Mod(2)
        s = Stack()
        s.push(1)
        assert len(s) == 1 and s.pop() == 1
        """,
    ),
    "Counter": (
        """
        from collections import Counter

        def f(s):
            return Counter(s)
        """,
        """
        from collections import Counter
        assert f('aab') == Counter('aab') == {'a': 2, 'b': 1}
        assert f('aab').most_common(1) == [('a', 2)] and f('aab')['z'] == 0
        """,
    ),
    "defaultdict": (
        """
        from collections import defaultdict

        def f():
            d = defaultdict(list)
            d[1].append(2)
            return d
        """,
        """
        assert f() == {1: [2]}
        assert f()[5] == []
        """,
    ),
    "OrderedDict": (
        """
        from collections import OrderedDict

        def f():
            return OrderedDict([(1, 2), (3, 4)])
        """,
        """
        assert list(f().items()) == [(1, 2), (3, 4)]
        f().move_to_end(1)
        """,
    ),
    "datetime": (
        """
        import datetime

        def f():
            return datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc)

        def g(d):
            return d.year
        """,
        """
        import datetime
        assert f() == datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc)
        assert g(datetime.datetime(2020, 1, 2)) == 2020
        """,
    ),
    "enum": (
        """
        import enum

        class C(enum.Enum):
            R = 1
            G = 2

        def f():
            return C.R
        """,
        """
        assert f() == C.R and f().value == 1 and (f() is C.R) and (f().name == 'R') and (f() != C.G)
        """,
    ),
    "exc args": (
        """
        class E(Exception):

            def __init__(s, a, b):
                super().__init__(a, b)
                s.code = b

        def f():
            raise E('x', 3)
        """,
        """
        try:
            f()
            assert False
        except E as e:
            assert e.args == ('x', 3) and e.code == 3
        """,
    ),
    "ValueError args": (
        """
        def f():
            raise ValueError('bad', 1)

        def g():
            return {}['k']
        """,
        """
        try:
            f()
            assert 0
        except ValueError as e:
            assert e.args == ('bad', 1)
        try:
            g()
        except KeyError as e:
            assert e.args == ('k',) and str(e) == "'k'"
        """,
    ),
    "operators": (
        """
        class V:

            def __init__(s, x):
                s.x = x

            def __add__(s, o):
                return V(s.x + o.x)

            def __eq__(s, o):
                return s.x == o.x

            def __neg__(s):
                return V(-s.x)

            def __abs__(s):
                return V(abs(s.x))

            def __matmul__(s, o):
                return V(7)

            def __and__(s, o):
                return V(1)

            def __hash__(s):
                return 3
        """,
        """
        v = V(3)
        assert (v + V(4)).x == 7
        assert (-v).x == -3
        assert (v @ v).x == 7 and (v & v).x == 1
        assert abs(V(-2)).x == 2 and len({V(1), V(1), V(2)}) == 2
        """,
    ),
    "iadd": (
        """
        class V:

            def __init__(s, x):
                s.x = x

            def __iadd__(s, o):
                s.x += o
                return s
        """,
        """
        v = V(1)
        w = v
        v += 3
        assert v.x == 4 and v is w
        """,
    ),
    "containers": (
        """
        class S:

            def __init__(s):
                s.d = []

            def push(s, x):
                s.d.append(x)

            def __len__(s):
                return len(s.d)

            def __iter__(s):
                return iter(s.d)

            def __getitem__(s, i):
                return s.d[i]

            def __reversed__(s):
                return reversed(s.d)
        """,
        """
        s = S()
        s.push(1)
        s.push(2)
        assert len(s) == 2 and list(s) == [1, 2] and s[0] == 1 and s[0:1] == [1]
        assert list(reversed(s)) == [2, 1] and 2 in s
        """,
    ),
    "context": (
        """
        class C:

            def __enter__(s):
                return 5

            def __exit__(s, *a):
                s.left = a[0] is not None

        def f():
            raise ValueError('x')

        class D(C):

            def __exit__(s, *a):
                return True
        """,
        """
        c = C()
        with c as x:
            assert x == 5
        assert c.left is False
        with D():
            f()
        """,
    ),
    "contextmanager": (
        """
        from contextlib import contextmanager

        @contextmanager
        def c():
            yield 5
        """,
        """
        with c() as x:
            assert x == 5
        """,
    ),
    "inplace nested": (
        """
        def f(m):
            m[0][0] = 9
        """,
        """
        m = [[1], [2]]
        r = m[0]
        f(m)
        assert m == [[9], [2]] and r == [9]
        """,
    ),
    "inplace kw": (
        """
        def f(*, m):
            m.append(1)
        """,
        """
        m = []
        f(m=m)
        assert m == [1]
        """,
    ),
    "identity": (
        """
        def f(x):
            return x

        def g(x):
            x.sort()
            return x

        def h(x):
            return list(x)
        """,
        """
        a = [2, 1]
        assert f(a) is a and g(a) is a and (a == [1, 2]) and (h(a) is not a)
        """,
    ),
    "Path": (
        """
        from pathlib import Path

        def f():
            return Path('a') / 'b'
        """,
        """
        from pathlib import Path
        assert f() == Path('a/b') and f().name == 'b'
        """,
    ),
    "uuid": (
        """
        import uuid

        def f():
            return uuid.UUID(int=3)
        """,
        """
        import uuid
        assert f() == uuid.UUID(int=3)
        """,
    ),
    "del": (
        """
        class D:

            def __init__(s):
                s.a = 1
        """,
        """
        d = D()
        del d.a
        assert not hasattr(d, 'a')
        """,
    ),
    "format": (
        """
        class D:

            def __format__(s, spec):
                return 'D' + spec

            def __str__(s):
                return 'S'
        """,
        """
        assert f'{D():x}' == 'Dx' and str(D()) == 'S'
        """,
    ),
    "test namedtuple": (
        """
        def f(p):
            return p[0]
        """,
        """
        from collections import namedtuple
        P = namedtuple('P', 'x')
        assert f(P(4)) == 4
        """,
    ),
    "coroutine": (
        """
        async def f(x):
            return x + 1
        """,
        """
        import asyncio
        assert asyncio.run(f(1)) == 2

        async def m():
            assert await asyncio.gather(f(1), f(2)) == [2, 3]
        asyncio.run(m())
        """,
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_right_programs_pass_with_objects_of_every_kind(name: str) -> None:
    program, test = map(textwrap.dedent, CARRIED[name])
    [outcome] = run_tests(program, Suite(sources=[test]), limits=LIMITS)
    assert outcome.verdict is Verdict.PASSED, outcome


@pytest.mark.parametrize("base", ["int", "str", "list", "tuple", "dict", "float"])
@pytest.mark.parametrize("method", ["__eq__", "__ne__", "__lt__", "__hash__", "__bool__"])
def test_a_class_of_the_program_decides_no_comparison_with_data(base: str, method: str) -> None:
    """The wrong value of every builtin class, which calls itself equal, smaller and true."""
    program = f"""
        class Any({base}):
            def {method}(self, *other):
                return True
            if {method!r} in ("__eq__", "__lt__"):
                __hash__ = {base}.__hash__
                __gt__ = __ge__ = __le__ = {method}

        def f():
            return Any()
        """
    right = {"int": 5, "str": "a", "list": [1], "tuple": (1,), "dict": {1: 2}, "float": 0.5}[base]
    test = f"""
        r = f()
        assert r == {right!r} or {right!r} == r or not r != {right!r} or {right!r} in [r]
        """
    [outcome] = run_tests(
        textwrap.dedent(program), Suite(sources=[textwrap.dedent(test)]), limits=LIMITS
    )
    assert outcome.verdict in (Verdict.FAILED, Verdict.ERROR), outcome


class Lying:
    """A handle to a flag whose program answers every operator with one value."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self._ask = lambda *_: answer

    def __or__(self, other: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [7, 4, "flag"])
def test_the_operators_of_a_flag_give_the_values_of_integers(answer: Any) -> None:
    flag = DERIVED[int]
    one, two, lie = flag(1), flag(2), flag(5) if answer == "flag" else answer
    one._remote = two._remote = Lying(lie)
    assert one | two == 3 and one | 4 == 5 and 4 | one == 5
    assert ~one == -2, "5 shares a bit with 1, and no other answer is a flag"
