"""How much memory the processes of a cluster take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from groupwise.distributed.connection import Cluster


class ProcessMemory:
    """`peak_memory` of processes by name. A call asks them and returns what they have answered to
    earlier calls, so it never waits.

    Args:
        actors: the processes there are now.
    """

    def __init__(self, cluster: Cluster, actors: Callable[[], Mapping[str, Any]]) -> None:
        self.cluster, self.actors = cluster, actors
        self.known: dict[str, float] = {}
        self.open: dict[str, Any] = {}

    def __call__(self) -> dict[str, float]:
        ray, actors = self.cluster.ray, self.actors()
        for name, actor in actors.items():
            call = self.open.get(name)
            if call is not None and not ray.wait([call], timeout=0)[0]:
                continue
            if call is not None:
                try:
                    self.known[name] = round(ray.get(call), 1)
                except self.cluster.lost:  # Its replacement answers.
                    self.known.pop(name, None)
            self.open[name] = self.cluster.asked(actor)
        return {name: self.known[name] for name in actors if name in self.known}
