"""What crosses the line between tests and program, and whose fault is what."""

from __future__ import annotations

import os
import platform
import resource
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import UsageError
from groupwise.rewards.code import (
    sandbox,
    seccomp,
)
from groupwise.rewards.code.inside import codec
from groupwise.rewards.code.sandbox import (
    Limits,
    Outcome,
    SandboxError,
    Suite,
    Verdict,
    run_inputs,
    run_tests,
    unavailable,
)

LIMITS = Limits(seconds=20.0)

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")


def verdicts(program: str, *tests: str, setup: str = "", stop: bool = False) -> list[str]:
    sources = [textwrap.dedent(test) for test in tests]
    suite = Suite(sources=sources, setup=textwrap.dedent(setup), stop=stop)
    return [o.verdict.value for o in run_tests(textwrap.dedent(program), suite, limits=LIMITS)]


# Values -------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]))
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=20,
)


def refuse(*what: object) -> Any:
    raise AssertionError(what)


@given(plain)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    out: list[bytes] = []
    codec.encode(value, refuse, out)
    data = b"".join(out)
    back, end = codec.decode(data, 0, refuse)
    assert back == value and type(back) is type(value) and end == len(data)
    assert repr(back) == repr(value)  # tells 1, 1.0 and True apart at any depth


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_never_become_code(data: bytes) -> None:
    loaded: list[tuple[bytes, str]] = []
    try:
        value, _ = codec.decode(data, 0, lambda tag, text: loaded.append((tag, text)))
    except (codec.Malformed, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return
    assert not callable(value) or isinstance(value, type)


@sandboxed
def test_value_types_of_the_standard_library_arrive_as_values() -> None:
    program = """
        from array import array
        from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
        from datetime import date, timedelta
        from decimal import Decimal
        from fractions import Fraction
        P = namedtuple("P", "x y")
        def made():
            return [Counter("aab"), OrderedDict(a=1), defaultdict(int, b=2), deque([1, 2]),
                    P(1, 2), date(2020, 1, 2), timedelta(3), Decimal("1.50"), Fraction(1, 3),
                    array("i", [1]), range(3), {1, 2}, frozenset({3}), b"x", 1 << 100, 2j]
        def same(x): return x
        """
    test = """
        from array import array
        from collections import deque
        from datetime import date, timedelta
        from decimal import Decimal
        from fractions import Fraction
        expected = [{"a": 2, "b": 1}, {"a": 1}, {"b": 2}, deque([1, 2]), (1, 2), date(2020, 1, 2),
                    timedelta(3), Decimal("1.5"), Fraction(1, 3), array("i", [1]), range(3),
                    {1, 2}, frozenset({3}), b"x", 1 << 100, 2j]
        assert made() == expected, made()
        assert same(expected) == expected
        assert same(int) is int and same(deque) is deque
        """
    assert verdicts(program, test) == ["passed"]


# Objects that stay on their side ------------------------------------------------------------------


@sandboxed
def test_objects_of_the_program_can_be_used_as_usual() -> None:
    program = """
        class Node:
            def __init__(self, value):
                self.value, self.next = value, None
        class Vector:
            def __init__(self, x): self.x = x
            def __eq__(self, other): return self.x == other.x
            def __add__(self, other): return Vector(self.x + other.x)
            def __mul__(self, k): return Vector(self.x * k)
            def __len__(self): return 3
            def __getitem__(self, i): return self.x * i
            def __repr__(self): return f"V{self.x}"
        def total(node):
            return node.value + (total(node.next) if node.next else 0)
        def naturals():
            n = 0
            while True:
                yield n
                n += 1
        """
    use = """
        head = Node(1)
        head.next = Node(2)
        assert total(head) == 3 and head.next.value == 2
        assert isinstance(head, Node) and not isinstance(head, Vector) and not isinstance(3, Node)
        assert Vector(1) + Vector(2) == Vector(3) and Vector(2) * 2 == Vector(4)
        assert Vector(1) != Vector(2) and not Vector(1) == 1
        assert len(Vector(1)) == 3 and Vector(5)[2] == 10 and repr(Vector(7)) == "V7"
        assert [n for n, _ in zip(naturals(), range(3))] == [0, 1, 2]
        assert [Node(1)] != [Node(1)]
        """
    assert verdicts(program, use) == ["passed"]


@sandboxed
def test_arguments_changed_in_place_are_changed_in_the_test() -> None:
    program = """
        def sort(xs, seen, names):
            xs.sort(); seen.add(9); names["a"] = [1]
        """
    test = """
        xs, seen, names, same = [3, 1, 2], {1}, {}, None
        sort(xs, seen, names)
        assert xs == [1, 2, 3] and seen == {1, 9} and names == {"a": [1]}
        """
    assert verdicts(program, test) == ["passed"]


@sandboxed
def test_functions_of_the_test_can_be_called_by_the_program() -> None:
    program = """
        def twice(f, x): return f(f(x))
        def compose(f, g): return lambda x: f(g(x))
        def apply(f, xs): return [f(x) for x in xs]
        def double(x): return 2 * x
        """
    assert (
        verdicts(
            program,
            "assert twice(lambda x: x * 3, 2) == 18",
            "assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11",
            "assert apply(len, ['a', 'bb']) == [1, 2] and apply(str, [1]) == ['1']",
            "assert twice(lambda x: double(x), 1) == 4",  # the program, the test, the program again
        )
        == ["passed"] * 4
    )


@sandboxed
def test_exceptions_of_the_program_arrive_by_name_and_base() -> None:
    program = """
        class Custom(ValueError): pass
        def fail(which): raise {"v": ValueError("bad"), "c": Custom("own"), "k": KeyError("x"),
                                "u": UnicodeDecodeError("utf8", b"", 0, 1, "no")}[which]
        """
    test = """
        def caught(kind, which):
            try:
                fail(which)
            except kind as error:
                return str(error)
        assert caught(ValueError, "v") == "bad"
        assert caught(Custom, "c") == "own" and caught(ValueError, "c") == "own"
        assert caught(KeyError, "k") and caught(UnicodeError, "u")
        try:
            fail("k")
            assert False
        except ValueError:
            assert False
        except LookupError:
            pass
        """
    assert verdicts(program, test) == ["passed"]


@sandboxed
def test_names_of_builtins_are_the_program_s_only_where_nothing_else_is() -> None:
    # MBPP has a task whose function is called `sum`
    assert verdicts("def sum(a, b): return a * b", "assert sum(3, 4) == 12") == ["passed"]
    program = "import math\ndef sum(xs): return 0\ndef f(x): return [x, x]"
    assert (
        verdicts(program, "assert sum(f(3)) == 6", "assert math.sqrt(4) == f(2)[0]")
        == ["passed"] * 2
    )


# Verdicts -----------------------------------------------------------------------------------------


@sandboxed
def test_each_test_gets_its_verdict_and_setup_runs_before() -> None:
    program = "class Node:\n    def __init__(self, v): self.v = v\ndef get(n): return n.v"
    setup = "root = Node(4)"
    tests = (
        "assert get(root) == 4",
        "assert get(root) == 5",
        "get(None)",
        "missing()",
        "root = None",  # its own namespace: the next test still sees the root of the setup
        "assert get(root) == 4",
    )
    expected = ["passed", "failed", "error", "error", "passed", "passed"]
    assert verdicts(program, *tests, setup=setup) == expected
    assert verdicts(program, *tests, setup=setup, stop=True) == ["passed", "failed"]


@sandboxed
@pytest.mark.parametrize("hang", ["while x: pass", "import time; time.sleep(x)"])
def test_a_hanging_test_costs_no_other_test(hang: str) -> None:
    suite = Suite(sources=["f(90)", "f(0)", "assert f(0)"], stop=False)
    outcomes = run_tests(f"def f(x):\n    {hang}", suite, limits=Limits(seconds=1.0))
    assert [o.verdict.value for o in outcomes] == ["timeout", "passed", "failed"]
    assert outcomes[0].detail == "still running after 1 s"


@sandboxed
def test_the_share_that_passes_does_not_depend_on_the_order_of_the_tests() -> None:
    program = "calls = []\ndef f():\n    calls.append(1)\n    return len(calls)"
    assert verdicts(program, *["assert f() == 1"] * 2) == ["passed"] * 2


@sandboxed
def test_each_test_has_state_files_and_processor_time_of_its_own() -> None:
    program = """
import os, time
calls = []
def f():
    calls.append(1)
    open(f"/tmp/{len(os.listdir('/tmp'))}", "w").close()
    return len(calls) + len(os.listdir("/tmp"))
def busy(n):
    start = time.process_time()
    while time.process_time() - start < n: pass
"""
    # More tests than one sandbox holds.
    assert verdicts(program, *["assert f() == 2"] * 40, stop=True) == ["passed"] * 40
    ends = verdicts(program, *["assert f() == 2"] * 20, "assert f() == 3", "f()", stop=True)
    assert ends == ["passed"] * 20 + ["failed"]
    suite = Suite(sources=["busy(1.05)"] * 2)
    outcomes = run_tests(program, suite, limits=Limits(seconds=2.0))
    assert [o.verdict for o in outcomes] == [Verdict.PASSED] * 2, "2.1 s in all, 2 s for each"


@sandboxed
def test_a_program_that_hangs_ends_the_tests_that_stop() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    suite = Suite(sources=["f()"] * 5)
    [outcome] = run_tests("def f():\n    while True: pass", suite, limits=Limits(seconds=1.0))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert outcome.verdict is Verdict.TIMEOUT
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


@sandboxed
def test_a_program_that_ignores_the_end_of_its_time_is_out_of_time() -> None:
    program = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    [outcome] = run_inputs(program, [""], limits=Limits(seconds=1.0))
    assert isinstance(outcome, Outcome) and outcome.verdict is Verdict.TIMEOUT


@pytest.mark.parametrize(
    "setting", [{"seconds": 0}, {"seconds": -1.0}, {"seconds": float("nan")}, {"memory_mb": 0},
                {"memory_mb": -5}, {"disk_mb": 0}, {"output_kb": -1}, {"threads": -1}]
)  # fmt: skip
def test_limits_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(setting))} = "):
        Limits(**setting)


