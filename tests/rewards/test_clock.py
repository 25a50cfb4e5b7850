"""How long a program may take by the clock, on an idle machine and on a busy one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from groupwise.rewards.code import clock
from groupwise.rewards.code.clock import PATIENCE, PROGRAM, TEST, Clock
from groupwise.rewards.code.reward import code_stdio
from groupwise.rewards.code.sandbox import (
    Limits,
    Suite,
    Verdict,
    run_inputs,
    run_tests,
    unavailable,
)

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")
LIMITS = Limits(seconds=0.3)
BUSY = """
import time
def busy():
    while time.process_time() < 0.25: pass
"""


@pytest.fixture
def starved() -> Iterator[None]:
    """One processor for this process and for eight others that never wait."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    # Sessions of their own, among which the kernel divides a processor.
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(spin, start_new_session=True) for _ in range(8)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)


@sandboxed
@pytest.mark.usefixtures("starved")
def test_a_program_that_computes_on_a_busy_machine_is_not_out_of_time() -> None:
    begun = time.monotonic()
    [outcome] = run_tests(BUSY, Suite(sources=["busy()"]), limits=LIMITS)
    assert time.monotonic() - begun > TEST * LIMITS.seconds, "the machine is not busy"
    assert outcome.verdict is Verdict.PASSED, outcome
    assert list(run_inputs(BUSY + "busy()\nprint(1)", ["", ""], limits=LIMITS)) == ["1\n"] * 2


@sandboxed
def test_a_program_that_waits_is_stopped_and_the_next_input_has_its_time() -> None:
    waits = "import time\nif input(): time.sleep(30)\nprint(1)"
    begun = time.monotonic()
    first, second, third = run_inputs(waits, ["\n", "x\n", "\n"], limits=LIMITS)
    assert first == third == "1\n"
    assert not isinstance(second, str) and second.verdict is Verdict.TIMEOUT
    assert time.monotonic() - begun < 15


@sandboxed
def test_a_program_that_polls_is_stopped_where_processors_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "idle_seconds", time.monotonic)
    polls = "import time\nwhile True: time.sleep(0.001)"
    begun = time.monotonic()
    [outcome] = run_inputs(polls, [""], limits=LIMITS)
    assert not isinstance(outcome, str) and outcome.verdict is Verdict.TIMEOUT
    assert time.monotonic() - begun < 6, "patience is for machines that are busy"


def test_idle_time_is_at_most_the_time() -> None:
    begun, idle = time.monotonic(), clock.idle_seconds()
    time.sleep(0.1)
    assert 0 <= clock.idle_seconds() - idle <= time.monotonic() - begun + 0.02


class Computing:
    """A sandbox whose program has had half of a processor and never answers."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def receive(self, deadline: float) -> bytes | None:
        self.clock[0] = max(self.clock[0], deadline)
        raise TimeoutError

    def processor_time(self) -> float:
        return self.clock[0] / 2


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(clock, "idle_seconds", lambda: 0.0)
    whole = Clock(2.0)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            whole.receive(Computing(now))
    assert now[0] == PATIENCE * PROGRAM * 2.0, "for all tests together"
    assert whole.longest == 0
    now[0] = 0
    with pytest.raises(TimeoutError):
        Clock(2.0).receive(Computing(now))
    assert now[0] == PATIENCE * TEST * 2.0, "for one"


@sandboxed
def test_a_share_does_not_depend_on_the_order_of_tests_that_wait() -> None:
    limits = Limits(seconds=0.2)
    program = "import time\ndef f(x): time.sleep(x)\n"
    waits, returns = ["f(60)"] * 2, ["f(0)"] * 2
    for order in (waits + returns, returns + waits):
        found = run_tests(program, Suite(sources=order, stop=False), limits=limits)
        wanted = [Verdict.TIMEOUT if each in waits else Verdict.PASSED for each in order]
        assert [outcome.verdict for outcome in found] == wanted


@sandboxed
def test_inputs_on_which_a_program_waits_cost_the_others_nothing() -> None:
    program = "import time\ntime.sleep(60 * int(input()))\nprint(1)"
    tests = [{"input": each, "output": "1"} for each in "11111000"]
    assert code_stdio(program, {"tests": tests}, partial=True, seconds=0.2) == 3 / 8


def test_every_counted_test_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for tests, seconds, limit in (
        (1, 2.0, TEST * 2.0),
        (2, 2.0, 5.0),
        (9, 2.0, 2.0),
        (9, 0.1, 1.0),
    ):
        own = Clock(seconds, counted=tests)
        for _ in range(tests):
            begun = now[0]
            with pytest.raises(TimeoutError):
                own.receive(Waits(now))
            assert now[0] - begun == pytest.approx(limit)


class Waits(Computing):
    """A sandbox whose program waits."""

    def processor_time(self) -> float:
        return 0.0
