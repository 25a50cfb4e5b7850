"""How the threads of a computation wait for each other, decided before torch starts them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

SAMPLES, PAUSE_S = 20, 0.003
OTHERS = 0.9
"""Other running processes, on average, from which on a machine is shared."""


def wait_policy() -> dict[str, str]:
    """Variables that let waiting threads sleep where other programs use the cores; none where the
    machine is idle or the user has set them.

    A thread that spins goes on at once when the others are done, and takes time from them where
    there are more running threads than cores. On two cores, a step of the bundled model took 0.15 s
    with spinning and 0.23 s without on an idle machine, 0.67 and 0.29 s beside two busy processes;
    a bfloat16 step of 42 M parameters took 6.9 and 8.5 s on an idle one.

    OpenMP reads them once, when torch is loaded.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return {}
    shared = others_running() + cores() >= (os.cpu_count() or 1) + OTHERS
    return {"OMP_WAIT_POLICY": "passive"} if shared else {}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def others_running() -> float:
    """Processes of this machine that run or could run, without this one; averaged over some
    hundredths of a second."""
    counts = Path("/proc/stat")
    if not counts.exists():
        return 0.0
    found = 0
    for _ in range(SAMPLES):
        (running,) = re.findall(r"^procs_running (\d+)$", counts.read_text(), re.MULTILINE)
        found += int(running) - 1
        time.sleep(PAUSE_S)
    return found / SAMPLES
