"""The connection to Ray: it reserves resources, starts processes and checks that they are alive."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from groupwise.config import Config
from groupwise.distributed import surroundings
from groupwise.distributed.lost import RankLost
from groupwise.errors import GroupwiseError, RunError, UsageError, first_line, install_command, warn

LIFE = "life"
"""The thread of a process that answers `alive`."""
WRITING = "writing"
"""The threads of a replica that wait for completions."""
ASK_S = 2.0
"""Seconds between questions whether a process that is waited for is alive."""
CONNECT_S = 10.0
"""Seconds within which the address of a cluster must accept a connection."""
ROOM_S = 60.0
"""Seconds to wait for free resources on the nodes."""
FEWER_S = 5.0
"""The same for each smaller number of replicas."""


class Cluster:
    """The connection to Ray.

    Args:
        config: of the run.
        fewer: start fewer replicas than configured if there is no room for all.

    Attributes:
        settings: of the section, with the number of replicas for which there is room.
    """

    def __init__(self, config: Config, *, fewer: bool = False) -> None:
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
            }
        else:
            given |= {"address": self.settings.address}
        try:
            _check_answers(self.settings.address or "")
            ray.init(**given)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"cluster.address = {self.settings.address!r}: no Ray cluster answers there "
                f"({first_line(error)}); start one by `ray start --head`, or leave the address out."
            ) from error
        self.bundles: Any = None
        wait_s = ROOM_S
        while problem := self._reserve(wait_s):
            if not fewer or self.settings.replicas == 1:
                ray.shutdown()
                raise UsageError(problem)
            left, wait_s = self.settings.replicas - 1, FEWER_S
            self.settings = self.settings.model_copy(update={"replicas": left})
            warn(f"{problem} Trying with {left} of {config.cluster.replicas} replicas.")
        gone = self.ray.exceptions
        self.lost = (gone.RayActorError, gone.ObjectLostError)
        """Errors of a call to a process that was lost, or whose answer was lost with its node."""

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

    def _reserve(self, wait_s: float) -> str:
        """Reserve resources for all processes, so that none waits for another run. Returns what is
        missing; empty if nothing is.

        Args:
            wait_s: seconds to wait for nodes that join, and for other runs.
        """
        ray, needs = self.ray, self._each_needs()
        end = time.monotonic() + (0.0 if self.settings.address is None else wait_s)
        while (lacking := self._lacking()) and time.monotonic() < end:
            time.sleep(1.0)
        if lacking:
            return (
                f"[cluster]: the cluster has too little ({'; '.join(lacking)}); lower "
                "cluster.ranks, cluster.replicas or cluster.scorers, or add nodes."
            )
        self.bundles = ray.util.placement_group(needs, strategy="PACK")
        if self.bundles.wait(wait_s):
            return ""
        ray.util.remove_placement_group(self.bundles)
        each = ", ".join(dict.fromkeys(map(listed, needs)))
        return (
            f"[cluster]: found no room for {len(needs)} processes of {each} within {wait_s:.0f} s "
            f"({self._there()}); lower what each process takes, wait for other runs, or add nodes."
        )

    def _there(self) -> str:
        """What the nodes have, and what of it is free."""
        nodes = [
            f"{node['NodeManagerAddress']} has {listed(node['Resources'])}"
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        return "; ".join([*nodes, f"free are {listed(self.ray.available_resources())}"])

    def without_room(self) -> str:
        """What the nodes have, if a process has found no room since its node was lost; otherwise
        nothing."""
        state = self.ray.util.placement_group_table(self.bundles)["state"]
        return "" if state == "CREATED" else self._there()

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
        """Results, or the error of the library itself where one was raised.

        Raises:
            RankLost: a process was given weights that were lost with their node.
        """
        try:
            return self.ray.get(refs)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, self.ray.exceptions.ObjectLostError):
                raise RankLost("lost the weights with the node of rank 0.") from error
            if isinstance(cause, GroupwiseError):
                raise cause from error
            raise RunError(f"{type(cause).__name__}: {str(cause)[:300]}") from error

    def compare(self, actors: Mapping[str, Any]) -> None:
        """Refuse processes with other packages than the driver's."""
        calls = {name: actor.surroundings.remote() for name, actor in actors.items()}
        others = {name: self.answer(name, call) for name, call in calls.items()}
        surroundings.compare(surroundings.surroundings(), others, here="the driver")

    def answer(self, name: str, call: Any) -> Any:
        """What a process answers while the run starts.

        Raises:
            RankLost: it was killed meanwhile.
            RunError: it did not start, or gives no answer; the message says why.
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
                f"{name}: did not respond within {limit:.0f} s (distributed.timeout_minutes) while "
                "the run started."
            ) from error

    def asked(self, actor: Any) -> Any:
        """The call that a process answers once it has started, while other methods run."""
        return actor.alive.options(concurrency_group=LIFE).remote()

    def silent(self, actors: Mapping[int, Any], calls: dict[int, Any]) -> list[int]:
        """The numbers of processes that are lost: dead, or without a sign of life for
        `distributed.timeout_minutes`.

        Args:
            calls: the open call to each process, or None, and the time of the call or of the answer
                to the last one; kept between calls.
        """
        ray, lost, now = self.ray, [], time.monotonic()
        for number, actor in actors.items():
            if number not in calls or calls[number][0] is not actor:
                calls[number] = actor, None, now
            _, call, since = calls[number]
            if call is None:
                if now - since > ASK_S:
                    calls[number] = actor, self.asked(actor), now
            elif ray.wait([call], timeout=0)[0]:
                try:
                    ray.get(call)
                    calls[number] = actor, None, now
                except ray.exceptions.RayActorError:
                    lost.append(number)
            elif now - since > self.config.distributed.timeout_s:
                lost.append(number)
        return lost

    def close(self) -> None:
        """End all processes that were started here."""
        self.ray.shutdown()


def _check_answers(address: str) -> None:
    """Connect to an address, because Ray alone tries for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():  # Others, such as "auto", are names.
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def listed(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
