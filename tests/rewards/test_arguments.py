"""Changes that programs make to the arguments of a test."""

from __future__ import annotations

import collections
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.rewards.code.inside import codec
from groupwise.rewards.code.sandbox import Limits, Suite, Verdict, run_tests, unavailable

LIMITS = Limits(seconds=20.0)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

CARRIED = {
    "a list beside a tuple that the program has changed": (
        """
        class Pair(tuple): pass

        kept = []

        def make():
            kept.append(Pair(([],)))
            return kept[0]

        def grow():
            kept[0][0].append([7])

        def second(pair, one, two):
            return one
        """,
        """
        pair, one, two = make(), [5], [6]
        grow()
        assert second(pair, one, two) is one and (one, two) == ([5], [6])
        assert second((pair, [pair, one]), one, two) is one and (one, two) == ([5], [6])
        """,
    ),
    "one object in several places": (
        """
        def f(a, b, grid):
            a.append(1)
            grid[0][0] = 7
            return a is b, len(b), grid[1]

        def g(deque_, list_, dict_):
            list_[0].append(4)
            dict_['k'].add(5)
            return len(deque_), list_[0] is deque_, dict_['k'] is dict_['l']
        """,
        """
        from collections import deque
        a, row = [], [0, 0]
        grid = [row] * 3
        same, count, second = f(a, a, grid)
        assert same and count == 1 and a == [1] and second == [7, 0]
        assert grid == [[7, 0]] * 3 and grid[2] is row
        d, s = deque([3]), {1}
        assert g(d, [d, 'x'], {'k': s, 'l': s}) == (2, True, True)
        assert d == deque([3, 4]) and s == {1, 5}
        """,
    ),
    "containers of collections": (
        """
        def f(d, c, o):
            d.appendleft(1)
            c['b'] += 2
            o.move_to_end('x')
        """,
        """
        from collections import Counter, OrderedDict, deque

        d, c, o = deque([2, 3], maxlen=3), Counter('ab'), OrderedDict(x=1, y=2)
        f(d, c, o)
        assert d == deque([1, 2, 3]) and d.maxlen == 3 and c == Counter(a=1, b=3)
        assert list(o) == ['y', 'x'] and type(c) is Counter
        """,
    ),
    "a list in a tuple": (
        """
        def f(pair, deep):
            pair[0].append(2)
            deep[0][1][0] = 9
        """,
        """
        inner, low = [1], [3]
        pair, deep = (inner, 'x'), [(1, low)]
        first = deep[0]
        f(pair, deep)
        assert pair == ([1, 2], 'x') and inner == [1, 2] and low == [9] and deep == [(1, [9])]
        assert deep[0] is first
        """,
    ),
    "a call that raises": (
        """
        def f(xs, by):
            xs.append(1)
            by['k'] = xs
            raise KeyError('x')
        """,
        """
        xs, by = [], {}
        try:
            f(xs, by)
            assert False
        except KeyError as error:
            assert error.args == ('x',)
        assert xs == [1] and by == {'k': [1]}
        """,
    ),
    "iterators of the test": (
        """
        def f(xs):
            return [x * 2 for x in xs]

        def first(xs):
            return next(iter(xs))

        def same(xs):
            return xs
        """,
        """
        assert f(x + 1 for x in range(3)) == [2, 4, 6] and f(iter([])) == []
        it = iter([1, 2, 3])
        assert first(it) == 1 and next(it) == 2 and f(map(str, [1])) == ['11']
        assert list(same(zip('ab', [1, 2]))) == [('a', 1), ('b', 2)]
        """,
    ),
    "identity of what is inside": (
        """
        def first(xs):
            return xs[0]

        def pop(xs):
            x = xs.pop()
            x.append(7)
            return x

        def get(by, pair):
            return by['k'][0] if pair is None else pair[1]
        """,
        """
        xs = [[1], [2]]
        a, b = xs
        assert first(xs) is a and first([a]) is a
        assert pop(xs) is b and b == [2, 7] and xs == [[1]]
        inner = {}
        assert get({'k': [inner]}, None) is inner and get({}, (1, inner)) is inner
        """,
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_the_test_sees_what_a_call_changes(name: str) -> None:
    program, test = map(textwrap.dedent, CARRIED[name])
    [outcome] = run_tests(program, Suite(sources=[test]), limits=LIMITS)
    assert outcome.verdict is Verdict.PASSED, outcome


@pytest.mark.parametrize("place", ["-1", "1", "True", "None", "(0,)"])
def test_a_program_names_no_argument_that_it_was_not_given(place: str) -> None:
    program = f"""
        import sys
        rpc = sys.modules['groupwise.rewards.code.inside.rpc']
        send = rpc.Server.send
        def lie(self, kind, value, changed):
            if value == 'lie':
                value, changed = [3], ({place}, None)
            send(self, kind, value, changed)
        rpc.Server.send = lie
        def f(x):
            return 'lie'
        """
    test = "secret = [3]\nassert f([1]) is not secret and f([1]) == 'x'"
    [outcome] = run_tests(textwrap.dedent(program), Suite(sources=[test]), limits=LIMITS)
    assert outcome.verdict in (Verdict.FAILED, Verdict.ERROR), outcome


SHARED = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers(0, 3), inner, max_size=3)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.dictionaries(st.integers(0, 3), inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=2).flatmap(lambda two: st.just((two, [two, two], {0: two})))
        | st.just({1}).map(lambda one: [one, (one, [one])])
    ),
    max_leaves=12,
)


def shape(value: Any, seen: dict[int, int]) -> Any:
    """A value with its containers numbered, so that two with equal contents differ by what is one
    object."""
    kind = type(value).__name__
    if not isinstance(value, list | dict | set | bytearray | tuple | collections.deque):
        return value
    if not isinstance(value, tuple):
        if id(value) in seen:
            return kind, seen[id(value)]
        seen[id(value)] = len(seen)
    parts = value.items() if isinstance(value, dict) else value
    return kind, [shape(part, seen) for part in parts]


@given(value=SHARED)
def test_what_is_one_object_stays_one(value: Any) -> None:
    message = ("call", (value, value), {})
    out: list[bytes] = []
    codec.encode(message, None, out, {})
    decoded = codec.decode_message(b"".join(out), None, [])
    assert shape(decoded, {}) == shape(message, {})
    if b"r" in out:
        with pytest.raises(codec.Malformed):
            codec.decode_message(b"".join(out), None)


def test_a_reference_to_what_was_not_sent_is_refused() -> None:
    for number in (0, 1, 2**32 - 1):
        sent = b"t" + (3).to_bytes(4, "big") + b"NNr" + number.to_bytes(4, "big")
        with pytest.raises(codec.Malformed):
            codec.decode_message(sent, None, [])
