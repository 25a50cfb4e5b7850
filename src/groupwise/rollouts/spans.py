"""What the processes of a run did, and when: spans of time for the timeline of its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from groupwise.types import Heartbeat, Watch

TOUCHING_S = 0.02
"""Spans of a process that are no further apart are merged, in seconds."""
MOST = 64
"""Maximum number of spans kept per step."""
WAITS = {
    "the batch": ("sampler", "sampling"),
    "rollouts of": ("sampler", "sampling"),
    "log-probabilities": ("learner", "updating"),
    "the update": ("learner", "updating"),
    "the engine to load": ("learner", "transferring"),
}
"""How the name of a watched wait begins → the process that works meanwhile, and at what."""


class Span(NamedTuple):
    """A process did something from `start` to `end`, in seconds since 1970."""

    process: str
    what: str
    start: float
    end: float


class Spans:
    """Collects spans from several threads.

    Args:
        apart: separate processes sample and add their own spans, so the loop's waits for them are
            not recorded as work.

    Attributes:
        memory: returns the peak memory of processes by name, in MB.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self.apart = apart
        self.memory: Callable[[], Mapping[str, float]] = dict
        self._found: list[Span] = []
        self._lock = threading.Lock()

    def add(self, process: str, what: str, start: float, end: float | None = None) -> None:
        """Record a span that ends now, or at `end`."""
        span = Span(process, what, start, time.time() if end is None else end)
        with self._lock:
            self._found.append(span)
            if len(self._found) > 16 * MOST:
                self._found = merged(self._found)

    def drained(self) -> list[Span]:
        """The spans recorded since the last call, merged."""
        with self._lock:
            found, self._found = self._found, []
        return merged(found)

    def judging(self) -> Callable[[Any], None]:
        """A callback for a ticket that begins now: it records the time that the scorer took."""
        start = time.time()
        return lambda ticket: self.add("scorer", "judging", start)

    def watching(self, watch: Watch) -> Watch:
        """The watch, which also notes what is waited for."""

        @contextmanager
        def noted(name: str) -> Iterator[Heartbeat]:
            whose = next((of for begin, of in WAITS.items() if name.startswith(begin)), None)
            start = time.time()
            try:
                with watch(name) as heartbeat:
                    yield heartbeat
            finally:
                if whose is not None and not (self.apart and whose[0] == "sampler"):
                    self.add(*whose, start)

        return noted


def merged(spans: list[Span]) -> list[Span]:
    """Spans in the order of their starts; touching spans of one process and kind are merged, and
    only the longest `MOST` are kept.

    Example:
        >>> [tuple(s) for s in merged([Span("a", "x", 0, 2), Span("a", "x", 1, 3)])]
        [('a', 'x', 0, 3)]
    """
    found: list[Span] = []
    last: dict[tuple[str, str], int] = {}
    for span in sorted(spans, key=lambda each: each.start):
        place = last.get(span[:2])
        if place is not None and span.start - found[place].end <= TOUCHING_S:
            found[place] = found[place]._replace(end=max(found[place].end, span.end))
        else:
            last[span[:2]] = len(found)
            found.append(span)
    longest = sorted(found, key=lambda each: each.start - each.end)[:MOST]
    return sorted(longest, key=lambda each: each.start)
