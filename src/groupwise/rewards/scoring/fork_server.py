"""The process that forks the workers of rewards, so that none inherits the trainer's threads."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from groupwise.errors import RewardError, UsageError
from groupwise.rewards.scoring.adapters import Place, inner
from groupwise.rewards.scoring.pipeline import Composition, RewardComponent
from groupwise.rewards.scoring.worker import HEADER

START_SECONDS = 120.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ForkServer:
    """The process that forks workers, seen from the one that asks them. If it dies, the next worker
    is forked by a new one.

    Args:
        setup: what its workers run, made by `worker_setup`.
        threads: of numerical libraries in a worker.
    """

    def __init__(self, setup: Mapping[str, Any], *, threads: int = 1) -> None:
        self._threads = threads
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
            raise RewardError(f"no reward worker could be started: {error}") from None
        finally:
            theirs.close()
        self.control.settimeout(START_SECONDS)
        try:
            self.control.sendall(HEADER.pack(len(self._setup)) + self._setup)
            length = HEADER.unpack(self._exactly(HEADER.size))[0]
            problem = self._exactly(length).decode()
        except (OSError, EOFError) as error:
            self.close()
            raise RewardError(f"the reward workers did not start: {error}") from None
        if problem:
            self.close()
            raise RewardError(f"the reward workers could not load the reward: {problem}")

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
            raise RewardError(f"no reward worker could be started: {error}") from None
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


def _parts(composition: Composition, *, place: Place, stage: int | None) -> list[RewardComponent]:
    chosen = [p for n, parts in enumerate(composition.stages) if stage in (None, n) for p in parts]
    return [part for part in chosen if part.place == place]


def _modules(composition: Composition, *, place: Place, stage: int | None) -> list[str]:
    """What is imported before any worker is forked."""
    parts = _parts(composition, place=place, stage=stage)
    asked = [name for part in parts for name in getattr(inner(part.reward), "imports", ())]
    return [*(["groupwise.types"] if any("group" in p.reward.names for p in parts) else []), *asked]


def worker_setup(
    composition: Composition,
    *,
    place: Place = "anywhere",
    stage: int | None = None,
    memory_mb: int | None = None,
) -> dict[str, Any]:
    """What some workers run, in a form that can be sent to another process.

    Args:
        composition: the reward.
        place: of the parts that they run.
        stage: only the parts of this stage; None for those of all stages.
        memory_mb: address space that a worker may use beyond what it needs to start.

    Raises:
        UsageError: a function that another process cannot import.
    """
    return {
        "stages": picklable(composition, place=place, stage=stage),
        "modules": _modules(composition, place=place, stage=stage),
        "memory": memory_mb,
        "first": composition.combination.stops_at_first,
        "prepare": stage,
    }


def picklable(
    composition: Composition, *, place: Place = "anywhere", stage: int | None = None
) -> bytes:
    """The stages for some workers; parts that run elsewhere are left out.

    Args:
        place: of the parts that they run.
        stage: only the parts of this stage; None for those of all stages.

    Raises:
        UsageError: a function that another process cannot import.
    """
    chosen = _parts(composition, place=place, stage=stage)
    for part in chosen:
        function = getattr(part.reward, "function", part.reward)
        try:
            pickle.dumps(part)
            reachable = getattr(function, "__module__", "") != "__main__"
        except Exception as error:
            raise UsageError(
                f"reward {part.label}: cannot be sent to worker processes ({error}); define it at "
                "the top level of a module, or score in this process with workers = 0."
            ) from None
        if not reachable:
            raise UsageError(
                f"reward {part.label}: is defined in the script itself, which worker processes "
                "cannot import; move it to a module, or score in this process with workers = 0."
            )
    stages = [tuple(part for part in parts if part in chosen) for parts in composition.stages]
    return pickle.dumps(tuple(stages))
