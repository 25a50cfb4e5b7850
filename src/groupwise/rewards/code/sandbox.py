"""A sandbox for Python programs that nobody has read: bubblewrap, seccomp, limits, a wall clock.

Every program gets its own sandbox: no network, no file of the host but Python's own library
and the shared libraries it needs (read-only), no environment, a /tmp of fixed size, no second
process, limits on memory, processor time, output and wall-clock time. The last one is enforced
outside, where the program has no access. See docs/sandbox.md for what each layer is for.

Failures are attributed to their cause. Whatever the program does, including hanging, is a
`Verdict`. A sandbox that does not start raises `SandboxError`; a sandbox that is not available at
all raises `UsageError`, and nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError
from groupwise.rewards.code import seccomp
from groupwise.rewards.code.cgroup import MemoryGroup, memory_group
from groupwise.rewards.code.clock import Clock
from groupwise.rewards.code.inside import codec
from groupwise.rewards.code.job import (
    KILLED,
    NO_VERDICT,
    Job,
    Outcome,
    SandboxError,
    Verdict,
    memory_kills,
)
from groupwise.rewards.code.launch import NO_ONE, command, interpreter, judge_code
from groupwise.rewards.code.suite import AMBIGUOUS, BoundSource, Suite, bound_sources, unfit

_INSTALL = (
    "install it (`apt-get install bubblewrap`, `dnf install bubblewrap`, `pacman -S bubblewrap`)"
)
_PERMIT = (
    "bubblewrap needs user namespaces (sysctl kernel.unprivileged_userns_clone = 1 or "
    "kernel.apparmor_restrict_unprivileged_userns = 0), or root with CAP_SYS_ADMIN, which "
    "`docker run --privileged` gives"
)
_START_SECONDS = 30.0
_LONGEST_SECONDS = 3600
_AT_ONCE = 16  # most tests in one sandbox, each with a process of the program
_ROOM = 256 << 20  # bytes for the judge, its copies before they become programs, and the kernel


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: processor time for each test. `Clock` says how long it may take by the clock: so a
            program that waits is stopped, and one on a busy machine is not.
        memory_mb: address space, MiB.
        disk_mb: size of /tmp and of any file, MiB.
        output_kb: what one run may write to standard output and standard error together, KiB.
        threads: how many more threads it may start.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 8
    output_kb: int = 1024
    threads: int = 16

    def __post_init__(self) -> None:
        for name, least in (("memory_mb", 32), ("disk_mb", 1), ("output_kb", 1), ("threads", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} = {getattr(self, name)}: must be at least {least}.")
        if not 0 < self.seconds <= _LONGEST_SECONDS:
            raise UsageError(
                f"seconds = {self.seconds}: must be above 0 and at most {_LONGEST_SECONDS}."
            )


def run_tests(
    program: str, tests: Suite, *, limits: Limits | None = None, allow_unsandboxed: bool = False
) -> list[Outcome]:
    """Run a program and the tests that call its functions.

    The tests run in another process than the program, which sees only the arguments of the calls.

    Args:
        program: Python source.
        tests: what has to hold.
        limits: see `Limits`.
        allow_unsandboxed: where there is no sandbox, run the program with the rights of this one.

    Returns:
        One outcome per test, in order, fewer after the last one that ran if `tests.stop`; for
        counted tests one per count and one more for a test that raised.

    Raises:
        UsageError: there is no sandbox on this machine.
        SandboxError: the sandbox did not start.

    Example:
        >>> if not unavailable():
        ...     outcomes = run_tests("def f(x): return x + 1", Suite(sources=["assert f(1) == 2"]))
        ...     assert [o.verdict.value for o in outcomes] == ["passed"]
    """
    plain = _must_be_plain(allow_unsandboxed)
    return _run_tests(program, tests, limits or Limits(), plain=plain)


def _run_tests(program: str, tests: Suite, limits: Limits, *, plain: bool) -> list[Outcome]:
    bound = bound_sources(tests)
    reason = AMBIGUOUS if bound is None else unfit(bound)
    if bound is None or reason:
        return _complete([Outcome(verdict=Verdict.UNJUDGEABLE, detail=reason or "")], tests)
    whole_only = tests.stop or tests.counted  # else a share counts: it must not depend on the order
    clock = Clock(limits.seconds, counted=0 if whole_only else len(tests.sources))
    outcomes: list[Outcome] = []
    share = _AT_ONCE if whole_only else 1
    for start in range(1, len(bound), share):
        part = (bound[0], *bound[start : start + share])
        found = _run_bound(program, tests, part, limits, clock, plain=plain)
        outcomes += found or ([] if tests.stop else [NO_VERDICT])
        whole = len(found) == len(part) - 1 and found[-1].verdict is Verdict.PASSED
        if tests.stop and not whole:
            break
    return _complete(outcomes, tests)


def _run_bound(
    program: str,
    tests: Suite,
    bound: Sequence[BoundSource],
    limits: Limits,
    clock: Clock,
    *,
    plain: bool,
) -> list[Outcome]:
    """The outcomes of tests in one sandbox, in order, up to the first that is not passed."""
    nonce = secrets.token_bytes(16)
    setup, *sources = [(each.source, each.names, each.modules) for each in bound]
    payload = {
        "nonce": nonce,
        "tests": sources,
        "setup": setup,
        "imports": sorted({one for each in bound for one in each.imports}),
        "entry": tests.entry,
        "counted": tests.counted,
    }
    outcomes: list[Outcome] = []
    with _started("tests", program, limits, tests=len(sources), plain=plain) as job:
        job.send(marshal.dumps(payload))
        try:
            while (frame := clock.receive(job)) is not None:
                if not frame.startswith(nonce):
                    outcomes.append(Outcome(verdict=Verdict.ERROR, detail="verdict without nonce"))
                    break
                outcomes.append(job.check(_outcome(frame[len(nonce) :], limits.seconds)))
                if not tests.counted and len(outcomes) == len(sources):
                    break
            else:
                job.check(NO_VERDICT)
        except TimeoutError:
            outcomes.append(_timeout(limits.seconds))
    return outcomes


def run_inputs(
    program: str,
    inputs: Sequence[str],
    *,
    stop: bool = True,
    limits: Limits | None = None,
    allow_unsandboxed: bool = False,
) -> Generator[str | Outcome]:
    """Run a program once per standard input; lazily, so that a caller may stop early.

    Args:
        program: Python source, run as a main program.
        inputs: text for standard input.
        stop: the caller stops at the first wrong output. Otherwise the time limit of an input does
            not depend on the inputs before it.
        limits: see `Limits`.
        allow_unsandboxed: where there is no sandbox, run the program with the rights of this one.

    Returns:
        For each input what the program wrote to standard output, or the outcome that kept it from
        ending with status 0.

    Raises:
        UsageError: there is no sandbox on this machine.
        SandboxError: the sandbox did not start.

    Example:
        >>> if not unavailable():
        ...     assert list(run_inputs("print(int(input()) * 2)", ["4", "5"])) == ["8\\n", "10\\n"]
    """
    limits = limits or Limits()
    plain = _must_be_plain(allow_unsandboxed)
    with _started("inputs", program, limits, plain=plain) as job:
        clock = Clock(limits.seconds, counted=0 if stop else len(inputs))
        for given in inputs:
            # The judge inside stops the program when this clock no longer runs.
            most = clock.longest + _START_SECONDS
            job.send(marshal.dumps((given.encode("utf-8", "surrogateescape"), most)))
            try:
                frame = clock.receive(job)
            except TimeoutError:
                frame = _stopped(job)
            if frame is None:
                yield job.check(NO_VERDICT)
                return
            if frame.startswith(codec.OUTPUT):
                yield frame[1:].decode("utf-8", "replace")
            else:
                yield job.check(_outcome(frame, limits.seconds))


def _stopped(job: Job) -> bytes | None:
    """The frame of a program that is stopped."""
    job.stop_program()
    try:
        frame = job.receive(time.monotonic() + _START_SECONDS)
    except TimeoutError:
        return None
    return codec.TIMEOUT if frame and frame.startswith(codec.KILLED) else frame


_VERDICTS = {
    codec.PASSED: Verdict.PASSED,
    codec.FAILED: Verdict.FAILED,
    codec.ERROR: Verdict.ERROR,
    codec.TIMEOUT: Verdict.TIMEOUT,
    codec.FLOODED: Verdict.FLOODED,
    codec.UNJUDGEABLE: Verdict.UNJUDGEABLE,
}


def _outcome(frame: bytes, seconds: float) -> Outcome:
    if frame.startswith(codec.KILLED):
        return KILLED
    verdict = _VERDICTS.get(frame[:1], Verdict.ERROR)
    if verdict is Verdict.TIMEOUT:
        return _timeout(seconds)  # how the program was killed says less
    return Outcome(verdict=verdict, detail=frame[1:].decode("utf-8", "replace").strip())


def _timeout(seconds: float) -> Outcome:
    return Outcome(verdict=Verdict.TIMEOUT, detail=f"still running after {seconds:g} s")


def _complete(outcomes: list[Outcome], tests: Suite) -> list[Outcome]:
    """Tests without a verdict get that of the test which kept them from running."""
    missing = 0 if tests.counted else len(tests.sources) - len(outcomes)
    stopped = bool(outcomes) and outcomes[-1].verdict is not Verdict.PASSED
    if stopped:
        return outcomes + [outcomes[-1]] * (0 if tests.stop else missing)
    return outcomes + [NO_VERDICT] * (min(missing, 1) if tests.stop else missing)


# Starting one -------------------------------------------------------------------------------------


def _must_be_plain(allow_unsandboxed: bool) -> bool:
    """Whether to run without a sandbox: there is none, and the caller has said that it is fine."""
    reason = unavailable()
    if reason and not allow_unsandboxed:
        raise UsageError(
            f"code sandbox: {reason}. Untrusted programs are not run without it; "
            "allow_unsandboxed = true would run them with your rights, on your files."
        )
    return reason is not None


@contextlib.contextmanager
def _started(
    mode: str, program: str, limits: Limits, *, plain: bool, tests: int = 0
) -> Iterator[Job]:
    """A sandbox that stands: its judge has dropped every right and waits for tests."""
    kills = memory_kills()
    with _group(limits, plain=plain) as group, _process(limits, group, plain=plain) as process:
        job = Job(process=process, confined=not plain, kills=kills, group=group)
        job.send(judge_code())
        settings = _settings(mode, program, limits, plain=plain)
        job.send(marshal.dumps({**settings, "tests": tests}))
        try:
            greeting = job.receive(time.monotonic() + _START_SECONDS)
        except TimeoutError:
            raise SandboxError(
                f"code sandbox: did not start in {_START_SECONDS:g} s; is the machine overloaded?"
            ) from None
        if greeting != codec.READY:
            raise SandboxError(f"code sandbox: it does not start ({_complaint(process)})")
        yield job


def _group(limits: Limits, *, plain: bool) -> contextlib.AbstractContextManager[MemoryGroup | None]:
    """The group that limits a sandbox's memory as a whole. One program runs at a time, and the one
    before it may not be gone yet."""
    if plain:
        return contextlib.nullcontext()
    return memory_group((2 * limits.memory_mb + limits.disk_mb << 20) + _ROOM)


@contextlib.contextmanager
def _process(
    limits: Limits, group: MemoryGroup | None, *, plain: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, killed with everything in it when the block is left, however it is left."""
    told, tells = os.pipe()
    try:
        python = interpreter()
        line = python if plain else [*command(limits.disk_mb, tells), *python]
        process = subprocess.Popen(
            line if group is None else group.entered(line),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if plain else (tells,),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tells)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stderr.fileno(), False)
        yield process
    finally:
        _end(process, told)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def _end(process: subprocess.Popen[bytes], told: int) -> None:
    """Kill a sandbox from the inside, so that bubblewrap collects what is in it, and collect what
    it leaves if that falls to this process: in a container, the trainer may be process 1."""
    os.set_blocking(told, False)
    with os.fdopen(told, "rb") as report:
        found = re.search(rb'"child-pid": (\d+)\D', report.read() or b"")
    inner = int(found[1]) if found else None  # bubblewrap may be killed before all is written
    if inner and process.poll() is None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(inner, 9)
            process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        orphans = inner or -process.pid
        if os.waitpid(orphans, os.WNOHANG) == (0, 0):
            os.kill(orphans, 9)
            os.waitpid(orphans, 0)


