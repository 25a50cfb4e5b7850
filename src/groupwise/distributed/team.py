"""Rank 0 leads: it runs the loop, and the other ranks do their share of each operation.

Rank 0 sends the name and the arguments of an operation, then all ranks perform it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from groupwise.algorithms.binding import POLICY
from groupwise.distributed.asked import AskedLearner
from groupwise.distributed.learner import DistributedLearner
from groupwise.distributed.objectives import NamedObjective, built
from groupwise.distributed.weights import some, take_over
from groupwise.distributed.world import World
from groupwise.errors import RunError
from groupwise.models import Policy
from groupwise.types import (
    Batch,
    Engine,
    Group,
    Limits,
    Metrics,
    Request,
    Sampling,
    Update,
    WeightsRef,
)


class Member:
    """The operations that one rank performs on request.

    Args:
        world: the group of processes.
        learner: this rank's part of the policy's learner.
        engine: samples this rank's share of the prompts; None where rank 0 samples alone.
        sampler: the model of the engine, if the learner does not share it.
        second: makes this rank's part of the second learner of its model.

    Attributes:
        second_model: what the second learner trains; None where the run has none.
    """

    def __init__(
        self,
        world: World,
        learner: DistributedLearner,
        engine: Engine | None,
        *,
        sampler: Policy | None,
        second: Callable[..., DistributedLearner] | None = None,
    ) -> None:
        self.world, self.engine = world, engine
        self.sampler, self.second = sampler, second
        self.second_model: Policy | None = None
        self.learners = {POLICY: learner}
        self.requests: list[list[Request]] | None = None
        self._moved: dict[str, Callable[[], float]] = {}
        self._weights: WeightsRef | None = None

    @property
    def learner(self) -> DistributedLearner:
        """The policy's."""
        return self.learners[POLICY]

    def make(self, name: str, **settings: Any) -> None:
        """Make the second learner."""
        assert self.second is not None and self.second_model is not None
        self.learners[name] = self.second(self.second_model, **settings)

    def perform(self, name: str, given: Mapping[str, Any]) -> Any:
        """Call a method of this class, or else of the learner that `given` names as `of`."""
        if hasattr(self, name):
            return getattr(self, name)(**given)
        own = dict(given)
        return getattr(self.learners[own.pop("of")], name)(**own)

    def update(self, batch: Batch, objective: NamedObjective, of: str) -> Update:
        """As `Learner.update`."""
        return self.learners[of].update(batch, built(objective))

    def watch_movement(self, of: str) -> None:
        """Begin to watch the weights."""
        self._moved[of] = self.learners[of].movement()

    def moved(self, of: str) -> float:
        """The share of parameters that have not changed since."""
        return self._moved[of]()

    def publish(self) -> WeightsRef:
        """The present weights, whole on every rank."""
        self._weights = self.learner.publish()
        return self._weights

    def renew(self) -> Metrics:
        """Sample from the weights that were published last.

        Raises:
            RunError: a rank has other weights than rank 0.
        """
        if self.learner.sharding == "none" or self._weights is None:
            self.publish()
        weights, self._weights = self._weights, None
        assert weights is not None
        self.check_all_equal(weights)
        if self.sampler is not None:
            take_over(self.sampler.model, weights)
        return {} if self.engine is None else self.engine.publish(weights)

    def check_all_equal(self, weights: WeightsRef) -> None:
        """As `check_equal`, for the policy's weights and those of the second learner."""
        self.check_equal(weights)
        for name, learner in self.learners.items():
            if name != POLICY and learner.sharding == "none":
                self.check_equal(learner.publish())

    def check_equal(self, weights: WeightsRef) -> None:
        """Whether all ranks have the same weights: unless they are sharded, each rank takes its own
        optimizer step.

        Raises:
            RunError: a rank has other weights than rank 0.
        """
        if self.learner.sharding == "full" or self.world.size == 1:
            return
        digests = {name: weights.digest(name) for name in weights.manifest}
        first, *others = self.world.gather(digests, "the digests of the weights")
        for rank, theirs in enumerate(others, 1):
            if wrong := [name for name in first if first[name] != theirs.get(name)]:
                raise RunError(
                    f"rank {rank} has other weights than rank 0 at version {weights.version} "
                    f"({some(wrong)}); machines of different kinds round differently. Set "
                    "distributed.sharding = 'full', where every weight is updated once."
                )

    def generate(self, sampling: Sampling, limits: Limits | None) -> Iterator[Group]:
        """Sample from this rank's share of the prompts. Rank 0 is given everyone's groups, its own
        as they finish."""
        share = self.world.scatter(self.requests, "prompts to sample from")
        assert self.engine is not None
        name = "completions of the other ranks"
        if self.world.leads:
            yield from self.engine.generate(share, sampling, limits)
            for groups in self.world.collect([], name):
                yield from groups
            return
        with self.world.alive():
            own = list(self.engine.generate(share, sampling, limits))
        self.world.collect(own, name)

    def close(self) -> None:
        """End what the engine holds."""
        if self.engine is not None:
            self.engine.close()


def follow(member: Member) -> None:
    """Perform the operations that rank 0 asks for until it releases this rank.

    Raises:
        RunError: rank 0 was lost.
    """
    world = member.world
    try:
        while (command := world.command()) is not None:
            name, given = command
            world.meet(f"all ranks to begin {name!r}")
            with world.waiting(f"the other ranks in {name!r}"):
                result = member.perform(name, given)
                if isinstance(result, Iterator):
                    deque(result, maxlen=0)
    except BaseException as error:
        world.failed(error)
        raise
    finally:
        member.close()


class Leader:
    """Rank 0's side of the group.

    Args:
        member: rank 0's own part.

    Attributes:
        policy: the policy's learner.
    """

    def __init__(self, member: Member) -> None:
        self.member, self.world = member, member.world
        self.policy = self._learner(POLICY)
        self._broken: str | None = None

    def ask(self, name: str, given: Mapping[str, Any] | None = None, /, **local: Any) -> Any:
        """Have all ranks perform an operation (`Member.perform`); returns what rank 0's returns.

        Args:
            given: arguments that are sent to all ranks.
            local: arguments that stay here; the others are given empty ones.

        Raises:
            RunError: a rank was lost, and which.
        """
        own = given or {}
        with self.together():
            self.world.command((name, {**own, **dict.fromkeys(local, {})}))
            self.world.meet(f"all ranks to begin {name!r}")
            with self.world.waiting(f"the other ranks in {name!r}"):
                return self.member.perform(name, {**own, **local})

    def together(self) -> _Together:
        """A context for operations of all ranks. After an error in it the ranks are out of sync, so
        each later operation fails with the same message.
        """
        return _Together(self)

    def close(self) -> None:
        """Release the other ranks."""
        try:
            if self._broken is None:
                self.world.command(None)
        except RunError:
            pass  # They have ended already.
        finally:
            self.world.close()

    def second(self, name: str, **settings: Any) -> AskedLearner:
        """Make the second learner on all ranks.

        Args:
            settings: as for `second_learner`.
        """
        self.ask("make", {"name": name, **settings})
        return self._learner(name)

    def _learner(self, name: str) -> AskedLearner:
        own = self.member.learners[name]
        whole = own.sharding == "none"
        publish = self.member.publish if whole else partial(self.ask, "publish")
        return AskedLearner(name, ask=self.ask, publish=publish, own=own if whole else None)


class _Together:
    """The context of `Leader.together`."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader

    def __enter__(self) -> None:
        if self.leader._broken is not None:
            raise RunError(self.leader._broken)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.leader._broken = str(error) or "interrupted between operations of all ranks"
