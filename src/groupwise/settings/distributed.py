"""Settings of runs in several processes and on several machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from groupwise.settings.base import Count, Minutes, Name, Section, Whole


class DistributedSettings(Section):
    """A run in several processes, started by `torchrun`."""

    sharding: Literal["auto", "none", "full"] = "auto"
    """Whether weights, gradients and moments are replicated ("none") or sharded with FSDP2
    ("full"); "auto" shards a model that would fill more than half of a GPU."""
    timeout_minutes: Minutes = 10.0
    """Minutes that ranks wait for each other before the run ends and names the missing ranks."""

    @property
    def timeout_s(self) -> float:
        """The same in seconds."""
        return 60 * self.timeout_minutes


class ClusterSettings(Section):
    """A run on a Ray cluster (extra `ray`): ranks that learn, replicas that sample, scorers that
    judge."""

    address: Name | None = None
    """Address of a Ray cluster, such as "10.0.0.1:6379" or "auto"; None starts one on this
    machine."""
    ranks: Count = 1
    """Number of processes that share the update."""
    replicas: Count = 1
    """Number of processes that sample, each with its own copy of the model."""
    rank_cpus: Count = 1
    """CPUs of each rank."""
    rank_gpus: Annotated[float, Field(ge=0, le=8)] = 0.0
    """GPUs of each rank."""
    replica_cpus: Count = 1
    """CPUs of each replica."""
    replica_gpus: Annotated[float, Field(ge=0, le=8)] = 0.0
    """GPUs of each replica."""
    scorers: Whole = 0
    """Number of processes that judge completions, each with `reward_pool.workers` workers, at least
    one; with 0, the driver judges."""
    scorer_cpus: Count = 1
    """CPUs of each scorer."""
    scorer_gpus: Annotated[float, Field(ge=0, le=8)] = 0.0
    """GPUs of each scorer, for rewards that load a model."""
    restarts: Whole = 3
    """How many times the run continues from its checkpoint after losing a rank."""
