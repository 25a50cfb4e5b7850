"""Worker processes that train the runs of an experiment in parallel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from groupwise.errors import UsageError
from groupwise.experiments.jobs import Job
from groupwise.experiments.progress_table import ProgressTable
from groupwise.rundir.files import no_link
from groupwise.training.signals import requests

POLL_S = 0.2
STOP_TIMEOUT_S = 60.0
"""Time for a stopping worker to finish its step and write a checkpoint."""

COMMAND = (sys.executable, "-m", "groupwise.experiments.worker")


class WorkerPool:
    """Runs jobs in worker processes with one thread each.

    Args:
        count: number of processes.
        folder: of their log files.
        progress: shows their progress.
    """

    def __init__(self, count: int, *, folder: Path, progress: ProgressTable) -> None:
        self.count, self.folder, self.progress = count, folder, progress
        self._workers = [Worker(folder / f"worker-{number}.log") for number in range(count)]
        self._stopping = threading.Event()
        self._refused = ""

    def do(self, jobs: Sequence[Job]) -> None:
        """Run all jobs; a failed one is recorded in its result, and the others continue.

        Raises:
            UsageError: the settings of a run cannot work.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once every current run has a checkpoint.
        """
        waiting = deque(jobs)
        threads = [
            threading.Thread(target=self._serve, args=(worker, waiting), daemon=True)
            for worker in self._workers[: len(jobs)]
        ]
        with requests() as asked:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(POLL_S)
                if asked.stop:
                    self.close()
                    raise KeyboardInterrupt
        if self._refused:
            raise UsageError(self._refused)

    def _serve(self, worker: Worker, waiting: deque[Job]) -> None:
        """Pass jobs to one worker until none is left."""
        while not self._stopping.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            self.progress.started(job)
            ended, error = worker.do(job, self.progress)
            if self._stopping.is_set():
                return
            if ended == "refused":
                waiting.clear()
                self._refused = self._refused or error
                return
            if ended == "failed" and not job.place.exists():
                replace(job.result, status="failed", error=error).write(job.place)
            self.progress.ended(job, error)

    def close(self) -> None:
        """Stop the processes; current runs finish their step and write a checkpoint first."""
        self._stopping.set()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.wait()


class Worker:
    """A worker process, started on demand and restarted if it dies.

    Args:
        log: file for its output.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[str] | None = None

    def do(self, job: Job, progress: ProgressTable) -> tuple[str, str]:
        """Run a job; returns its status ("finished", "failed" or "refused") and error message."""
        process = self._running()
        stdin, stdout = _pipes(process)
        try:
            print(job.line(), file=stdin, flush=True)
            for line in stdout:
                message = json.loads(line)
                if "ended" in message:
                    return message["ended"], message["error"] or ""
                progress.step(job, message["step"], message["metrics"])
        except BrokenPipeError:
            pass
        code = process.wait()
        self._process = None
        return "failed", f"the worker process ended with code {code}; see {self.log}"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "a", encoding="utf-8", opener=no_link) as log:
                # A new session, so that Ctrl-C reaches it only through this process.
                self._process = subprocess.Popen(
                    COMMAND,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
        return self._process

    def stop(self) -> None:
        """Send the process SIGTERM."""
        if (process := self._process) is not None:
            process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait for the process to end; kill it after a timeout."""
        if (process := self._process) is not None:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pipes(process: subprocess.Popen[Any]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("a worker needs pipes at both ends")
    return process.stdin, process.stdout
