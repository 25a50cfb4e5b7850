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
    UNJUDGEABLE,
    Unsendable,
    read_frame,
    write_frame,
)
from groupwise.rewards.code.inside.confine import become_program, confine, drop_rights
from groupwise.rewards.code.inside.inputs import empty, run_inputs
from groupwise.rewards.code.inside.rpc import Client, ProgramEnded, Server

_DETAIL = 1000


def start_program(job, behind) -> Client:
    """Fork a process of the program while there is nothing to hide in this one; `behind` is the
    number of those that are started after it."""
    questions, asks = os.pipe()
    answered, answers = os.pipe()
    nowhere = os.open("/dev/null", os.O_RDWR)
    pid = os.fork()
    if pid == 0:
        try:
            own = {**job, "threads": threads(job, 1 + behind)}
            become_program(own, [nowhere] * 3, (questions, answers))
            Server(questions, answers).serve()
        finally:
            os._exit(70)
    for fd in (questions, answers, nowhere):
        os.close(fd)
    return Client(pid, asks, answered, job["cpu"])


def threads(job, programs):
    """The limit of threads that leaves this many processes of the program their own."""
    return None if job["threads"] is None else job["threads"] + programs - 1


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
    """Run the tests here and the program over there, one verdict per test, up to the first that is
    not passed. Each test has a process of the program for itself. All of them start before a test
    is read, because this process has nothing to hide until then."""
    programs = [start_program(job, behind) for behind in reversed(range(job["tests"]))]
    write_frame(out, READY)
    confine({**job, "threads": threads(job, len(programs))}, spare=10)
    suite = marshal.loads(read_frame(0) or b"")

    def report(verdict, detail="") -> None:
        text = detail[:_DETAIL].encode("utf-8", "replace")
        write_frame(out, suite["nonce"] + verdict + text)

    codes = []
    for place, client in enumerate(programs):
        verdict, detail = judge_test(client, job["program"], suite, place, codes, report)
        if verdict != PASSED or not suite["counted"]:
            report(verdict, detail)
        if verdict != PASSED:
            return
        client.end()
        if job["outer"]:
            empty("/tmp")


def judge_test(client, program, suite, place, codes, report):
    """(verdict, detail) of one test, with everything in front of it run anew. What can only fail by
    the data comes before the program, which cannot have had a hand in it then."""
    prepared = [{}, set()]
    alone = not suite["setup"][1]

    def first() -> None:
        codes.extend([] if codes else compiled(suite))
        if alone:
            prepare_alone(client, suite, codes[0], prepared)

    verdict, detail = attempt(first)
    if verdict == PASSED:
        verdict, detail = attempt(lambda: client.ask("load", program))
        if verdict == PASSED and not alone:
            verdict, detail = attempt(lambda: prepare(client, suite, codes[0], prepared))
        verdict = ERROR if verdict == FAILED else verdict
    if verdict != PASSED:
        return verdict, detail
    space, own = prepared
    _, names, modules = suite["tests"][place]

    def test() -> None:
        bound = bind(client, set(names) - own, modules)
        run_test(client, codes[1 + place], {**space, **bound}, report)

    return attempt(test)


def compiled(suite):
    """The setup and all tests as code, once everything that they import has been found."""
    codes = [compile_test(source) for source, _, _ in [suite["setup"], *suite["tests"]]]
    for module, name in suite["imports"]:
        try:
            find(module, name)
        except Exception as error:
            what = f"{name} from {module}" if name else module
            raise Unsendable(f"a test cannot import {what}: {error}") from None
    return codes


def find(module, name) -> None:
    """Import a module, and look for what is taken from it."""
    if module.startswith("."):
        raise ImportError("there is no package around a test")
    found = __import__(module, fromlist=[name] if name else [])
    if name not in ("", "*") and not hasattr(found, name):
        raise ImportError(f"{module} has no {name}")


def prepare(client, suite, code, prepared) -> None:
    """Run what comes before a test in its namespace, and note the names that it defined."""
    _, names, modules = suite["setup"]
    borrowed = bind(client, names, modules)
    space = {**borrowed, "__name__": "tests", "__builtins__": builtins}
    exec(code, space)
    own = {name for name in space if name not in borrowed or space[name] is not borrowed[name]}
    prepared[:] = space, own - {suite["entry"]}


def prepare_alone(client, suite, code, prepared) -> None:
    """The same for a setup that needs nothing of the program."""
    try:
        prepare(client, suite, code, prepared)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise Unsendable(f"the setup of the tests fails: {said}") from None


def run_test(client, code, space, report) -> None:
    """Run one test in a namespace of its own; it passes unless it raises or the program ends."""
    space["__count__"] = lambda passed: report(PASSED if passed else FAILED)
    exec(code, space)
    if client.ended:
        raise ProgramEnded(client.ended, client.cause)


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
        return error.cause, str(error)
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
