"""Tests that cannot judge a program in another process are recognised from their source."""

from __future__ import annotations

import pytest

from groupwise.rewards.base import Unjudgeable
from groupwise.rewards.code.sandbox import run_tests, unavailable
from groupwise.rewards.code.suite import Suite, bound_sources, judging, unfit

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

UNFIT = {
    "class B(A): pass\nassert B().f() == 1": "derives a class from A",
    "def t():\n    class B(A, object): pass\n    assert B()\nt()": "derives a class from A",
    "assert type(f()) is Box": "asks for the type Box itself",
    "assert type(f()).__name__ == 'Box' and Box": "asks for the type Box itself",
    "x = f()\nassert x.__class__ == Box": "asks for the type Box itself",
    "with ends() as x:\n    raise KeyError": "raises what ends should end",
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f()\n"
    "assert out.getvalue() == 'x'": "replaces stdout",
    "import io, sys\nsys.stdout = out = io.StringIO()\nf()\nassert out.getvalue()": "stdout",
    "import io, sys\nsys.stdin = io.StringIO('3')\nassert f() == 3": "replaces stdin",
    "from unittest.mock import patch\nwith patch('builtins.input', lambda: '3'):\n"
    "    assert f() == 3": "replaces input",
    "from unittest import mock\n@mock.patch('sys.stdin')\ndef t(m):\n    assert f() == 1\nt()": (
        "replaces stdin"
    ),
    "from unittest.mock import patch\nwith patch('builtins.print') as p:\n    f()\n"
    "p.assert_called_with(3)": "replaces print",
    "import builtins\nbuiltins.input = lambda *a: '3'\nassert f() == 3": "replaces input",
    "import builtins\nfrom unittest.mock import patch\n"
    "with patch.object(builtins, 'input', lambda: '1'):\n    assert f() == 1": "replaces input",
    "input = lambda *a: '3'\nassert f() == 3": "replaces input",
    "def input(*a): return '3'\nassert f() == 3": "replaces input",
}


@pytest.mark.parametrize("source", UNFIT)
def test_what_a_test_does_to_the_program_s_process_is_refused(source: str) -> None:
    with pytest.raises(Unjudgeable, match=UNFIT[source]):
        judging(Suite(sources=[source]))


@pytest.mark.parametrize(
    "source",
    [
        "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()):\n"
        "    r = f()\nassert r == 1",
        "input = [1, 2]\nassert f(input) == 3",
        "def input(x): return x + 1\nassert f(input(1)) == 3",
        "class Box:\n    def input(self): return 1\nassert f(Box().input()) == 3",
        "class Base: pass\nclass Box(Base): pass\nassert f(1) == 3 and Box()",
        "import unittest\nclass T(unittest.TestCase):\n    def t(self): assert f(1)\nT().t()",
        "assert f('builtins.input') == 3",
        "assert type(f()) is list and isinstance(f(), Box)",
        "try:\n    f()\nexcept Wrong as e:\n    assert type(e) is Wrong",
        "try:\n    with lock():\n        raise KeyError\nexcept KeyError:\n    pass\nassert f()",
        "with lock() as x:\n    assert x == 1",
    ],
)
def test_other_tests_are_run(source: str) -> None:
    bound = bound_sources(Suite(sources=[source]))
    assert bound is not None and unfit(bound) == ""


@sandboxed
def test_programs_are_not_run_for_an_unfit_test() -> None:
    for program in ("class A:\n    def f(self): return 1", "syntax error"):
        tests = ("class B(A): pass\nassert B().f() == 1", "assert A().f() == 1")
        outcomes = run_tests(program, Suite(sources=tests, stop=False))
        assert [o.verdict.value for o in outcomes] == ["unjudgeable"] * 2, outcomes
