"""Changes that programs make to the arguments of a test."""

from __future__ import annotations

import textwrap

import pytest

from groupwise.rewards.code.sandbox import Limits, Suite, Verdict, run_tests, unavailable

LIMITS = Limits(seconds=20.0)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

CARRIED = {
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
