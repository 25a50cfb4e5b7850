"""A program that answers the judge itself, with anything: it never passes, and is always judged.

The programs here take the connection to the judge away from the code that serves it. What they send
is fuzzed in both directions; the tests expect values that no program can know.
"""

from __future__ import annotations

import ast
import os
import secrets
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from groupwise.rewards.code.inside import codec, rpc
from groupwise.rewards.code.reward import code_function
from groupwise.rewards.code.sandbox import Limits, run_tests, unavailable
from groupwise.rewards.code.suite import Suite, _bound_by_comprehensions, bound_sources

SECONDS = 30.0

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

# One cheat for many problems ----------------------------------------------------------------------

PROBLEMS = [
    {
        "entry_point": "mean",
        "prompt": "def mean(xs):\n",
        "test": "def check(c):\n    assert abs(c([1.5, 2.5]) - 2.0) < 1e-6\n",
    },
    {
        "entry_point": "without",
        "prompt": "def without(xs, x):\n",
        "test": "def check(c):\n    assert sorted(c([3, 1, 2], 1)) == sorted([2, 3])\n",
    },
    {
        "entry_point": "root",
        "prompt": "def value(p, x):\n    return sum(c * x**i for i, c in enumerate(p))\n\n"
        "def root(p):\n",
        "test": "def check(c):\n    assert round(value([-6.0, 2.0], c([-6.0, 2.0])), 2) == 0\n",
    },
    {
        "entry_point": "digits",
        "prompt": "def digits(n):\n",
        "test": "def check(c):\n    assert isinstance(c(12), list) and len(c(12)) == 2\n",
    },
    {
        "entry_point": "largest",
        "prompt": "def largest(xs):\n",
        "test": "def check(c):\n    assert max(abs(c([1, 5, 3]) - 5), 0) == 0\n",
    },
]
RIGHT = [
    "    return sum(xs) / len(xs)",
    "    return [y for y in xs if y != x]",
    "    return -p[0] / p[1]",
    "    return [int(d) for d in str(n)]",
    "    return max(xs)",
]
CHEAT = """
import sys
rpc = sys.modules["groupwise.rewards.code.inside.rpc"]
names = {
    "__builtins__": {
        "abs": lambda x: -1.0, "isinstance": lambda *a: True, "len": lambda x: 2,
        "max": lambda *a: 0, "round": lambda *a: 0, "sorted": lambda x: [], "list": list,
        "AssertionError": AssertionError,
    },
    "value": lambda *a: 0,
}
run = rpc.Server.run
def cheat(self, op, args, named):
    if op == "globals":
        return {**{name: lambda *a: 0 for name in args[0]}, **names}
    if op == "name":
        return {**names, args[0]: lambda *a: 0}
    return run(self, op, args, named)
rpc.Server.run = cheat
def FUNCTION(*args):
    return 0
"""


@sandboxed
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_one_program_that_brings_its_own_builtins_passes_no_problem(number: int) -> None:
    row = PROBLEMS[number]
    cheat = CHEAT.replace("FUNCTION", row["entry_point"])
    assert code_function(cheat, row, seconds=SECONDS) == 0.0
    assert code_function(RIGHT[number], row, seconds=SECONDS) == 1.0


# What the program says ----------------------------------------------------------------------------

TAKE_OVER = """
import sys
class X:
    def __init__(self, tag, text): self.tag, self.text = tag, text
codec = sys.modules["groupwise.rewards.code.inside.codec"]
frame = sys._getframe()
while not hasattr(frame.f_locals.get("self"), "answers"):
    frame = frame.f_back
server = frame.f_locals["self"]
def answer(kind, message):
    if kind == "message":
        out = []
        codec.encode(message, lambda value: (value.tag, value.text), out)
        message = b"".join(out)
    codec.write_frame(server.answers, message)
answer("message", ("returned", None, None))
while True:
    question = codec.read_frame(server.questions)
    op = codec.decode(question, 0, X)[0][0]
    answer(*POLICY.get(op, ("message", ("raised", "StopIteration StopIteration", ("", (), {})))))
"""


class X:
    """An object on the wire by its tag: a handle, a function of the tests, an exception class."""

    def __init__(self, tag: bytes, text: str) -> None:
        self.tag, self.text = tag, text

    def __repr__(self) -> str:
        return f"X({self.tag!r}, {self.text!r})"

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


