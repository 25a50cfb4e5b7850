"""Progress of runs: a live table in a terminal or notebook, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO, runtime_checkable

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.rundir.files import printable
from groupwise.training.monitor.non_blocking import NonBlockingStream, non_blocking

SHOWN = {
    "loss": ("supervised_loss", "{:.3f}"),
    "reward": ("reward", "{:.3f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "held-out": ("held_out", "{:.3f}"),
    "pair accuracy": ("pair_accuracy", "{:.3f}"),
    "margin": ("margin", "{:.3g}"),
    "signal": ("signal_share", "{:.2f}"),
    "grad norm": ("grad_norm", "{:.3g}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
}
"""Column → metric and its format, on every line."""
WIDER = {
    "length": ("length", "{:.0f}"),
    "truncated": ("truncated_share", "{:.2f}"),
    "kl": ("kl", "{:.3g}"),
    "entropy": ("entropy", "{:.3g}"),
}
"""Further columns of the table, in their order, as far as the terminal is wide enough."""
ELAPSED = "elapsed"

NOTEBOOK_WIDTH = 90
"""Characters of a row in a notebook's cell, beside the sidebar of a small screen."""

RECENT = 20
"""Number of recent steps that the time left is estimated from."""


@runtime_checkable
class Progress(Protocol):
    """Shows the progress of runs."""

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """A run has finished a step (counted from 1)."""
        ...

    def log(self, text: str) -> None:
        """Show a line of text."""
        ...

    def close(self) -> None:
        """Stop showing; the last state stays visible."""
        ...


@runtime_checkable
class ShowsFigures(Protocol):
    """Progress that shows figures measured between steps, such as held-out accuracy."""

    def update(self, run: str, metrics: Mapping[str, float]) -> None:
        """Show newer values of some metrics of a run."""
        ...


class NoProgress:
    """Progress that shows nothing."""

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Ignored."""

    def log(self, text: str) -> None:
        """Ignored."""

    def close(self) -> None:
        """Nothing to close."""


def show_progress(
    totals: Mapping[str, int], *, stream: TextIO | None = None, every: int | None = None
) -> Progress:
    """A live table in a terminal or a notebook's cell, plain lines elsewhere.

    Args:
        totals: steps of each run, by the run's name; one row each.
        stream: where to write; standard error unless given, so that results can be piped.
        every: steps between plain lines; None prints about 20 lines per run.
    """
    if stream is None and _in_notebook():
        return NotebookProgress(totals)
    chosen: Any = non_blocking(stream or sys.stderr)
    if chosen.isatty() and os.environ.get("TERM") != "dumb":
        return LiveProgress(totals, stream=chosen)
    return PlainProgress(totals, stream=chosen, every=every)


class Pace:
    """Estimates the time left from the steps finished recently."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.clock = clock
        self.done = 0
        self.times: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def step(self, step: int) -> None:
        """Note that a step has just finished; a resumed run does not begin at step 1."""
        self.done = step
        self.times.append((step, self.clock()))

    def left(self) -> float | None:
        """Seconds left; None before two steps have finished."""
        if len(self.times) < 2:
            return None
        (first, start), (last, end) = self.times[0], self.times[-1]
        return (self.total - self.done) * (end - start) / max(last - first, 1)


