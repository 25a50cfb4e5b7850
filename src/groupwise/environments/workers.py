"""Worker processes of environments, which can be killed: no call can end or hang the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import weakref
from typing import NamedTuple

from groupwise.rewards.scoring.fork_server import START_SECONDS, ForkServer
from groupwise.rewards.scoring.worker import receive, send


class WorkerDied(Exception):
    """A worker ended before it answered; the message says how."""


class Worker(NamedTuple):
    """A worker process and the connection to it."""

    process: int
    connection: socket.socket


class Workers:
    """Workers that do one job, as many as are taken at the same time. They are forked from a
    process that loads the job once.

    Args:
        job: what a worker does, a pickled `Job`.
        runs: what the workers run, for messages.
        start_seconds: time in which the job must be loaded.
    """

    def __init__(self, job: bytes, *, runs: str, start_seconds: float = START_SECONDS) -> None:
        self.job, self.runs, self.start_seconds = job, runs, start_seconds
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._idle: list[Worker] = []

    def take(self) -> Worker:
        """A worker that nobody uses.

        Raises:
            RewardError: none could be started.
        """
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if _silent(worker.connection):
                    return worker
                worker.connection.close()
                self._running().end(worker.process)
            if self._server is None:
                setup = {"job": self.job, "modules": (), "memory": None}
                self._server = ForkServer(setup, runs=self.runs, start_seconds=self.start_seconds)
                weakref.finalize(self, self._server.close)
            return Worker(*self._server.fork())

    def give_back(self, worker: Worker) -> None:
        """Keep a worker for the next one who takes one."""
        with self._lock:
            self._idle.append(worker)

    def ask(self, worker: Worker, message: bytes, *, seconds: float | None = None) -> bytes:
        """The answer of a worker, which is killed if it does not give one.

        Raises:
            TimeoutError: it took too long.
            WorkerDied: it ended.
        """
        try:
            worker.connection.settimeout(seconds)
            send(worker.connection, message)
            answer = receive(worker.connection)
        except TimeoutError:
            self._end(worker)
            raise
        except OSError:
            answer = None
        if answer is None:
            raise WorkerDied(self._end(worker))
        return answer

    def kill(self, worker: Worker) -> None:
        """Kill a worker while another thread waits for its answer."""
        with self._lock:
            self._running().end(worker.process)

    def _end(self, worker: Worker) -> str:
        """Kill a worker; how it died."""
        worker.connection.close()
        with self._lock:
            status = self._running().end(worker.process)
        if os.WIFSIGNALED(status):
            with contextlib.suppress(ValueError):
                return signal.Signals(os.WTERMSIG(status)).name
        return f"exit code {os.waitstatus_to_exitcode(status)}"

    def _running(self) -> ForkServer:
        assert self._server is not None, "it forked the worker"
        return self._server


def _silent(connection: socket.socket) -> bool:
    """Whether a worker waits for a message: it has not died and sends nothing unasked."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