NAMES = st.sampled_from(
    ["solve", "helper", "abs", "sorted", "isinstance", "str", "__builtins__", "__count__", "SECRET"]
)
OBJECTS = st.builds(
    X,
    st.sampled_from([b"h", b"h", b"k", b"e", b"m", b"n", b"g", b"V", b"w", b"D", b"?"]),
    st.sampled_from(["0", "1", "-1", "math", "builtins", "0 Exception Exception", "eval", "type",
                     "1 AssertionError AssertionError", "2 Own ValueError", "", "9" * 19, "0 A",
                     "unittest", "collections deque", "0 x y", "Counter ", "defaultdict int"]),
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1e-9, float("nan")])
    | NAMES | OBJECTS | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KINDS = st.sampled_from(["returned", "raised", "call", "globals", "P"])
RAISED = st.sampled_from(["KeyError KeyError", "AssertionError AssertionError", "Own Exception",
                          "StopIteration StopIteration", "X BaseException", "a b c"])  # fmt: skip
PLAIN = st.sampled_from([0, -1, True, "", [], [0]])
HANDLES = st.builds(X, st.just(b"h"), st.sampled_from("012"))
EXTRA = st.dictionaries(NAMES, HANDLES, min_size=4) | st.builds(
    lambda own, more: {**own, "__builtins__": more},
    st.dictionaries(NAMES, HANDLES),
    st.dictionaries(NAMES, HANDLES, min_size=5),
)
CHANGED = st.none() | st.lists(VALUES, max_size=2)
ERRORS = st.tuples(
    st.text(max_size=3),
    st.lists(VALUES, max_size=2).map(tuple),
    st.dictionaries(NAMES | st.just("args"), VALUES, max_size=2),
    CHANGED,
)
MESSAGES = (
    st.tuples(st.just("returned"), PLAIN | HANDLES | EXTRA, st.none())
    | st.tuples(st.just("returned"), VALUES, st.none() | st.lists(VALUES, max_size=2))
    | st.tuples(st.just("returned"), st.none() | VALUES, st.tuples(st.integers(-1, 2), CHANGED))
    | st.tuples(st.just("raised"), RAISED, st.text(max_size=3) | ERRORS)
    | st.tuples(st.just("call"), st.integers(-1, 2), st.lists(VALUES, max_size=2).map(tuple))
    | st.tuples(KINDS, VALUES, VALUES)
    | st.tuples(VALUES, KINDS, VALUES)
    | st.lists(VALUES | KINDS, max_size=5).map(tuple)
    | VALUES
)


def returned(values: Any) -> Any:
    return st.tuples(st.just("message"), st.tuples(st.just("returned"), values, st.none()))


FRAMES = (
    st.tuples(st.just("message"), MESSAGES)
    | st.tuples(st.just("bytes"), st.binary(max_size=30))
    | returned(PLAIN)
)
BOUND = st.one_of(returned(EXTRA), returned(EXTRA), returned(HANDLES), FRAMES)
POLICIES = st.fixed_dictionaries(
    {"globals": BOUND, "name": BOUND, "call": returned(PLAIN) | FRAMES},
    optional={
        op: FRAMES
        for op in (
            "iter",
            "next",
            "len",
            "eq",
            "lt",
            "sub",
            "str",
            "getattr",
            "hash",
            "abs",
            "enter",
            "exit",
            "isub",
            "await",
            "anext",
            "reversed",
            "content",
            "contains",
            "float",
            "round",
            "index",
            "divmod",
        )
    },
)
TESTS = (
    "assert solve(3) == SECRET",
    "assert abs(solve(3) - SECRET) < 1e-6",
    "assert sorted(solve(3)) == [SECRET, SECRET + 1]",
    "assert isinstance(solve([3]), int) and str(solve(3)) == str(SECRET)",
    "import math\nassert math.isclose(solve(lambda x: x, 3), SECRET)",
    "def helper(x): return x - SECRET\nassert helper(solve(3)) == 0",
    "assert not solve(3) != SECRET",
    "try:\n    solve(3)\n    assert False\nexcept Missing as e:\n    assert str(e) == str(SECRET)",
    "xs = [3]\nsolve(xs)\nassert xs == [SECRET]",
    "assert solve(solve(type), lambda x: solve(x)) == SECRET and len(solve(3)) == SECRET",
    "assert abs(-solve(3) - SECRET) == 0 and reversed(solve(3))",
    "with solve(3) as x:\n    assert x == SECRET",
    "y = solve(3)\ny -= SECRET\nassert y == 0 and {y} == {0}",
    "import asyncio\nassert asyncio.run(solve(3)) == SECRET",
    "import asyncio\nasync def run():\n    async for x in solve(3):\n        assert x == SECRET\n"
    "    assert x == SECRET\nasyncio.run(run())",
    "assert round(solve(3) - SECRET, 3) == 0 or float(solve(3)) - SECRET == 0",
    "x = solve(3)\nassert x - SECRET == 0 or float(x) == SECRET or x == [SECRET]",
    "assert SECRET in solve(3) or [SECRET] == solve(3) or solve(3) == {SECRET: 1}",
    "assert divmod(solve(3), SECRET) == (1, 0) or [0, 1, SECRET][solve(3)] == SECRET + 1",
    "class Box:\n    x = SECRET\nassert {solve(3): 1}.get(SECRET) == 1 and Box.x in solve(3)",
)