@sandboxed
def test_a_program_that_does_not_load_fails_every_test() -> None:
    for program in (
        "def f(:",
        "import numpy_is_not_here",
        "1 / 0",
        "exit()",
        "x = '\ud800'; y = ]",
    ):
        assert verdicts(program, "assert True", "assert True") == ["error"] * 2


@sandboxed
def test_a_test_at_fault_is_not_the_program_s_fault() -> None:
    program = "def f(x): return x"
    assert verdicts(program, "assert f(1) ==") == ["unjudgeable"]
    assert verdicts(program, "class A: pass\nassert f(A())") == ["unjudgeable"]
    assert verdicts(program, "assert f(1)", setup="def") == ["unjudgeable"] * 1


@sandboxed
def test_inputs_are_answered_lazily_each_in_its_own_time() -> None:
    runs = run_inputs(
        "import time\nn = float(input())\ntime.sleep(n)\nprint(n)",
        ["0", "30", "0"],
        limits=Limits(seconds=1.5),
    )
    assert next(runs) == "0.0\n"
    second, third = next(runs), next(runs)
    assert isinstance(second, Outcome) and second.verdict is Verdict.TIMEOUT
    assert third == "0.0\n"


@sandboxed
def test_a_main_program_behaves_as_under_python() -> None:
    program = """
        import atexit, sys, threading
        if __name__ == "__main__":
            atexit.register(lambda: print("last"))
            threading.Thread(target=lambda: print(sys.stdin.read().upper())).start()
            sys.setrecursionlimit(5000)
            raise SystemExit
        """
    [wrote] = run_inputs(textwrap.dedent(program), ["é\n" * 3], limits=LIMITS)
    assert wrote == "É\nÉ\nÉ\n\nlast\n"


