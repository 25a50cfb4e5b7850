"""What a run on a cluster depends on: packages, clocks, shared folders, bandwidth."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.distributed.actors import go_to
from groupwise.distributed.connection import Cluster
from groupwise.distributed.surroundings import received, surroundings

SENT = 1 << 24
"""float32 numbers that are sent to measure the bandwidth: 64 MiB."""
QUESTIONS = 5
"""Number of times that a clock is asked; the quickest answer counts."""


class Probe:
    """Takes the place of a rank, a replica or a scorer, to test its process.

    Args:
        settings: the configuration as JSON.
        folder: where the driver runs, for relative paths.
    """

    def __init__(self, settings: str, folder: str) -> None:
        go_to(folder)
        received(settings)

    def alive(self) -> None:
        """Answer while another method runs."""

    def surroundings(self) -> dict[str, str]:
        """As `surroundings.surroundings`."""
        return surroundings()

    def clock(self) -> float:
        """Seconds since 1970, as this machine has it."""
        return time.time()

    def sees(self, path: str) -> bool:
        """Whether the path exists for this process."""
        return Path(path).exists()

    def take(self, sent: Tensor) -> float:
        """Read every number of a tensor."""
        return float(sent.sum())


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found on a cluster.

    Attributes:
        nodes: addresses of the nodes that are alive.
        blind: processes that do not see the run directory.
        offsets: by process, how many seconds its clock is ahead of the driver's.
        bandwidths: by process, bytes per second of a transfer from the driver.
    """

    nodes: tuple[str, ...]
    blind: tuple[str, ...]
    offsets: dict[str, float]
    bandwidths: dict[str, float]


def probe(config: Config) -> Findings:
    """Probe a cluster with processes that take the same resources as those of a run.

    Raises:
        UsageError: there is no cluster at the address, it lacks resources, or a process has other
            packages.
        RunError: a process does not start.
    """
    cluster = Cluster(config)
    try:
        of, ray = cluster.settings, cluster.ray
        kinds = {
            "rank": (of.ranks, of.rank_cpus, of.rank_gpus),
            "replica": (of.replicas, of.replica_cpus, of.replica_gpus),
            "scorer": (of.scorers, of.scorer_cpus, of.scorer_gpus),
        }
        actors = {
            f"{kind} {i}": cluster.actor(Probe, cpus=cpus, gpus=gpus)
            for kind, (count, cpus, gpus) in kinds.items()
            for i in range(count)
        }
        cluster.compare(actors)
        folder = Path(config.output).resolve()
        parent = next(path for path in (folder, *folder.parents) if path.is_dir())
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".shared-") as mark:
            seen = {n: cluster.answer(n, a.sees.remote(mark.name)) for n, a in actors.items()}
        sent = ray.put(torch.ones(SENT))
        return Findings(
            nodes=tuple(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]),
            blind=tuple(name for name in actors if not seen[name]),
            offsets={name: _offset(cluster, name, actor) for name, actor in actors.items()},
            bandwidths={name: _bandwidth(cluster, name, a, sent) for name, a in actors.items()},
        )
    finally:
        cluster.close()


def _offset(cluster: Cluster, name: str, actor: Any) -> float:
    """Seconds that a clock is ahead, from the measurement with the shortest round trip."""
    found = []
    for _ in range(QUESTIONS):
        asked = time.time()
        theirs = cluster.answer(name, actor.clock.remote())
        answered = time.time()
        found.append((answered - asked, theirs - (asked + answered) / 2))
    return min(found)[1]


def _bandwidth(cluster: Cluster, name: str, actor: Any, sent: Any) -> float:
    start = time.perf_counter()
    cluster.answer(name, actor.take.remote(sent))
    return 4 * SENT / (time.perf_counter() - start)
