"""The other side of `ForkServer`: a small process that forks workers, and what a worker does.

Started as `python -m groupwise.rewards.scoring.worker FD`. It loads the job once; every
worker is then a fork of it, which takes milliseconds, so that killing one is cheap. It ends, and
all workers with it, when the connection to the trainer closes, however the trainer died.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, Protocol

HEADER = struct.Struct("!I")


class Job(Protocol):
    """What a worker does; it is sent to the forking process pickled."""

    def begin(self) -> bytes | None:
        """Called once in a new worker; what the trainer is told, or None."""
        ...

    def answer(self, message: bytes) -> bytes:
        """The answer to a message of the trainer."""
        ...


def send(connection: socket.socket, message: bytes) -> None:
    """One message: its length, then its bytes."""
    connection.sendall(HEADER.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes | None:
    """One message, or None where the other side has closed."""
    head = _exactly(connection, HEADER.size)
    return None if head is None else _exactly(connection, HEADER.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < count:
        piece = connection.recv(min(count - len(pieces), 1 << 20))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)


def main(control: socket.socket) -> None:
    """Load the job, then fork and end workers as the trainer asks."""
    _adopt_orphans()
    message = receive(control)
    if message is None:
        return
    setup = pickle.loads(message)
    sys.path[:] = setup["path"]
    try:
        job = pickle.loads(setup["job"])
        for name in setup["modules"]:
            __import__(name)
    except Exception as error:
        send(control, f"{type(error).__name__}: {error}".encode())
        return
    send(control, b"")
    gc.freeze()
    workers: set[int] = set()
    try:
        _obey(control, setup | {"job": job}, workers)
    finally:
        for worker in workers:
            _end(worker)
        with contextlib.suppress(ChildProcessError):
            for _ in range(100):
                if not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
                    time.sleep(0.01)


def _obey(control: socket.socket, setup: dict[str, Any], workers: set[int]) -> None:
    """`fork` with a socket answers with the worker's id; `end ID` with its wait status."""
    while True:
        _collect_orphans(workers)
        if not select.select([control], [], [], 1.0)[0]:
            continue
        descriptors = array.array("i")
        message, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(4))
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[:4])
        if not message:
            return
        if message == b"fork":
            own, worker = os.getpid(), os.fork()
            if worker == 0:
                control.close()
                _work(socket.socket(fileno=descriptors[0]), parent=own, **setup)
            os.close(descriptors[0])
            workers.add(worker)
            control.sendall(HEADER.pack(worker))
        else:
            (worker,) = HEADER.unpack(message)
            status = _end(worker) if worker in workers else 0
            workers.discard(worker)
            control.sendall(struct.pack("!i", status))


def _end(worker: int) -> int:
    """Kill a worker with everything it started; its wait status."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(worker, 0)[1]
    return 0


def _collect_orphans(workers: set[int]) -> None:
    """Wait for processes that ended and are not workers: what killed workers had started."""
    with contextlib.suppress(ChildProcessError):
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (found := os.waitid(os.P_ALL, 0, ended)) and found.si_pid not in workers:
            os.waitpid(found.si_pid, 0)


def _work(
    connection: socket.socket,
    *,
    parent: int,
    job: Job,
    memory: int | None,
    **_: Any,
) -> None:
    """A worker: one call after the other until the connection closes. Never returns.

    Args:
        parent: the process that forked it.
    """
    status = 1
    try:
        os.setsid()
        _die_with_parent(parent)
        _adopt_orphans()
        faulthandler.register(signal.SIGUSR2)  # the trainer asks for stacks when it waits too long
        if memory is not None:
            _limit_memory(memory)
        if (told := job.begin()) is not None:
            send(connection, told)
        while (message := receive(connection)) is not None:
            send(connection, job.answer(message))
        status = 0
    finally:
        os._exit(status)


def _die_with_parent(parent: int) -> None:
    """On Linux: killed when the forking process ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # It ended before that.
            os._exit(1)


def _adopt_orphans() -> None:
    """On Linux: what processes that end leave running becomes a child of this one, which waits for
    it. It would otherwise be left to process 1, which may be a trainer in a container."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _limit_memory(megabytes: int) -> None:
    """Address space: what the process has now plus the limit. The soft limit only, so that a
    reward that starts a sandbox of its own can set that one's limits."""
    used = 0
    with contextlib.suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, hard))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