@sandboxed
def test_a_main_program_may_read_dev_stdin_and_leave_by_exit() -> None:
    for leave in ("exit()", "quit(0)", "import sys; sys.exit()"):
        program = f"print(open('/dev/stdin').read() * 2)\n{leave}"
        assert list(run_inputs(program, ["a", "b"], limits=LIMITS)) == ["aa\n", "bb\n"]
    [outcome] = run_inputs("exit(3)", [""], limits=LIMITS)
    assert isinstance(outcome, Outcome) and outcome.detail.endswith("status 3")


@sandboxed
@pytest.mark.parametrize("path", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_standard_input_has_its_usual_names(path: str) -> None:
    program = f"""
        import os, pathlib
        for line in pathlib.Path({path!r}).open():
            break
        print(line + pathlib.Path({path!r}).read_text() + "!")
        with open(os.fsencode({path!r})) as again:
            print(repr(again.read()), os.read(os.open({path!r}, os.O_RDONLY), 9))
        """
    [wrote] = run_inputs(textwrap.dedent(program), ["a\n"], limits=LIMITS)
    assert wrote == "a\n!\n'' b''\n"


@sandboxed
def test_each_input_finds_an_empty_tmp() -> None:
    program = "import os\nprint(os.listdir('/tmp'))\nos.makedirs('/tmp/a/b')\nopen('/tmp/c', 'w')\n"
    program += "os.chmod('/tmp/a', 0)"
    assert list(run_inputs(program, ["", ""], limits=LIMITS)) == ["[]\n", "[]\n"]


@sandboxed
def test_long_inputs_and_outputs_do_not_block_each_other() -> None:
    text = "x" * 70_000 + "\n"
    program = "import sys\nfor line in sys.stdin: sys.stdout.write(line)"
    limits = Limits(seconds=20.0, output_kb=4096)
    assert list(run_inputs(program, [text * 20, text], limits=limits)) == [text * 20, text]


# Where there is no sandbox ------------------------------------------------------------------------


def test_without_bubblewrap_nothing_runs_and_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    reason = unavailable.__wrapped__()
    assert reason and "apt-get install bubblewrap" in reason
    monkeypatch.setattr(sandbox, "unavailable", lambda: reason)
    suite = Suite(sources=["assert f() == 1"])
    with pytest.raises(UsageError, match=r"bwrap is not installed.*allow_unsandboxed"):
        run_tests("def f(): return 1", suite)
    with pytest.raises(UsageError, match="apt-get install bubblewrap"):
        next(run_inputs("print(1)", [""]))


def test_running_without_a_sandbox_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "unavailable", lambda: "none here")
    suite = Suite(sources=["assert f() == 1", "assert f() == 2"], stop=False)
    outcomes = run_tests("def f(): return 1", suite, limits=LIMITS, allow_unsandboxed=True)
    assert [o.verdict.value for o in outcomes] == ["passed", "failed"]
    assert list(run_inputs("print(1)", [""], limits=LIMITS, allow_unsandboxed=True)) == ["1\n"]