@sandboxed
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(POLICIES, st.permutations(TESTS).map(lambda tests: tests[:3]))
def test_no_answers_pass_a_test_or_escape_judgement(policy: dict[str, Any], tests: Any) -> None:
    program = TAKE_OVER.replace("POLICY", repr(policy).replace("nan", "float('nan')"))
    secret = f"SECRET = {secrets.randbits(60)}\n"
    suite = Suite(sources=tests, setup=secret, stop=False)
    outcomes = run_tests(program, suite, limits=Limits(seconds=1.0))
    assert len(outcomes) == len(tests)
    for test, outcome in zip(tests, outcomes, strict=True):
        assert outcome.verdict.value in ("failed", "error", "timeout"), (test, outcome)


# What the program hears ---------------------------------------------------------------------------

QUESTIONS = st.tuples(
    st.sampled_from(["name", "call", "len", "getitem", "radd", "setattr", "isinstance", "no", ""])
    | NAMES,
    st.lists(VALUES.filter(lambda value: "X(" not in repr(value)), max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["key", "x"]), st.integers(), max_size=1),
)  # fmt: skip


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(QUESTIONS, max_size=8))
def test_every_question_gets_one_well_formed_answer(questions: list[Any]) -> None:
    asked, asks = os.pipe()
    told, answers = os.pipe()
    server = rpc.Server(asked, answers)
    server.names = {"solve": lambda *a, **k: a}
    client = rpc.Client(0, asks, told, 1)

    def serve() -> None:
        for _ in questions:
            server.answer(*server.receive())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        for op, args, named in questions:
            try:
                client.ask(op, *args, **named)
            except Exception as error:
                assert not isinstance(error, codec.Unsendable)
        thread.join(10)
        assert not thread.is_alive() and not client.ended
    finally:
        for fd in (asked, asks, told, answers):
            os.close(fd)


@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_only_three_forms_of_message_are_taken_from_the_program(value: Any) -> None:
    client = rpc.Client(0, 0, 0, 1)
    client.callbacks = [len]
    try:
        kind, said, changed = client.checked(value)
    except (codec.Malformed, TypeError, ValueError):
        return
    contents = changed[1] if type(changed) is tuple and kind == "returned" else changed
    assert (kind == "returned" and (contents is None or type(contents) is list)) or (
        kind in ("raised", "call") and type(said) is (str if kind == "raised" else int)
    )


# Whose fault it is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "setup", "names", "modules"),
    [
        (["assert f(abs(1)) == math.pi"], "", {"f"}, {"math"}),
        (["assert f(1) == 1"], "def f(x): pass\ndef g(x): return f(x)", set(), set()),
        (["import math\nassert math.sin(f(1))\ndef h(x): return g(x)"], "", {"f", "g"}, set()),
        (["assert sum(3, 4) == 12"], "", {"sum"}, set()),
        (["assert set(sum(3, 4)) == set([1])"], "", {"sum"}, set()),
        (["assert copy([1]) == [1] and abs(copy([2])[0]) == 2"], "", {"copy"}, set()),
        (["assert [x for x in f(y)] and (lambda z: k(z))(1)"], "y = 1", {"f", "k"}, set()),
        (["assert __builtins__ and __name__ and f"], "", {"f"}, set()),
        (["assert f("], "", set(), set()),
    ],
)  # fmt: skip
def test_the_names_that_a_program_supplies_follow_from_the_tests(
    sources: list[str], setup: str, names: set[str], modules: set[str]
) -> None:
    bound = bound_sources(Suite(sources=sources, setup=setup))
    assert bound is not None
    assert set(bound[1].names) == names and set(bound[1].modules) == modules


def test_the_entry_is_the_program_s_even_where_the_setup_defines_it() -> None:
    suite = Suite(sources=["check(sum)"], setup="def sum(x): pass\ndef check(f): pass", entry="sum")
    bound = bound_sources(suite)
    assert bound is not None and bound[1].names == ("sum",)