def _settings(mode: str, program: str, limits: Limits, *, plain: bool) -> dict[str, Any]:
    as_root = os.geteuid() == 0 and not plain
    return {
        "mode": mode,
        "program": program,
        "uid": secrets.choice(NO_ONE) if as_root else None,
        "memory": limits.memory_mb << 20,
        "disk": limits.disk_mb << 20,
        "cpu": math.ceil(limits.seconds),
        "output": limits.output_kb << 10,
        "threads": None if plain else limits.threads + 2,
        "outer": b"" if plain else seccomp.outer_filter(),
        "filter": b"" if plain else seccomp.inner_filter(),
        "program_filter": b"" if plain else seccomp.program_filter(),
    }


def _complaint(process: subprocess.Popen[bytes]) -> str:
    process.kill()
    process.wait()
    assert process.stderr is not None
    return (process.stderr.read() or b"").decode("utf-8", "replace").strip()[-2000:] or "no reason"


_PROBE = """
import os
def probe():
    for attempt in (os.fork, lambda: os.listdir("/proc"), lambda: open("/etc/passwd")):
        try:
            attempt()
        except OSError:
            continue
        return "open"
    alone = os.getpid() == 3 and os.environ.keys() <= {"PWD", "LC_CTYPE"}
    return "closed" if alone else "not alone"
"""


@functools.cache
def unavailable() -> str | None:
    """Why programs cannot be sandboxed on this machine, or None: they can. Tried out once.

    Example:
        >>> unavailable() is None or isinstance(unavailable(), str)
        True
    """
    if not seccomp.supported():
        return f"there is no filter of system calls for {platform.system()} {platform.machine()}"
    if shutil.which("bwrap") is None:
        return f"the program bwrap is not installed; {_INSTALL}"
    try:
        tests = Suite(sources=["assert probe() == 'closed', probe()"])
        [outcome] = _run_tests(_PROBE, tests, Limits(), plain=False)
    except SandboxError as error:
        return f"{str(error).removeprefix('code sandbox: ')}; {_PERMIT}"
    return None if outcome.verdict is Verdict.PASSED else f"it leaks: {outcome.detail}"