@sandboxed
def test_a_sandbox_that_does_not_start_is_an_error_not_a_wrong_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "command", lambda disk, fd: ["/bin/sh", "-c", "echo no>&2"])
    with pytest.raises(SandboxError, match=r"does not start \(no\)"):
        run_tests("def f(): return 1", Suite(sources=["assert f() == 1"]))


# The filters --------------------------------------------------------------------------------------


def decision(code: bytes, number: int, *, arch: int, argument: int = 0, second: int = 0) -> int:
    """What a filter says to a system call, by the rules of classic BPF."""
    data = struct.pack("=iIQ6Q", number, arch, 0, argument, second, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("=HBBI", code))
    at, accumulator = 0, 0
    while True:
        kind, if_true, if_false, constant = lines[at]
        at += 1
        if kind == 0x20:
            accumulator = struct.unpack_from("=I", data, constant)[0]
        elif kind == 0x06:
            return constant
        else:
            holds = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }[kind]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filters_refuse_what_they_list_and_little_else(
    machine: str, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    read, clone = {"x86_64": (0, 56), "aarch64": (63, 220)}[machine]
    outer, inner = seccomp.outer_filter(), seccomp.inner_filter()
    allow, kill, refuse, missing = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    for numbers in seccomp._NUMBERS.values():
        if numbers[column] is not None:
            assert decision(outer, numbers[column], arch=arch) == refuse
    for numbers in seccomp._PROCESS_NUMBERS.values():
        if numbers[column] is not None:
            assert decision(inner, numbers[column], arch=arch) == refuse
            assert decision(outer, numbers[column], arch=arch) == allow
    assert decision(outer, read, arch=arch) == decision(inner, read, arch=arch) == allow
    fcntl, prlimit = {"x86_64": (72, 302), "aarch64": (25, 261)}[machine]
    for command, said in ((1, allow), (6, refuse), (7, refuse), (37, refuse), (1030, allow)):
        assert decision(outer, fcntl, arch=arch, second=command) == said
    assert decision(outer, prlimit, arch=arch) == allow
    assert decision(outer, prlimit, arch=arch, argument=1) == refuse
    assert decision(outer, read, arch=0x40000003) == kill  # 32-bit x86
    assert decision(outer, 435, arch=arch) == missing  # clone3: libc falls back to clone
    assert decision(outer, 500, arch=arch) == missing  # calls that nobody has thought of yet
    assert decision(outer, 436, arch=arch) == allow
    thread, process, user_namespace = 0x003D0F00, 0x01200011, 0x10000000
    assert decision(inner, clone, arch=arch, argument=thread) == allow
    assert decision(inner, clone, arch=arch, argument=process) == refuse
    assert decision(outer, clone, arch=arch, argument=process) == allow
    assert decision(outer, clone, arch=arch, argument=process | user_namespace) == refuse


def test_a_machine_without_a_table_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in (unavailable.__wrapped__() or "")
    with pytest.raises(UsageError, match="riscv64"):
        seccomp.outer_filter()


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_machine() -> Iterator[Path]:
    """A memory cgroup of 200 MiB, in which the kernel kills processes."""
    place = MEMORY_GROUPS / f"groupwise-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield place
    place.rmdir()


@sandboxed
def test_a_program_killed_because_the_machine_has_no_memory_is_not_judged(
    small_machine: Path,
) -> None:
    script = f"""
import os
import platform
import resource
from groupwise.rewards.code.sandbox import Limits, Suite, SandboxError, run_inputs, run_tests
open({str(small_machine / "cgroup.procs")!r}, "w").write(str(os.getpid()))
program = "def f(n): return len([bytearray(1 << 20) for _ in range(n)])\\n"
limits = Limits(seconds=60.0, memory_mb=512)
for run in (
    lambda: run_tests(program, Suite(sources=["f(300)"]), limits=limits),
    lambda: list(run_inputs(program + "f(300)", [""], limits=limits)),
):
    try:
        print(run())
    except SandboxError as error:
        print("not judged:", error)
[own] = run_tests("import os\\ndef f(n): os.kill(os.getpid(), 9)", Suite(sources=["f(1)"]))
print(own.verdict.value, own.detail)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first, second, own = done.stdout.splitlines()
    assert first == second and "not judged: code sandbox: the machine ran out of memory" in first
    assert own.startswith("error PermissionError"), "its own doing"


def started_since(before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes below this one; other tests may have left theirs, such as workers."""
    every = psutil.Process().children(recursive=True)
    return [process for process in every if process not in before]


@sandboxed
@pytest.mark.parametrize("kind", ["tests", "inputs"])
def test_a_sandbox_killed_from_outside_says_nothing_of_the_program(kind: str) -> None:
    waits, limits = "import time\ntime.sleep(60)", Limits(seconds=60.0)
    before = set(psutil.Process().children(recursive=True))

    def run() -> object:
        if kind == "inputs":
            return list(run_inputs(waits, [""], limits=limits))
        return run_tests(waits, Suite(sources=["f()"]), limits=limits)

    def kill() -> None:
        end = time.monotonic() + 20
        while len(started := started_since(before)) < 4:  # the program runs
            assert time.monotonic() < end, "the program did not start"
            time.sleep(0.02)
        started[0].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(SandboxError, match="something outside killed"):
        run()
    killer.join()


_SUICIDES = {
    "kill": "os.kill(os.getpid(), 9)",
    "tgkill": "signal.pthread_kill(threading.get_ident(), 9)",
    "rt_sigqueueinfo": "libc.syscall(129, os.getpid(), 9, ctypes.create_string_buffer(128))",
    "timer": "libc.timer_create(0, event, ctypes.byref(timer)); "
    "libc.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(0, 0, 0, 1000)), None)",
    "owner": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 10, 9); "
    "fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(r, fcntl.F_SETFL, 0o20000); "
    "os.write(w, b'x')",
    "limit": "import resource; signal.signal(24, signal.SIG_IGN); "
    "resource.setrlimit(resource.RLIMIT_CPU, (0, 1)); [0 for _ in iter(int, 1)]",
    "strict": "libc.prctl(22, 1, 0, 0, 0); os.getpid()",
    "parent": "libc.prctl(1, 9); os.kill(os.getppid(), 15); time.sleep(1)",
    "kill of the judge": "os.kill(os.getppid(), 9); os.kill(os.getppid(), 15); time.sleep(1)",
}
_SUICIDE = """
import ctypes, os, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
event = ctypes.create_string_buffer(64)
ctypes.memmove(ctypes.addressof(event) + 8, b"\\x09", 1)
timer = ctypes.c_void_p()
def f():
    %s
    return 1
"""


