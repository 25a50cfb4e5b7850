"""Threads spin on an idle machine and sleep on a shared one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupwise.cli import waiting as module
from groupwise.cli.waiting import others_running, thread_count, wait_policy
from groupwise.machine import cores


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no count of running processes")
def test_busy_processes_are_seen() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(0.3)
        assert others_running() >= 1
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("others", "own", "machine", "sleep"),
    [
        (0.0, 2, 2, False),  # idle
        (0.8, 2, 2, False),  # what every system does now and then
        (1.0, 2, 2, True),
        (20.0, 4, 64, False),  # a quota of 4 cores on a large machine that has others free
        (61.0, 4, 64, True),
    ],
)
def test_threads_sleep_where_others_need_the_cores(
    others: float, own: int, machine: int, sleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "others_running", lambda: others)
    monkeypatch.setattr(module, "usable_cores", lambda: own)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert wait_policy() == ({"OMP_WAIT_POLICY": "passive"} if sleep else {})


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "100")
    monkeypatch.setattr(module, "others_running", lambda: 100.0)
    assert wait_policy() == {}


@pytest.mark.parametrize(
    ("quota", "given", "wanted"),
    [
        (math.inf, None, {}),
        (1.5, None, {"OMP_NUM_THREADS": "1"}),
        (1.5, "2", {}),  # what the user has set stays
    ],
)
def test_threads_follow_a_quota(
    quota: float, given: str | None, wanted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    assert thread_count() == wanted