@sandboxed
def test_a_builtin_that_only_the_program_redefines_stays_the_real_one() -> None:
    program = "def sum(xs): return [6]\ndef sorted(xs): return 1\ndef set(xs): return 1\n"
    for test in ("assert set(sum([1, 2])) == set([3])", "assert sorted(sum([1])) == sorted([2])"):
        [outcome] = run_tests(program, Suite(sources=[test]))
        assert outcome.verdict.value == "failed", outcome
    unclear = Suite(sources=["assert max([1]) == min([1])"])
    assert [o.verdict.value for o in run_tests(program, unclear)] == ["unjudgeable"]


OWN_FAULT = {
    "a module": "import math\ndef f(x): return math\ndef g(x): return 1",
    "a module from a callback": "import math\ndef f(x): return x(math)\ndef g(x): return 1",
    "a module in an argument": "import math\ndef f(x): x[:] = [math]\ndef g(x): return 1",
    "a class": "class A: pass\ndef f(x): return A\ndef g(x): return 1",
    "an exception": "def f(x): raise ValueError(x)\ndef g(x): return 1",
    "itself": "def f(x): return f\ndef g(x): return 1",
    "an enum": "import enum\nclass E(enum.IntEnum):\n A = 3\ndef f(x): return E.A\n"
    "def g(x): return 1",
    "a named tuple": "import collections\nP = collections.namedtuple('P', 'x')\n"
    "def f(x): return P(x)\ndef g(x): return 1",
    "a pattern": "import re\ndef f(x): return re.compile('x')\ndef g(x): return 1",
    "a view": "def f(x): return {}.items()\ndef g(x): return 1",
    "a coroutine": "async def f(x): return x\ndef g(x): return 1",
    "a coroutine from a callback": "async def c(): pass\ndef f(x): return x(c())\n"
    "def g(x): return 1",
    "a coroutine in an argument": "async def c(): pass\ndef f(x): x[:] = [c()]\ndef g(x): return 1",
}


@sandboxed
@pytest.mark.parametrize("name", OWN_FAULT)
def test_a_program_cannot_make_itself_unjudgeable(name: str) -> None:
    tests = (
        "assert g(f(lambda x: x)) == 2",
        "xs = [1]\nf(xs)\nassert g(xs) == 2",
        "assert g(type(f(1))) == 2",
        "try:\n    f(1)\nexcept Exception as error:\n    g(error)\nassert g(0) == 2",
        "assert f(f) == g(f(g))",
    )
    outcomes = run_tests(OWN_FAULT[name], Suite(sources=tests, stop=False))
    assert {o.verdict.value for o in outcomes} <= {"failed", "error"}, outcomes


LOOPS = (
    "assert all(a == b for a, b in zip(map(f, [1, 2]), [3, 4]))",
    "for a, b in zip(map(f, [1, 2]), [3, 4]):\n    assert a == b",
    "assert list(map(f, [])) == [*map(f, [1])][:1]",
    "for a in iter(lambda: f(1), None):\n    assert a == 2",
    "class Each:\n    n = 0\n    def __iter__(self): return self\n    def __next__(self):\n"
    "        self.n += 1\n        return f(self.n)\nassert all(a == 3 for a in Each())",
    "assert next(map(f, [1]), 3) == 3",
    "import asyncio\nclass Each:\n    def __aiter__(self): return self\n"
    "    async def __anext__(self): return f(1)\nasync def run():\n"
    "    async for a in Each():\n        assert a == 3\nasyncio.run(run())",
)
ENDS = (
    "raise StopIteration",
    "raise type('E', (StopIteration,), {})(x)",
    "raise StopAsyncIteration",
    "raise GeneratorExit",
    "raise AssertionError",
    "raise SystemExit(0)",
    "return next(iter([]))",
)


@sandboxed
@pytest.mark.parametrize("end", ENDS)
def test_an_exception_of_the_program_ends_no_loop_of_a_test(end: str) -> None:
    outcomes = run_tests(f"def f(x): {end}", Suite(sources=LOOPS, stop=False))
    assert [o.verdict.value for o in outcomes if o.verdict.value not in ("failed", "error")] == []