@sandboxed
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize("way", _SUICIDES)
def test_a_program_cannot_pass_for_one_that_was_killed_from_outside(way: str) -> None:
    program, limits = _SUICIDE % _SUICIDES[way], Limits(seconds=3.0)
    [outcome] = run_tests(program, Suite(sources=["assert f() == 2"]), limits=limits)
    assert outcome.verdict in (Verdict.ERROR, Verdict.FAILED, Verdict.TIMEOUT)
    if "judge" not in way and way != "parent":
        [ended] = run_inputs(program + "\nf()", [""], limits=limits)
        assert isinstance(ended, str) or ended.verdict in (Verdict.ERROR, Verdict.TIMEOUT)


@sandboxed
@pytest.mark.parametrize("kind", ["tests", "inputs"])
def test_a_program_that_a_memory_watcher_kills_is_not_judged(kind: str) -> None:
    waits, limits = "import time\ndef f(): time.sleep(60)\n", Limits(seconds=60.0)
    before = set(psutil.Process().children(recursive=True))

    def watch() -> None:
        for _ in range(1000):
            time.sleep(0.02)
            under = started_since(before)
            if len(under) >= 4:  # bubblewrap, its child, the judge, the program
                max(under, key=lambda process: (process.create_time(), process.pid)).kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with pytest.raises(SandboxError, match="memory watcher"):
        if kind == "inputs":
            list(run_inputs(waits + "f()", [""], limits=limits))
        else:
            run_tests(waits, Suite(sources=["f()"]), limits=limits)
    watcher.join()


def test_a_sandbox_is_ended_while_bubblewrap_still_says_what_it_started() -> None:
    told, tells = os.pipe()
    os.write(tells, b'{\n    "child-pid": 12')  # the rest of the number is not written yet
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    sandbox._end(process, told)
    os.close(tells)
    assert process.returncode == -9
