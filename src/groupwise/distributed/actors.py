"""What runs in the processes of a cluster: a learner's rank and a replica of the sampler.

Nothing here imports Ray, which makes these classes into actors and calls their methods.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from groupwise.algorithms import bind
from groupwise.config import Config
from groupwise.config.connect import (
    load_configured,
    second_model,
    select_device,
)
from groupwise.distributed.addresses import own_address, use_route
from groupwise.distributed.canary import check_canary
from groupwise.distributed.lost import TransferError
from groupwise.distributed.messages import packed, unpacked
from groupwise.distributed.ranks import make_member
from groupwise.distributed.replies import sampling_engine
from groupwise.distributed.surroundings import received, surroundings
from groupwise.distributed.team import Member
from groupwise.distributed.weights import Shipment, accept, shipment
from groupwise.distributed.world import World
from groupwise.distributed.writer import ContinuousWriter
from groupwise.errors import RunError
from groupwise.models.devices import peak_memory
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts.tools import ToolEngine
from groupwise.types import Group, Limits, Metrics, Request, Sampling


class LearnerRank:
    """One rank of the learner.

    Args:
        settings: the configuration as JSON.
        folder: where the driver runs, for relative paths.
        rank, size: of the group.
    """

    def __init__(self, settings: str, folder: str, rank: int, size: int) -> None:
        go_to(folder)
        self.config, self.rank, self.size = received(settings), rank, size
        self.store: Any = None
        self.member: Member | None = None

    def surroundings(self) -> dict[str, str]:
        """As `surroundings.surroundings`."""
        return surroundings()

    def alive(self) -> float:
        """Answer while another method runs; returns `peak_memory`."""
        return peak_memory()

    def sees(self, path: str) -> bool:
        """Whether the path exists for this process."""
        return Path(path).exists()

    def address(self, driver: str) -> tuple[str, int]:
        """Host and port of the store that rank 0 keeps for all ranks.

        Args:
            driver: address of the machine where the driver runs.
        """
        host = own_address(driver)
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def start(self, address: tuple[str, int], weights: Mapping[str, Tensor] | None) -> None:
        """Load the model, join the other ranks and take rank 0's weights.

        Args:
            weights: what the run begins with, on rank 0.
        """
        limit_s = self.config.distributed.timeout_s
        use_route(address[0])
        if self.store is None:
            self.store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=limit_s))
        policy = load_configured(self.config)
        select_device(self.config, policy)
        if weights is not None:
            set_weights(policy.model, weights)
        world = World(self.store, self.rank, self.size, timeout_s=limit_s)
        algorithm = bind(self.config.algorithm.name, self.config.algorithm.overrides())
        name = algorithm.second_learner
        # A copy of the policy has to be made before the policy's weights are sharded.
        second = None if name is None else second_model(self.config, policy, name)
        self.member = make_member(self.config, algorithm, policy, world=world, samples=False)
        self.member.second_model = second

    def make_second(
        self, name: str, weights: Mapping[str, Tensor] | None, settings: Mapping[str, Any]
    ) -> None:
        """Make this rank's part of the second learner.

        Args:
            weights: of its model, on rank 0.
            settings: as for `second_learner`.
        """
        assert self.member is not None and self.member.second_model is not None
        if weights is not None:
            set_weights(self.member.second_model.model, weights)
        self.member.make(name, **settings)

    def call(self, name: str, given: bytes) -> bytes | None:
        """As `Member.perform`, packed; only rank 0 returns its result."""
        assert self.member is not None
        result = self.member.perform(name, unpacked(given))
        return packed(result) if self.rank == 0 else None

    def ship(self) -> tuple[int, Shipment | None]:
        """The version, and on rank 0 the present weights with the means to check them."""
        assert self.member is not None
        weights = self.member.publish()
        self.member.check_all_equal(weights)
        return weights.version, shipment(weights) if self.rank == 0 else None


class Replica:
    """A sampler with its own copy of the model.

    Args:
        settings: the configuration as JSON.
        folder: where the driver runs, for relative paths.
    """

    def __init__(self, settings: str, folder: str) -> None:
        go_to(folder)
        self.config: Config = received(settings)
        self.policy = load_configured(self.config)
        select_device(self.config, self.policy)
        self.engine = sampling_engine(self.config, self.policy)
        self.writer = ContinuousWriter(self.engine)
        self.fault: TransferError | None = None

    def surroundings(self) -> dict[str, str]:
        """As `surroundings.surroundings`."""
        return surroundings()

    def alive(self) -> float:
        """Answer while another method runs; returns `peak_memory`."""
        return peak_memory()

    def exact_continuation(self) -> bool:
        """As `Engine.exact_continuation`."""
        return self.engine.exact_continuation

    def publish(self, weights: Shipment, version: int) -> Metrics:
        """Sample from these weights from now on, completions in progress included, after checking
        that they arrived unchanged and that the engine computes with them.

        Returns:
            "canary_gap" as of `canary_gap`, and "seconds.weights", the time it took.

        Raises:
            TransferError: they did not arrive as they were sent; no completion is returned from
                then on.
        """
        start = time.perf_counter()

        def take_over() -> Metrics:
            try:
                return self._take_over(weights, version)
            except RunError as error:
                self.fault = TransferError(str(error))
                raise self.fault from error

        metrics = self.writer.between_steps(take_over)
        return {**metrics, "seconds.weights": time.perf_counter() - start}

    def _take_over(self, weights: Shipment, version: int) -> Metrics:
        model: Any = self.policy.model
        accept(model, weights, version=version)
        # The model's own: vLLM's engine disturbs them to see that they arrive there.
        arrived = PublishedWeights(version=version, named=dict(model.named_parameters()))
        metrics = self.engine.publish(arrived)
        if "canary_gap" in metrics:  # The engine has a canary of its own.
            return metrics
        own = self.engine.engine if isinstance(self.engine, ToolEngine) else self.engine
        return {**metrics, "canary_gap": check_canary(own, self.policy, version=version)}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Group]:
        """The groups of some requests, which take precedence over completions in progress."""
        groups = self.writer.between_steps(lambda: list(self.engine.generate(requests, sampling)))
        return self._sampled(groups)

    def write(self, request: Request, sampling: Sampling, limits: Limits) -> Group:
        """The group of a request, sampled together with those of other threads."""
        return self._sampled(self.writer.write(request, sampling, limits))

    def _sampled(self, found: Any) -> Any:
        """Completions, unless they may come from weights that did not arrive as they were sent."""
        if self.fault is not None:
            raise self.fault
        return found

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


@torch.no_grad()
def set_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Overwrite parameters by name."""
    own = dict(model.named_parameters())
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def go_to(folder: str) -> None:
    """Change to the driver's folder, if this machine has it."""
    if Path(folder).is_dir():
        os.chdir(folder)
