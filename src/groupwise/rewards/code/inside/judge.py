"""What runs inside the sandbox: a judge, and the program under test in a process of its own.

The judge starts first, and starts the program's process before it reads a single test. So the
program can read neither the tests nor the expected values nor the nonce that makes a verdict valid:
they were never in its memory, and the pipe on which verdicts leave is closed in its process. Tests
run in the judge; the functions they call run in the program's process and send back values. The
invariant that makes this safe stands in `groupwise.rewards.code`.

For programs that read standard input the judge knows no expected output at all: it runs the program
on one input at a time and sends out what it wrote.
"""

import _signal  # pyright: ignore[reportMissingImports]
import builtins
import marshal
import os

from groupwise.rewards.code.inside.codec import (
    ERROR,
    FAILED,
    PASSED,
    READY,
    TIMEOUT,
    UNJUDGEABLE,
    Unsendable,
    read_frame,
    write_frame,
)
from groupwise.rewards.code.inside.confine import become_program, confine, drop_rights
from groupwise.rewards.code.inside.inputs import run_inputs
from groupwise.rewards.code.inside.rpc import Client, ProgramEnded, Server

_DETAIL = 1000


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
    return Client(pid, asks, answered, job["cpu"])


def bind(client, names, modules):
    """The values of the names that a test takes from the program, and the modules that it takes
    from the standard library. Which names these are comes with the test; an answer is the value of
    the one name that was asked for, whatever else it holds."""
    found = {module: __import__(module) for module in modules}
    for name in names:
        try:
            found[name] = client.ask("name", name)
        except Exception:
            continue  # not defined: running the test shows it
    return found


def judge_tests(job, out) -> None:
    """Run the tests here and the program over there; one verdict per test."""
    client = start_program(job)
    write_frame(out, READY)
    confine(job, spare=10)
    suite = marshal.loads(read_frame(0) or b"")

    def report(verdict, detail="") -> None:
        text = detail[:_DETAIL].encode("utf-8", "replace")
        write_frame(out, suite["nonce"] + verdict + text)

    prepared = [None, {}, set()]
    alone = not suite["setup"][1]
    verdict, detail = attempt(lambda: before(client, suite, prepared, alone=alone))
    if verdict == PASSED:
        verdict, detail = attempt(lambda: client.ask("load", job["program"]))
        if verdict == PASSED and not alone:
            verdict, detail = attempt(lambda: prepare(client, suite, prepared))
        verdict = ERROR if verdict == FAILED else verdict
    if verdict != PASSED:
        report(verdict, detail)
        return
    codes, space, own = prepared
    for (_, names, modules), code in zip(suite["tests"], codes[1:], strict=True):
        verdict, detail = attempt(
            lambda code=code, names=names, modules=modules: run_test(
                client, code, {**space, **bind(client, set(names) - own, modules)}, report
            )
        )
        if verdict != PASSED or not suite["counted"]:
            report(verdict, detail)
        if verdict != PASSED and not suite["all"]:
            return


def before(client, suite, prepared, *, alone) -> None:
    """Compile all tests, import what they import, and run a setup that needs nothing of the
    program, before the program runs: where that fails, the data is at fault, and the program cannot
    have had a hand in it."""
    prepared[0] = [compile_test(source) for source, _, _ in [suite["setup"], *suite["tests"]]]
    for module, name in suite["imports"]:
        try:
            find(module, name)
        except Exception as error:
            what = f"{name} from {module}" if name else module
            raise Unsendable(f"a test cannot import {what}: {error}") from None
    if alone:
        try:
            prepare(client, suite, prepared)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise Unsendable(f"the setup of the tests fails: {said}") from None


def find(module, name) -> None:
    """Import a module, and look for what is taken from it."""
    if module.startswith("."):
        raise ImportError("there is no package around a test")
    found = __import__(module, fromlist=[name] if name else [])
    if name not in ("", "*") and not hasattr(found, name):
        raise ImportError(f"{module} has no {name}")


def prepare(client, suite, prepared) -> None:
    """Run what comes before the tests in their namespace, and note the names that it defined."""
    _, names, modules = suite["setup"]
    borrowed = bind(client, names, modules)
    space = {**borrowed, "__name__": "tests", "__builtins__": builtins}
    exec(prepared[0][0], space)
    own = {name for name in space if name not in borrowed or space[name] is not borrowed[name]}
    prepared[1:] = space, own - {suite["entry"]}


def run_test(client, code, space, report) -> None:
    """Run one test in a namespace of its own; it passes unless it raises or the program ends."""
    space["__count__"] = lambda passed: report(PASSED if passed else FAILED)
    exec(code, space)
    if client.ended:
        raise ProgramEnded(client.ended, client.late)


def compile_test(source):
    """Compile what came with the data; where that fails, nobody can be judged by it."""
    try:
        return compile(source, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unsendable(f"the test does not compile: {error}") from None


def attempt(action):
    """(verdict, detail) of something that passes unless it raises."""
    try:
        action()
    except AssertionError as error:
        return FAILED, str(error)
    except Unsendable as error:
        return UNJUDGEABLE, str(error)
    except ProgramEnded as error:
        return TIMEOUT if error.late else ERROR, str(error)
    except BaseException as error:
        return ERROR, f"{type(error).__name__}: {error}"
    return PASSED, ""


def main() -> None:
    """Read the job from standard input; verdicts go to what was standard output."""
    job = marshal.loads(read_frame(0) or b"")
    out = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    if job["outer"]:
        drop_rights(job["uid"], job["outer"])
    (judge_tests if job["mode"] == "tests" else run_inputs)(job, out)
    os._exit(0)