class PlainProgress:
    """One line every few steps. A closed pipe ends the lines, not the run."""

    def __init__(
        self, totals: Mapping[str, int], *, stream: TextIO, every: int | None = None
    ) -> None:
        self.stream = stream
        self.paces = {run: Pace(total) for run, total in totals.items()}
        self.every = {run: every or max(1, total // 20) for run, total in totals.items()}

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step if it is the first, the last, or one of every few."""
        pace = self.paces[run]
        pace.step(step)
        if step % self.every[run] and step not in (1, pace.total):
            return
        shown = "  ".join(f"{name} {value}" for name, value in _values(metrics).items())
        self.log(f"{run}  step {step}/{pace.total}  {shown}  left {duration(pace.left())}")

    def log(self, text: str) -> None:
        """Print a line."""
        try:
            print(printable(text), file=self.stream, flush=True)
        except BrokenPipeError:
            # Later lines, and Python's own flush when it exits, go nowhere instead of failing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def close(self) -> None:
        """Wait for the reader to take the last lines."""
        if isinstance(self.stream, NonBlockingStream):
            self.stream.close()


class LiveProgress:
    """A table with one row per run that is redrawn in place."""

    def __init__(self, totals: Mapping[str, int], *, stream: TextIO) -> None:
        self.stream = stream
        self.console = Console(file=stream)
        self.runs = RunTable(totals)
        self.live = Live(console=self.console, get_renderable=self.table, refresh_per_second=4)
        self.live.start()

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Show the newest metrics of a run."""
        self.runs.step(run, step, metrics)

    def update(self, run: str, metrics: Mapping[str, float]) -> None:
        """Show newer values of some metrics of a run."""
        self.runs.update(run, metrics)

    def table(self) -> Table:
        """The table in the width of the terminal."""
        return self.runs.table(self.console.width)

    def log(self, text: str) -> None:
        """Print a line above the table."""
        self.live.console.print(Text(printable(text)))

    def close(self) -> None:
        """Draw the table once more and release the terminal."""
        self.live.stop()
        if isinstance(self.stream, NonBlockingStream):
            self.stream.close()


class NotebookProgress:
    """The table as the output of a notebook cell, redrawn at most twice a second.

    The kernel's standard error is not the cell's, so text goes through IPython's display.
    """

    def __init__(self, totals: Mapping[str, int]) -> None:
        self.runs = RunTable(totals)
        self.lines: list[str] = []
        self._display = sys.modules["IPython.display"]
        self._handle = self._display.display(self._page(), display_id=True)
        self._shown = -math.inf

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Show the newest metrics of a run."""
        self.runs.step(run, step, metrics)
        self._show(at_once=False)

    def update(self, run: str, metrics: Mapping[str, float]) -> None:
        """Show newer values of some metrics of a run."""
        self.runs.update(run, metrics)
        self._show(at_once=False)

    def log(self, text: str) -> None:
        """Show a line above the table."""
        self.lines.append(printable(text))
        self._show()

    def close(self) -> None:
        """Show the last state."""
        self._show()

    def _show(self, *, at_once: bool = True) -> None:
        now = time.monotonic()
        if at_once or now - self._shown >= 0.5:
            self._shown = now
            self._handle.update(self._page())

    def _page(self) -> Any:
        """The lines and the table as HTML, with the colours of the notebook's theme."""
        # Without `force_jupyter`, rich would add its own copy of every page to the cell.
        console = Console(
            file=io.StringIO(), record=True, width=NOTEBOOK_WIDTH, force_jupyter=False
        )
        for line in self.lines:
            console.print(Text(line))
        console.print(self.runs.table(NOTEBOOK_WIDTH))
        pre = "<pre style='line-height: 1.3; white-space: pre-wrap'>{code}</pre>"
        return self._display.HTML(console.export_html(inline_styles=True, code_format=pre))


class RunTable:
    """A row per run with its newest metrics and the time left.

    Args:
        totals: steps of each run, by the run's name.
    """

    def __init__(self, totals: Mapping[str, int]) -> None:
        self.paces = {run: Pace(total) for run, total in totals.items()}
        self.metrics: dict[str, Mapping[str, float]] = {run: {} for run in totals}
        self.began = time.monotonic()

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Take the newest metrics of a run."""
        self.paces[run].step(step)
        self.metrics[run] = dict(metrics)

    def update(self, run: str, metrics: Mapping[str, float]) -> None:
        """Take newer values of some metrics of a run."""
        self.metrics[run] = {**self.metrics[run], **metrics}

    def table(self, width: int) -> Table:
        """The table with the newest metrics, in rows of at most `width` characters."""
        seen = {key for metrics in self.metrics.values() for key in metrics}
        columns = [name for name, (key, _) in SHOWN.items() if key in seen]
        if all(
            m.get("accuracy", m.get("reward")) == m.get("reward") for m in self.metrics.values()
        ):
            columns = [name for name in columns if name != "accuracy"]
        more = [ELAPSED, *(name for name, (key, _) in WIDER.items() if key in seen)]
        columns += self._that_fit(columns, more, width)
        elapsed = {ELAPSED: duration(time.monotonic() - self.began)}
        table = Table(box=None, pad_edge=False)
        for heading in ("run", "step", "", *columns, "left"):
            # Where the terminal is narrow, the bar is what gets shorter.
            table.add_column(
                heading,
                justify="left" if heading in ("run", "") else "right",
                no_wrap=heading != "",
            )
        for run, pace in self.paces.items():
            values = elapsed | _values(self.metrics[run], wider=True)
            table.add_row(
                Text(printable(run)),
                f"{pace.done}/{pace.total}",
                ProgressBar(total=max(pace.total, 1), completed=pace.done, width=20),
                *(values.get(name, "–") for name in columns),
                duration(pace.left()),
            )
        return table

    def _that_fit(self, columns: Sequence[str], more: Sequence[str], width: int) -> list[str]:
        """As many of the further columns, from the first on, as fit into a row."""
        name = max(len(printable(run)) for run in self.paces)
        taken = name + 2 * len(str(max(pace.total for pace in self.paces.values()))) + 32
        room = width - taken - sum(map(_room, columns))
        fit = []
        for column in more:
            room -= _room(column)
            if room < 0:
                break
            fit.append(column)
        return fit


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel") and "IPython.display" in sys.modules


def _room(column: str) -> int:
    """Characters that a column takes, with the space beside it."""
    return max(len(column), 6) + 2


def duration(seconds: float | None) -> str:
    """Seconds in words.

    Example:
        >>> duration(4.2), duration(75), duration(3700), duration(None)
        ('4s', '1m 15s', '1h 01m', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _values(metrics: Mapping[str, float], *, wider: bool = False) -> dict[str, str]:
    """The metrics that are shown, formatted."""
    return {
        name: pattern.format(metrics[key])
        for name, (key, pattern) in {**SHOWN, **(WIDER if wider else {})}.items()
        if key in metrics
    }
