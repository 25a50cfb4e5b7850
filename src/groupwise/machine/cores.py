"""The CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """A cgroup of a process: its folder, where its file system is mounted, and whether it is of
    version 2."""

    folder: Path
    mount: Path
    unified: bool


def usable_cores() -> int:
    """Number of CPU cores that this process may use: those it may run on, or fewer if a cgroup
    limits its CPU time.

    A quota of 2.5 cores counts as 2, because threads that wait for each other are as slow as the
    one that is suspended.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min(float(found or 1), cpu_quota())))


def cpu_quota(process: Path = Path("/proc/self")) -> float:
    """CPU time per time that cgroups allow a process, in cores; infinite without a limit.

    Args:
        process: its folder in /proc.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst.
    """
    return min(map(_quota, _groups_and_parents(process)), default=math.inf)


def cgroups(process: Path, controller: str) -> Iterator[ControlGroup]:
    """The groups of a process in which a controller may limit it, one for each version of cgroups
    in use.

    Args:
        process: its folder in /proc.
        controller: "cpu" or "memory".
    """
    try:
        mounts = (process / "mountinfo").read_text().splitlines()
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for _, controllers, path in groups:
            unified = kind == "cgroup2" and not controllers
            older = kind == "cgroup" and controller in controllers.split(",")
            if unified or (older and controller in options.split(",")):
                folder = Path(point, os.path.relpath(path, root))
                yield ControlGroup(folder, Path(point), unified)


def _groups_and_parents(process: Path) -> Iterator[Path]:
    """Every group whose quota holds for a process."""
    for folder, mount, _ in cgroups(process, "cpu"):
        # In some containers, only the root of the process's groups is visible: `folder` is not
        # there, and one of its parents is the mount.
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _quota(folder: Path) -> float:
    """What a group allows, as `cpu_quota`."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
