"""Every wait has a limit: past it the run says what it waited for, and stops or goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from groupwise.errors import RunError
from groupwise.training.monitor.watchdog import Watchdog


def watchdog(folder: Path, said: list[str], *, stop: bool = True) -> Watchdog:
    return Watchdog(folder, limit_s=0.2, stop=stop, log=said.append, grace_s=5.0)


def test_a_wait_that_never_ends_is_ended_and_named(tmp_path: Path) -> None:
    dog = watchdog(tmp_path, [])
    try:
        with pytest.raises(RunError, match=r"waited 0 s for the answer to everything, and nothing"):
            with dog.waiting("the answer to everything"):
                threading.Event().wait(30)
    finally:
        dog.close()
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "waiting for the answer to everything" in stacks
    assert "test_watchdog.py" in stacks and "Thread 0x" in stacks


@pytest.mark.parametrize("late", [0, 1])
def test_of_two_runs_side_by_side_the_one_that_waits_is_ended(late: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    dogs = [watchdog(tmp_path, []) for _ in range(2)]
    with pytest.raises(RunError, match=f"for run {late},"):
        with dogs[late].waiting(f"run {late}"):
            threading.Event().wait(30)
    for dog in reversed(dogs):
        dog.close()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_wait_in_another_thread_is_ended_too(tmp_path: Path) -> None:
    dog, found = watchdog(tmp_path, []), []

    def work() -> None:
        try:
            with dog.waiting("a loop"):
                while True:
                    time.sleep(0.01)
        except RunError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=20)
    dog.close()
    assert len(found) == 1 and "for a loop" in found[0]


def test_code_that_catches_every_error_does_not_catch_this_one(tmp_path: Path) -> None:
    """As the scoring of rewards does: what a reward raises costs its completion, no more."""
    dog, swallowed = watchdog(tmp_path, []), []
    try:
        with pytest.raises(RunError, match="for a reward that hangs"):
            with dog.waiting("a reward that hangs"):
                for _ in range(3):
                    try:
                        time.sleep(20)
                    except Exception as error:
                        swallowed.append(error)
    finally:
        dog.close()
    assert swallowed == []


def test_a_signal_that_comes_after_the_wait_ends_nothing(tmp_path: Path) -> None:
    dog = watchdog(tmp_path, [])
    with pytest.raises(RunError):
        with dog.waiting("the disk"):
            time.sleep(20)
    signal.raise_signal(signal.SIGUSR2)
    with dog.waiting("the next one"):
        signal.raise_signal(signal.SIGUSR2)
    dog.close()


def test_progress_moves_the_limit(tmp_path: Path) -> None:
    dog = watchdog(tmp_path, [])
    with dog.waiting("prompts") as heartbeat:
        for _ in range(8):
            time.sleep(0.06)
            heartbeat()
    dog.close()
    assert not (tmp_path / "stacks.txt").exists()


def test_a_process_that_was_stopped_has_not_waited(tmp_path: Path) -> None:
    """Ctrl-Z for longer than the limit, and back; what hangs afterwards is still ended."""
    program = f"""
import pathlib, threading, time
from groupwise.errors import RunError
from groupwise.training.monitor.watchdog import Watchdog
dog = Watchdog(pathlib.Path({str(tmp_path)!r}), limit_s=1.0, stop=True, log=print)
with dog.waiting("work"):
    print("stop me", flush=True)
    for _ in range(8):
        time.sleep(0.1)
try:
    with dog.waiting("nothing"):
        threading.Event().wait(30)
except RunError as error:
    print(error, flush=True)
dog.close()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "stop me\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    said, errors = process.communicate(timeout=60)
    assert "for nothing, and nothing came" in said and "for work" not in said + errors


def test_what_took_long_before_may_take_long_again(tmp_path: Path) -> None:
    dog = watchdog(tmp_path, [])
    for seconds in (0.1, 0.5):
        with dog.waiting("the evaluation"):
            time.sleep(seconds)
    dog.close()
    assert not (tmp_path / "stacks.txt").exists()


