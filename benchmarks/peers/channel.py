"""How a worker process talks to the benchmark that started it; standard library only.

A worker gets its specification as a JSON file, then one JSON object per line on standard input, and
answers each with one line. What libraries print goes to standard error, so that it cannot be taken
for an answer.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MB = 2**20


class Channel:
    """The worker's end."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        self._answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the benchmark is done with this worker."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def send(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def serve(self, handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
        """Answer messages {"do": name, …} by calling the handler of that name with the rest."""
        while (message := self.receive()) is not None:
            self.send(**handlers[message.pop("do")](**message))


class Memory:
    """Peak memory above the idle process: libraries imported, nothing loaded yet.

    Resident memory of the process; on a CUDA card, what torch has allocated there.
    """

    def __init__(self) -> None:
        self.cuda: Any = None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            self.cuda = torch.cuda
        self.idle = 0.0 if self.cuda else resident("VmRSS")

    def reset(self) -> None:
        """Forget the peak so far."""
        if self.cuda:
            self.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # Not allowed here: the peak then covers the whole life of the process.
            return

    def peak(self) -> float:
        """MB above idle at the highest point since `reset`."""
        if self.cuda:
            return self.cuda.max_memory_allocated() / MB
        return resident("VmHWM") - self.idle


def resident(field: str) -> float:
    """A field of /proc/self/status in MB: VmRSS now, VmHWM at the highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status: has no {field}; this benchmark needs Linux.")


def versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def until_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Tokens up to the first end token, which counts."""
    for place, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: place + 1])
    return list(tokens)
