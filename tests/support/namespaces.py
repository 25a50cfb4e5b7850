"""Two machines as network namespaces, which a cable connects that can be cut."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

PORT = 6379
PATIENCE = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000}
"""A node counts as lost after five checks that it does not answer."""
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Otherwise the first node asks for a token if this user has one, and the others give none."""
_NUMBERS = itertools.count()


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Machine:
    """A network namespace with an address of its own.

    Args:
        address: of its end of the cable.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = f"groupwise-{os.getpid()}-{next(_NUMBERS)}"
        self.cable = f"gw{os.getpid()}.{next(_NUMBERS)}"
        _ip("netns", "add", self.name)

    def command(self, *words: str) -> list[str]:
        """A command that runs here."""
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, command: Sequence[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
        """Start a command here; what it says goes to a file.

        Args:
            more: variables of its environment.
        """
        with log.open("w") as file:
            line, known = self.command(*command), {**os.environ, **OPEN, **more}
            return subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=known)

    def plug(self) -> None:
        """Take the address."""
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", self.cable)
        _ip("-n", self.name, "link", "set", "lo", "up")
        self.link("up")

    def link(self, state: str) -> None:
        """Cut the cable (`down`), or repair it (`up`)."""
        _ip("-n", self.name, "link", "set", self.cable, state)

    def start(self, cpus: int, *more: str, hidden: Path | None = None, **known: str) -> None:
        """Start a Ray node.

        Args:
            hidden: a folder that is empty for its processes.
            known: variables of its environment.
        """
        hides = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
        line = self.command(*(hides if hidden else []), sys.executable)
        line += ["-m", "ray.scripts.scripts", "start"]
        line += [f"--num-cpus={cpus}", f"--node-ip-address={self.address}"]
        line += ["--object-store-memory=100000000", "--disable-usage-stats", *more]
        every = {**os.environ, **OPEN, **known}
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=every)
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self, title: str = "") -> list[psutil.Process]:
        """The processes that run here and have this title."""
        found = []
        for number in map(int, _ip("netns", "pids", self.name).split()):
            try:
                process = psutil.Process(number)
                if title in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:  # It has ended.
                continue
        return found

    def remove(self) -> None:
        """End what runs here."""
        for process in (left := self.processes()):
            process.kill()
        psutil.wait_procs(left, timeout=10)
        _ip("netns", "delete", self.name)


class TwoMachines:
    """A first machine and another one, which know no other network."""

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            pytest.skip("network namespaces need the command `ip` (package iproute2)")
        try:
            self.first, self.second = Machine("10.213.0.1"), Machine("10.213.0.2")
        except OSError as error:
            pytest.skip(f"network namespaces need root: {error}")
        ends = [("name", each.cable, "netns", each.name) for each in (self.first, self.second)]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for each in (self.first, self.second):
            each.plug()
        self.cpus = 0, 0
        self.folder = Path(tempfile.mkdtemp(prefix="gw"))  # Paths of sockets have to be short.

    def start_ray(self, *cpus: int, **second: Any) -> None:
        """Start a cluster with so many CPUs on each machine.

        Args:
            second: what else `Machine.start` is told about the second one.
        """
        self.cpus = cpus
        head = [f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        self.first.start(cpus[0], "--head", f"--system-config={json.dumps(PATIENCE)}", *head)
        self.join(**second)

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.first.address}:{PORT}"

    def join(self, **more: Any) -> None:
        """Start the second node."""
        self.second.start(self.cpus[1], f"--address={self.address}", **more)

    def remove(self) -> None:
        """End everything."""
        for each in (self.second, self.first):
            each.remove()
        shutil.rmtree(self.folder, ignore_errors=True)


def emptied(machine: Machine, title: str, *, seconds: float = 60.0) -> bool:
    """Whether the processes with this title end in time."""
    end = time.monotonic() + seconds
    while machine.processes(title) and time.monotonic() < end:
        time.sleep(0.5)
    return not machine.processes(title)