def test_reporting_only_goes_on_waiting(tmp_path: Path) -> None:
    said: list[str] = []
    dog = watchdog(tmp_path, said, stop=False)
    with dog.waiting("the disk"):
        time.sleep(0.5)
    dog.close()
    assert said and "for the disk" in said[0] and "stacks.txt" in said[0]


def test_workers_are_named_and_show_their_stacks(tmp_path: Path) -> None:
    """One worker that can print its own stacks, and one that a signal would kill."""
    program = (
        "import faulthandler, signal, sys, time\n"
        "faulthandler.register(signal.SIGUSR2)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    teller = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    silent = subprocess.Popen(["sleep", "60"])
    assert teller.stdout is not None and teller.stdout.readline() == "ready\n"
    dog = watchdog(tmp_path, [], stop=False)
    with dog.waiting("rewards"):
        time.sleep(0.6)
    dog.close()
    stacks = (tmp_path / "stacks.txt").read_text()
    assert f"worker {teller.pid} (" in stacks and f"worker {silent.pid} (sleep 60)" in stacks
    assert silent.poll() is None and teller.poll() is None
    for process in (teller, silent):
        process.kill()
    assert 'File "<string>", line 4' in teller.communicate()[1]
    silent.wait()


def test_a_wait_that_cannot_be_interrupted_ends_the_process(tmp_path: Path) -> None:
    """Stuck where no signal arrives, as foreign code can be."""
    program = f"""
import pathlib, signal, sys, time
from groupwise.training.monitor.watchdog import Watchdog
dog = Watchdog(pathlib.Path({str(tmp_path)!r}), limit_s=0.3, stop=True, grace_s=0.3,
               log=lambda text: print(text, file=sys.stderr, flush=True))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
with dog.waiting("foreign code"):
    time.sleep(100)
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1 and time.monotonic() - start < 80
    assert "foreign code: could not be interrupted; ending the process." in done.stderr
    assert "line 8 in <module>" in (tmp_path / "stacks.txt").read_text()


BLOCKED = """
import pathlib, re, signal, sys, time
from groupwise.training.monitor.watchdog import Watchdog
dog = Watchdog(pathlib.Path({folder!r}), limit_s=1.0, stop=True, grace_s=1.0, log=print)
signal.signal(signal.SIGTERM, lambda *_: None)
with dog.waiting("a reward"):
    print("begun", flush=True)
    for _ in range({first}):
        time.sleep(0.1)
    re.match("(a+)+$", "a" * 60 + "b")
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_call_that_blocks_the_interpreter_ends_the_process(stopped: bool, tmp_path: Path) -> None:
    """A match of exponential time lets no thread run. Time in which the process is stopped does not
    count."""
    program = BLOCKED.format(folder=str(tmp_path), first=8 if stopped else 1)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    if stopped:
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert process.poll() is None
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGABRT
    assert "no thread has run for 2 s (watchdog.limit_minutes)" in errors
    assert "in match" in errors and "line 10 in <module>" in errors


def test_a_process_whose_threads_run_is_left_alone(tmp_path: Path) -> None:
    """For several times what a blocked one is given, without a wait."""
    program = f"""
import pathlib, time
from groupwise.training.monitor.watchdog import Watchdog
dog = Watchdog(pathlib.Path({str(tmp_path)!r}), limit_s=1.0, stop=True, grace_s=1.0, log=print)
time.sleep(6)
dog.close()
print("there")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "there\n"), done.stderr


def test_nothing_is_left_of_a_watchdog_that_closed(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    dog = watchdog(tmp_path, [])
    began = set(psutil.Process().children()) - before
    deadline = time.monotonic() + 20
    # A process that has just been started has no arguments for a moment.
    while not all(each.cmdline() for each in began) and time.monotonic() < deadline:
        time.sleep(0.01)
    (backstop,) = (each for each in began if "backstop" in " ".join(each.cmdline()))
    dog.close()
    assert not backstop.is_running()
