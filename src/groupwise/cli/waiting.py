"""How many OpenMP threads there are and how they wait; set before torch starts them."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

from groupwise.machine import cpu_quota, usable_cores

SAMPLES, PAUSE_S = 20, 0.003
OTHERS = 0.9
"""A machine counts as shared from this average number of other running processes."""


def wait_policy() -> dict[str, str]:
    """Environment variables that let waiting threads sleep if other programs use the cores; empty
    if the machine is idle or the user has set them.

    A spinning thread continues at once when the others finish, but takes CPU time from them if
    there are more running threads than cores. On two cores, a step of the bundled model took 0.15 s
    with spinning and 0.23 s without on an idle machine, 0.67 and 0.29 s next to two busy processes;
    a bfloat16 step with 42 M parameters took 6.9 and 8.5 s on an idle machine.

    OpenMP reads the variables once, when torch is loaded.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return {}
    shared = others_running() + usable_cores() >= (os.cpu_count() or 1) + OTHERS
    return {"OMP_WAIT_POLICY": "passive"} if shared else {}


def thread_count() -> dict[str, str]:
    """Environment variables that keep the threads within the CPU quota of a cgroup, of which OpenMP
    knows nothing; empty without a quota or if the user has set them."""
    if "OMP_NUM_THREADS" in os.environ or math.isinf(cpu_quota()):
        return {}
    return {"OMP_NUM_THREADS": str(usable_cores())}


def others_running() -> float:
    """Number of other processes on this machine that are running or runnable, averaged over about
    60 ms."""
    counts = Path("/proc/stat")
    if not counts.exists():
        return 0.0
    found = 0
    for _ in range(SAMPLES):
        (running,) = re.findall(r"^procs_running (\d+)$", counts.read_text(), re.MULTILINE)
        found += int(running) - 1
        time.sleep(PAUSE_S)
    return found / SAMPLES
