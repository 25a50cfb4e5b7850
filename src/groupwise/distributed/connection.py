"""The connection to Ray: it reserves resources, starts processes and checks that they are alive."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from groupwise.config import Config
from groupwise.distributed import surroundings
from groupwise.distributed.lost import RankLost
from groupwise.errors import GroupwiseError, RunError, UsageError, first_line, install_command

STORE_MB = 256
"""Shared memory of a cluster that is started here."""
LIFE = "life"
"""The thread of a process that answers `alive`."""
WRITING = "writing"
"""The threads of a replica that wait for completions."""
ROOM_S = 60.0
"""Seconds to wait for free resources on the nodes."""


class Cluster:
    """The connection to Ray.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        assert config.cluster is not None
        self.settings, self.config = config.cluster, config
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise UsageError(f"[cluster]: needs Ray; {install_command('ray')}.") from error
        self.ray: Any = ray
        needs = self._needs()
        given: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.settings.address is None:
            # Ray lowers the priority of its workers, which do all the work here.
            os.environ.setdefault("RAY_worker_niceness", "0")
            given |= {
                "address": "local",
                "num_cpus": needs["CPU"],
                "include_dashboard": False,
                "object_store_memory": STORE_MB << 20,
            }
        else:
            given |= {"address": self.settings.address}
        try:
            ray.init(**given)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"cluster.address = {self.settings.address!r}: no Ray cluster answers there "
                f"({first_line(error)}); start one by `ray start --head`, or leave the address out."
            ) from error
        end = time.monotonic() + (0.0 if self.settings.address is None else ROOM_S)
        while (lacking := self._lacking()) and time.monotonic() < end:
            time.sleep(1.0)  # Nodes may still be joining.
        if lacking:
            ray.shutdown()
            raise UsageError(
                f"[cluster]: the cluster has too little ({'; '.join(lacking)}); lower "
                "cluster.ranks, cluster.replicas or cluster.scorers, or add nodes."
            )
        self.bundles = self._reserved()

    def _each_needs(self) -> list[dict[str, float]]:
        """CPUs and GPUs of each process."""
        of = self.settings
        rank = {"CPU": of.rank_cpus, "GPU": of.rank_gpus}
        replica = {"CPU": of.replica_cpus, "GPU": of.replica_gpus}
        scorer = {"CPU": of.scorer_cpus, "GPU": of.scorer_gpus}
        every = [rank] * of.ranks + [replica] * of.replicas + [scorer] * of.scorers
        return [{name: amount for name, amount in each.items() if amount} for each in every]

    def _needs(self) -> dict[str, float]:
        """CPUs and GPUs of all processes."""
        total: dict[str, float] = {}
        for each in self._each_needs():
            for name, amount in each.items():
                total[name] = total.get(name, 0) + amount
        return total

    def _lacking(self) -> list[str]:
        """The resources of which the cluster has too little in total, free or in use."""
        there = self.ray.cluster_resources()
        return [
            f"{name}: {there.get(name, 0):g} of {wanted:g}"
            for name, wanted in self._needs().items()
            if there.get(name, 0) < wanted
        ]

    def _reserved(self) -> Any:
        """Reserve resources for all processes, so that none waits for another run.

        Raises:
            UsageError: nodes are too small, or in use.
        """
        ray, needs = self.ray, self._each_needs()
        bundles = ray.util.placement_group(needs, strategy="PACK")
        if bundles.wait(ROOM_S):
            return bundles
        free = ray.available_resources()
        nodes = "; ".join(
            f"{node['NodeManagerAddress']} has {_listed(node['Resources'])}"
            for node in ray.nodes()
            if node["Alive"]
        )
        ray.shutdown()
        each = ", ".join(dict.fromkeys(map(_listed, needs)))
        raise UsageError(
            f"[cluster]: found no room for {len(needs)} processes of {each} within {ROOM_S:.0f} s "
            f"({nodes}; free are {_listed(free)}); lower what each process takes, wait for other "
            "runs, or add nodes."
        )

    def actor(self, kind: type, *given: Any, cpus: int, gpus: float, writing: int = 0) -> Any:
        """A separate process that holds an object; it ends with the driver. Its method `alive`
        answers while other methods run.

        Args:
            writing: calls of `write` that may run at a time.
        """
        placing = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        made = self.ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={LIFE: 1, **({WRITING: writing} if writing else {})},
            scheduling_strategy=placing(placement_group=self.bundles),
        )(kind)
        return made.remote(self.config.to_json(), os.getcwd(), *given)

    def get(self, refs: Any) -> Any:
        """Results, or the error of the library itself where one was raised."""
        try:
            return self.ray.get(refs)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, GroupwiseError):
                raise cause from error
            raise RunError(f"{type(cause).__name__}: {str(cause)[:300]}") from error

    def compare(self, actors: Mapping[str, Any]) -> None:
        """Refuse processes with other packages than the driver's."""
        calls = {name: actor.surroundings.remote() for name, actor in actors.items()}
        others = {name: self._begun(name, call) for name, call in calls.items()}
        surroundings.compare(surroundings.surroundings(), others, here="the driver")

    def _begun(self, name: str, call: Any) -> Any:
        """The first answer of a process.

        Raises:
            RankLost: it was killed while it started.
            RunError: it did not start; the message says why.
        """
        ray, limit = self.ray, self.config.distributed.timeout_s
        try:
            return ray.get(call, timeout=limit)
        except ray.exceptions.RayActorError as error:
            if "error raised in its creation task" not in str(error):
                raise RankLost(f"{name} was lost while it started.") from error
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise RunError(f"{name}: did not start: {said[-1]}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(
                f"{name}: did not start within {limit:.0f} s (distributed.timeout_minutes)."
            ) from error

    def silent(self, actors: Mapping[int, Any], calls: dict[int, tuple[Any, float]]) -> list[int]:
        """The numbers of processes that are lost: dead, or without a sign of life for
        `distributed.timeout_minutes`.

        Args:
            calls: the open call to each process and its time; kept between calls.
        """
        ray, lost, now = self.ray, [], time.monotonic()
        for number, actor in actors.items():
            if number not in calls:
                calls[number] = actor.alive.options(concurrency_group=LIFE).remote(), now
            call, since = calls[number]
            if ray.wait([call], timeout=0)[0]:
                try:
                    ray.get(call)
                    del calls[number]
                except ray.exceptions.RayActorError:
                    lost.append(number)
            elif now - since > self.config.distributed.timeout_s:
                lost.append(number)
        return lost

    def close(self) -> None:
        """End all processes that were started here."""
        self.ray.shutdown()


def _listed(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
