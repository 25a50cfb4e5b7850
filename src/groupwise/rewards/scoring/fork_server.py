"""The process that forks workers, so that none inherits the trainer's threads."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from groupwise.errors import RewardError
from groupwise.rewards.scoring.worker import HEADER

START_SECONDS = 120.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ForkServer:
    """The process that forks workers, seen from the one that asks them. If it dies, the next worker
    is forked by a new one.

    Args:
        setup: what its workers run: a pickled `Job` ("job"), modules to import before
            ("modules"), and their limit of memory in MiB or None ("memory").
        threads: of numerical libraries in a worker.
        runs: what its workers run, for messages.
        start_seconds: time in which the job must be loaded.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        *,
        threads: int = 1,
        runs: str = "reward",
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._threads, self._runs, self._start_seconds = threads, runs, start_seconds
        self._setup = pickle.dumps({"path": sys.path, **setup})
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self.control = ours
        command = [sys.executable, "-m", "groupwise.rewards.scoring.worker", str(theirs.fileno())]
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2 if _is_open(2) else subprocess.DEVNULL,
                env={
                    **os.environ,
                    **dict.fromkeys(_THREADS, str(self._threads)),
                    "TOKENIZERS_PARALLELISM": "false",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                start_new_session=True,
            )
        except OSError as error:
            raise RewardError(f"no {self._runs} worker could be started: {error}") from None
        finally:
            theirs.close()
        self.control.settimeout(self._start_seconds)
        try:
            self.control.sendall(HEADER.pack(len(self._setup)) + self._setup)
            length = HEADER.unpack(self._exactly(HEADER.size))[0]
            problem = self._exactly(length).decode()
        except (OSError, EOFError) as error:
            self.close()
            raise RewardError(f"the {self._runs} workers did not start: {error}") from None
        if problem:
            self.close()
            raise RewardError(
                f"the {self._runs} workers could not load the {self._runs}: {problem}"
            )

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.control.recv(count - len(data))
            if not piece:
                raise EOFError("the process ended")
            data += piece
        return data

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its process id and the connection to it.

        Raises:
            RewardError: none could be started.
        """
        try:
            return self._fork()
        except RewardError:
            self.close()
            self._start()
            return self._fork()

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self.control, [b"fork"], [theirs.fileno()])
            return HEADER.unpack(self._exactly(HEADER.size))[0], ours
        except (OSError, EOFError) as error:
            ours.close()
            raise RewardError(f"no {self._runs} worker could be started: {error}") from None
        finally:
            theirs.close()

    def end(self, worker: int) -> int:
        """Kill a worker; its wait status."""
        try:
            self.control.sendall(HEADER.pack(worker))
            return struct.unpack("!i", self._exactly(4))[0]
        except (OSError, EOFError):
            return 0

    def close(self) -> None:
        """End the process, and all workers with it."""
        self.control.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
