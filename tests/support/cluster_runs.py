"""Runs on a Ray cluster whose processes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil


def train_command(recipe: str, settings: Sequence[str], *more: str) -> list[str]:
    """`groupwise train` in a process of its own."""
    pairs = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "groupwise", "train", recipe, *pairs, *more]


def actors(run: int, kind: str) -> list[psutil.Process]:
    """Processes of an actor class below a run."""
    return processes(run, f"ray::{kind}")


def processes(run: int, name: str) -> list[psutil.Process]:
    """Processes below a run with a name in their command line; those that are just ending are left
    out."""
    found = []
    for each in psutil.Process(run).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(each.cmdline()):
                found.append(each)
    return found


def assert_survives(command: list[str], kind: str, *, when: Callable[[], bool]) -> str:
    """Run a command to its end, with a process of this name killed meanwhile, or none if it is
    empty; no actor outlives it. Returns what it printed."""
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    every = set[psutil.Process]()
    try:
        end = time.monotonic() + 240
        while run.poll() is None and time.monotonic() < end:
            with contextlib.suppress(psutil.NoSuchProcess):
                every.update(actors(run.pid, ""))
                if when() and (there := processes(run.pid, kind)):
                    if kind:
                        os.kill(there[0].pid, signal.SIGKILL)
                    break
            time.sleep(0.05)
        _, said = run.communicate(timeout=280)
    finally:
        run.kill()
    assert run.returncode == 0, said
    assert psutil.wait_procs(every, timeout=60)[1] == []
    return said


def kill_driver(command: list[str], *, when: Callable[[], bool]) -> list[psutil.Process]:
    """Kill a run at a moment, and return the processes that outlive it for a minute."""
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not when() and run.poll() is None:
        time.sleep(0.02)
    children = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    return psutil.wait_procs(children, timeout=60)[1]
