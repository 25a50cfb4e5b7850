"""What runs inside the sandbox: a judge, and the program under test in a process of its own.

The judge starts first, and starts the program's process before it reads a single test. So the
program can read neither the tests nor the expected values nor the nonce that makes a verdict valid:
they were never in its memory, and the pipe on which verdicts leave is closed in its process. Tests
run in the judge; the functions they call run in the program's process and send back values
(`codec.py`). A program that prints a verdict, exits, patches builtins or returns an object that
equals everything has changed nothing but its own process; one that kills the judge has silenced the
only one who could have said that it passed.

For programs that read standard input the judge knows no expected output at all: it runs the program
on one input at a time and sends out what it wrote.
"""

import _signal  # pyright: ignore[reportMissingImports]
import builtins
import marshal
import os
import sys

from groupwise.rewards.code.inside.codec import (
    ERROR,
    FAILED,
    PASSED,
    READY,
    UNJUDGEABLE,
    Unsendable,
    read_frame,
    write_frame,
)
from groupwise.rewards.code.inside.confine import become_program, confine, drop_root
from groupwise.rewards.code.inside.inputs import run_inputs
from groupwise.rewards.code.inside.rpc import Client, ProgramEnded, Server

_DETAIL = 1000
_RESERVED = sys.stdlib_module_names.union(dir(builtins))


def start_program(job) -> Client:
    """Fork the program's process while there is nothing to hide in this one."""
    questions, asks = os.pipe()
    answered, answers = os.pipe()
    nowhere = os.open("/dev/null", os.O_RDWR)
    pid = os.fork()
    if pid == 0:
        try:
            become_program(job, [nowhere] * 3, (questions, answers))
            Server(questions, answers).serve()
        finally:
            os._exit(70)
    for fd in (questions, answers, nowhere):
        os.close(fd)
    return Client(pid, asks, answered)


def used_names(code):
    """Every global or attribute name in a piece of compiled code and the functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is type(code):
            names |= used_names(constant)
    return names


def borrow(client, code, own):
    """The names that the code takes from the program.

    A builtin or a module of the standard library is the real one, whatever the program calls by
    that name: `abs = lambda x: 0` would pass half of all tests. Only where the code uses no other
    name of the program, the function under test itself is called `sum` or `copy`.
    """
    found = client.ask("globals", sorted(used_names(code) - own))
    if all(name in _RESERVED for name in found):
        return found
    return {k: v for k, v in found.items() if k not in _RESERVED or _genuine(k, v)}


def _genuine(name, value) -> bool:
    """Whether it is the judge's own module or class of that name, such as `math` or `array`."""
    mine = type(value) is type(sys) or isinstance(value, type)
    return mine and value.__name__ == name and name in sys.stdlib_module_names


def judge_tests(job, out) -> None:
    """Run the tests here and the program over there; one verdict per test."""
    client = start_program(job)
    write_frame(out, READY)
    confine(job)
    tests = marshal.loads(read_frame(0) or b"")

    def report(verdict, detail="") -> None:
        text = detail[:_DETAIL].encode("utf-8", "replace")
        write_frame(out, tests["nonce"] + verdict + text)

    space, own = {"__name__": "tests"}, set()
    verdict, detail = attempt(lambda: client.ask("load", job["program"]))
    if verdict == PASSED:
        verdict, detail = attempt(lambda: own.update(prepare(client, tests, space)))
    if verdict != PASSED:
        report(ERROR if verdict == FAILED else verdict, detail)
        return
    for test in tests["tests"]:
        verdict, detail = attempt(lambda test=test: run_test(client, test, space, own, report))
        if verdict != PASSED or not tests["counted"]:
            report(verdict, detail)
        if verdict != PASSED and not tests["all"]:
            return


def prepare(client, tests, space):
    """Run what comes before the tests in their namespace; the names it defined."""
    if not tests["setup"]:
        return set()
    code = compile_test(tests["setup"])
    borrowed = borrow(client, code, set())
    space.update(borrowed)
    exec(code, space)
    own = {name for name in space if name not in borrowed or space[name] is not borrowed[name]}
    return own - {tests["entry"]}


def run_test(client, test, space, own, report) -> None:
    """Run one test in a namespace of its own; it passes unless it raises."""
    code = compile_test(test)
    mine = {**space, **borrow(client, code, own)}
    mine["__count__"] = lambda passed: report(PASSED if passed else FAILED)
    exec(code, mine)


def compile_test(source):
    """Compile what came with the data; where that fails, nobody can be judged by it."""
    try:
        return compile(source, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise Unsendable(f"the test does not compile: {error}") from None


def attempt(action):
    """(verdict, detail) of something that passes unless it raises."""
    try:
        action()
    except AssertionError as error:
        return FAILED, str(error)
    except Unsendable as error:
        return UNJUDGEABLE, str(error)
    except BaseException as error:
        name = "" if isinstance(error, ProgramEnded) else f"{type(error).__name__}: "
        return ERROR, f"{name}{error}"
    return PASSED, ""


def main() -> None:
    """Read the job from standard input; verdicts go to what was standard output."""
    job = marshal.loads(read_frame(0) or b"")
    out = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    if job["uid"] is not None:
        drop_root(job["uid"])
    (judge_tests if job["mode"] == "tests" else run_inputs)(job, out)
    os._exit(0)
