"""Memory cgroups: a limit on all that a sandbox takes, the kernel's own memory included.

A process's address space does not include what the kernel keeps for it, such as pipes, files in
/tmp and page tables. A memory cgroup counts these too. One can be had where this process may make
groups below its own (cgroup v1) or beside it (v2): as root outside of containers, and in sessions
that systemd delegates. Elsewhere the sandbox goes without.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from groupwise.machine import cgroups

_ENTER = 'echo $$ > "$0" && exec "$@"'
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # cgroup v2, v1
_NAME = "groupwise-{pid}-{random}"


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """A memory cgroup, and what the kernel tells of it."""

    folder: Path

    def entered(self, command: list[str]) -> list[str]:
        """A command that enters the group before anything else, so all it starts is in it."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *command]

    @property
    def overflowed(self) -> bool:
        """Whether the kernel has killed a process because this group was full, and not because the
        machine, or a group around this one, was."""
        if events := self._counts("memory.events"):
            return events.get("oom", 0) > 0
        refused = (self.folder / "memory.failcnt").read_text() != "0\n"
        return refused and self._counts("memory.oom_control").get("oom_kill", 0) > 0

    def _counts(self, name: str) -> dict[str, int]:
        """A file of the kernel with a name and a number on each line; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / name).read_text().splitlines()
            return {key: int(count) for key, count in map(str.split, lines)}
        return {}

    def remove(self) -> None:
        """Remove the group; its last process may still be ending."""
        for _ in range(100):
            try:
                return self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)


@contextlib.contextmanager
def memory_group(size: int) -> Iterator[MemoryGroup | None]:
    """A group for one sandbox, or None where none can be had.

    Args:
        size: bytes that its processes may take together.
    """
    parent = parent_of_groups()
    group = None if parent is None else _made(parent, size)
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def _made(parent: Path, size: int) -> MemoryGroup | None:
    name = _NAME.format(pid=os.getpid(), random=secrets.token_hex(4))
    group = MemoryGroup(folder=parent / name)
    try:
        group.folder.mkdir()
    except OSError:
        return None
    for limit in _LIMITS:
        with contextlib.suppress(OSError):
            if (group.folder / limit).exists():
                (group.folder / limit).write_text(str(size))
                return group
    group.remove()
    return None


@functools.cache
def parent_of_groups() -> Path | None:
    """The folder in which groups can be made, or None. Tried once, with a process that enters."""
    for parent in candidates(Path("/proc/self")):
        group = _made(parent, 1 << 28)
        if group is None:
            continue
        try:
            entered = os.posix_spawn("/bin/sh", group.entered(["/bin/true"]), {})
            works = os.waitpid(entered, 0)[1] == 0
        except OSError:
            works = False
        group.remove()
        if works:
            _sweep(parent)
            return parent
    return None


def candidates(process: Path) -> list[Path]:
    """Folders in which a process may be able to make memory groups: its own group, and for cgroup
    v2 the one above as well, since a group with processes has no groups with limits below it.

    Args:
        process: its folder in /proc.
    """
    found: list[Path] = []
    for own, mount, unified in cgroups(process, "memory"):
        found += [own, own.parent] if unified and own != mount else [own]
    return [folder for folder in found if ".." not in folder.parts]


def _sweep(parent: Path) -> None:
    """Remove empty groups of processes that were killed."""
    for folder in parent.glob(_NAME.format(pid="*", random="*")):
        pid = folder.name.split("-")[1]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                folder.rmdir()