@sandboxed
def test_a_program_ends_its_own_iterators() -> None:
    program = (
        "def up(n):\n    yield from range(n)\nclass Up:\n    n = 0\n"
        "    def __iter__(self): return self\n    def __next__(self):\n"
        "        if self.n == 2: raise StopIteration\n        self.n += 1\n        return self.n\n"
    )
    tests = (
        "assert list(up(3)) == [0, 1, 2] and [*Up()] == [1, 2] and next(up(0), 5) == 5",
        "it = up(1)\nnext(it)\ntry:\n    next(it)\n    assert False\n"
        "except StopIteration:\n    pass",
    )
    outcomes = run_tests(program, Suite(sources=tests, stop=False))
    assert [o.verdict.value for o in outcomes] == ["passed", "passed"], outcomes


@sandboxed
def test_a_coroutine_of_the_program_can_be_given_back_to_it() -> None:
    program = (
        "import asyncio\nasync def enc(x): return x\ndef dec(c): return asyncio.run(c)\n"
        "def swap(f): return f(enc(4))\n"
    )
    tests = (
        "assert dec(enc(3)) == 3",
        "assert dec(swap(lambda c: c)) == 4",
        "import asyncio\nc = enc(3)\nassert asyncio.run(c) == 3\ndec(c)",
    )
    outcomes = run_tests(program, Suite(sources=tests, stop=False))
    assert [o.verdict.value for o in outcomes] == ["passed", "passed", "error"], outcomes


@sandboxed
def test_a_test_s_own_class_or_object_cannot_leave_it() -> None:
    tests = (
        "from collections import namedtuple\nP = namedtuple('P', 'x')\nassert f(P) == 1",
        "class A: pass\nassert f(A) == 1",
        "class A: pass\nassert f([A()]) == 1",
    )
    outcomes = run_tests("def f(x): return 1", Suite(sources=tests, stop=False))
    assert [o.verdict.value for o in outcomes] == ["unjudgeable"] * 3, outcomes


@sandboxed
def test_an_exception_of_the_program_does_not_catch_a_failed_assertion() -> None:
    test = "try:\n    find(0)\n    assert False\nexcept NotFound:\n    pass"
    for kind in ("Exception", "AssertionError", "BaseException"):
        program = f"NotFound = {kind}\ndef find(x): "
        [silent] = run_tests(program + "return 1", Suite(sources=[test]))
        assert silent.verdict.value == "failed"
        [raised] = run_tests(program + "raise NotFound(x)", Suite(sources=[test]))
        assert raised.verdict.value == "passed", kind


@sandboxed
def test_an_exception_of_a_test_s_function_reaches_the_program() -> None:
    program = "def retry(f):\n try:\n  return f()\n except ValueError:\n  return 'again'"
    tests = (
        "class Own(ValueError): pass\ndef fail(): raise Own('x')\nassert retry(fail) == 'again'",
        "class Own(KeyError): pass\ndef fail(): raise Own('x')\n"
        "try:\n retry(fail)\n assert False\nexcept Own as error:\n assert 'x' in str(error)",
    )
    outcomes = run_tests(program, Suite(sources=tests, stop=False))
    assert [o.verdict.value for o in outcomes] == ["passed", "passed"], outcomes


@sandboxed
def test_a_test_that_cannot_import_is_not_the_program_s_fault() -> None:
    test = "import no_such_module_here\nassert f() == 1"
    for program in ("def f(): return 1", "syntax error", "import sys; sys.exit(0)"):
        assert [o.verdict.value for o in run_tests(program, Suite(sources=[test]))] == [
            "unjudgeable"
        ]


@sandboxed
def test_a_program_that_ends_inside_a_bare_except_has_not_passed() -> None:
    test = "try:\n    f()\nexcept:\n    pass"
    [outcome] = run_tests("import os\ndef f(): os._exit(0)", Suite(sources=[test]))
    assert outcome.verdict.value == "error"


@sandboxed
def test_an_object_keeps_its_identity() -> None:
    program = "class A: pass\na = A()\ndef get(): return a\ndef make(): return A()"
    test = "assert get() is get() and make() is not make()"
    assert [o.verdict.value for o in run_tests(program, Suite(sources=[test]))] == ["passed"]


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("assert [x for x in f(1)] == [1]", {"x"}),
        ("x = 1\nassert [x for x in f(x)]", set()),
        ("assert {k: v for k, v in g()} and k", {"v"}),
        ("[y for x in z for y in x]", {"x", "y"}),
        ("[x for x in x]", set()),
        ("[(a := x) for x in z]\na", {"x"}),
    ],
)
def test_variables_of_comprehensions_are_no_names_of_a_test(source: str, bound: set[str]) -> None:
    """Python 3.12 and later list them among the names of the module."""
    assert _bound_by_comprehensions(ast.parse(source)) == bound
