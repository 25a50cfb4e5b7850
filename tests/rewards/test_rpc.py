"""Objects of a program that claim to be the right answer."""

from __future__ import annotations

import textwrap

import pytest

from groupwise.rewards.code.sandbox import Limits, Suite, Verdict, run_tests, unavailable

LIMITS = Limits(seconds=20.0)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

NOT_BELIEVED = {
    "abs": (
        """
        class Z:

            def __sub__(s, o):
                return s

            def __rsub__(s, o):
                return s

            def __abs__(s):
                return 0

            def __lt__(s, o):
                return True

            def __neg__(s):
                return 0

            def __float__(s):
                return 0.0

            def __round__(s, n=0):
                return 0

        def f():
            return Z()
        """,
        """
        assert abs(f() - 3) < 1e-06
        """,
    ),
    "round": (
        """
        class Z:

            def __sub__(s, o):
                return s

            def __round__(s, n=0):
                return 0

        def f():
            return Z()
        """,
        """
        assert round(f() - 3, 5) == 0
        """,
    ),
    "contains": (
        """
        class Z:

            def __contains__(s, o):
                return True

        def f():
            return Z()
        """,
        """
        assert 3 in f()
        """,
    ),
    "suppress": (
        """
        class Z:

            def __enter__(s):
                return s

            def __exit__(s, *a):
                return True

            def f(s):
                return 1
        """,
        """
        with Z() as z:
            assert z.f() == 2
        """,
    ),
    "suppress2": (
        """
        class Z:

            def __enter__(s):
                return s

            def __exit__(s, *a):
                return True

            def f(s):
                return []
        """,
        """
        with Z() as z:
            z.f()[0]
        """,
    ),
    "hash": (
        """
        class Z:

            def __hash__(s):
                return hash(5)

            def __eq__(s, o):
                return True

        def f():
            return Z()
        """,
        """
        assert f() in {5}
        """,
    ),
    "named": (
        """
        from collections import namedtuple

        class P(tuple):
            _fields = ('count', 'index', '__eq__')

            def __eq__(s, o):
                return True

        def f():
            return P((1, 2, 3))
        """,
        """
        assert f() == (4, 5, 6)
        """,
    ),
    "dd": (
        """
        from collections import defaultdict

        class defaultdict(defaultdict):
            __module__ = 'collections'

            def __eq__(s, o):
                return True

            def items(s):
                return []

        def f():
            return defaultdict(int)
        """,
        """
        assert f() == {1: 2}
        """,
    ),
    "slot": (
        """
        class E(Exception):
            pass

        def f():
            e = E()
            e.of_program = 1
            e.args = (1,)
            e.__class__ = E
            raise e
        """,
        """
        try:
            f()
        except E as e:
            assert e.args == (2,)
        """,
    ),
    "self arg": (
        """
        def f(x):
            return x
        """,
        """
        a = [1]
        assert f(a) == [2]
        """,
    ),
    "ident": (
        """
        def f(x):
            return list(x)
        """,
        """
        a = [1]
        assert f(a) is a
        """,
    ),
}


@pytest.mark.parametrize("name", NOT_BELIEVED)
def test_objects_that_claim_to_be_right_do_not_pass(name: str) -> None:
    program, test = map(textwrap.dedent, NOT_BELIEVED[name])
    [outcome] = run_tests(program, Suite(sources=[test]), limits=LIMITS)
    assert outcome.verdict in (Verdict.FAILED, Verdict.ERROR), outcome
