"""Progress of an experiment: running jobs, finished jobs, and time left."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.experiments.jobs import Job
from groupwise.training.monitor.progress import duration


class ProgressTable:
    """A live table of the current runs on a terminal; elsewhere one line per finished run.

    Args:
        stream: output; None takes standard error.
    """

    def __init__(self, *, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.runs = self.steps = self.runs_done = self.steps_done = 0
        self._running: dict[str, tuple[Job, int, Mapping[str, float]]] = {}
        self._start = time.monotonic()
        self._began: dict[str, float] = {}
        self._lock = threading.Lock()
        self._live: Live | None = None
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            console = Console(file=self.stream)
            self._live = Live(console=console, get_renderable=self.table, refresh_per_second=4)
            self._live.start(refresh=True)

    def expect(self, jobs: Sequence[Job]) -> None:
        """Add jobs to the total."""
        with self._lock:
            self.runs += len(jobs)
            self.steps += sum(job.steps for job in jobs)

    def started(self, job: Job) -> None:
        """Register the start of a run."""
        with self._lock:
            self._running[job.result.name] = (job, 0, {})
            self._began[job.result.name] = time.monotonic()

    def step(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Register a finished step, counted from 1."""
        with self._lock:
            self._running[job.result.name] = (job, step, metrics)

    def ended(self, job: Job, error: str) -> None:
        """Register the end of a run, with its error if it failed."""
        name = job.result.name
        with self._lock:
            _, _, metrics = self._running.pop(name, (job, 0, {}))
            took = duration(time.monotonic() - self._began.pop(name, self._start))
            self.runs_done += 1
            self.steps_done += job.steps
            left = duration(self._left())
            done, runs = self.runs_done, self.runs
        shown = f"failed: {error}" if error else "  ".join(_values(metrics))
        if error or self._live is None:
            self.log(f"[{done}/{runs}] {name}  {shown}  {took}  left {left}")

    def log(self, text: str) -> None:
        """Show a line."""
        if self._live is not None:
            self._live.console.print(Text(text))
            return
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            # The reader is gone; the runs continue.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def close(self) -> None:
        """Stop updating; the last state stays on screen."""
        if self._live is not None:
            self._live.stop()

    def table(self) -> Table:
        """The current table."""
        with self._lock:
            table = Table(box=None, pad_edge=False, show_header=False)
            for justify in ("left", "right", "left", "left"):
                table.add_column(justify=justify, no_wrap=True)
            for name, (job, step, metrics) in self._running.items():
                bar = ProgressBar(total=job.steps, completed=step, width=20)
                table.add_row(name, f"{step}/{job.steps}", bar, "  ".join(_values(metrics)))
            bar = ProgressBar(total=max(self.steps, 1), completed=self._steps(), width=20)
            left = f"left {duration(self._left())}"
            table.add_row(
                Text("all runs", style="bold"), f"{self.runs_done}/{self.runs}", bar, left
            )
            return table

    def _steps(self) -> int:
        return self.steps_done + sum(step for _, step, _ in self._running.values())

    def _left(self) -> float | None:
        """Estimated seconds until all expected jobs are done."""
        done = self._steps()
        if not done:
            return None
        return (time.monotonic() - self._start) / done * max(self.steps - done, 0)


def _values(metrics: Mapping[str, float]) -> list[str]:
    """The metrics as text; a reward equal to the accuracy is omitted."""
    repeated = metrics.get("reward") == metrics.get("accuracy")
    shown = {k: v for k, v in metrics.items() if not (repeated and k == "reward")}
    return [f"{key} {value:.3f}" for key, value in shown.items()]
