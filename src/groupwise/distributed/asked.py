"""A learner whose work is done by several ranks, as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from groupwise.algorithms.binding import POLICY
from groupwise.distributed.learner import DistributedLearner
from groupwise.distributed.objectives import named
from groupwise.settings import OptimizerSettings
from groupwise.types import Batch, Objective, Update, WeightsRef


class AskedLearner:
    """A `Learner` that asks all ranks for each operation.

    Args:
        name: of the learner among those that the ranks train.
        ask: has all ranks perform an operation with arguments that all of them are sent, and
            with keyword arguments for rank 0 alone; returns what rank 0's returns.
        publish: as `Learner.publish`.
        own: rank 0's part, if it is in this process and holds all weights; the other ranks are
            then not asked for what it can tell alone.
    """

    def __init__(
        self,
        name: str,
        *,
        ask: Callable[..., Any],
        publish: Callable[[], WeightsRef],
        own: DistributedLearner | None = None,
    ) -> None:
        self.name, self.own = name, own
        self.version = 0
        self._asks, self._publish = ask, publish

    def evaluate(self, batch: Batch, names: Collection[str]) -> Mapping[str, Tensor]:
        """As `Learner.evaluate`."""
        return self._ask("evaluate", {"batch": batch, "names": set(names)}) if names else {}

    def update(self, batch: Batch, objective: Objective) -> Update:
        """As `Learner.update`.

        Raises:
            UsageError: the objective does not consist of registered functions.
        """
        given = {"batch": batch, "objective": named(objective)}
        self.version += 1  # Before the step: one that is interrupted counts as begun.
        update = self._ask("update", given)
        self.version = update.version
        return update

    def restart(self, optimizer: OptimizerSettings, *, total_steps: int) -> None:
        """As `TorchLearner.restart`."""
        self._ask("restart", {"optimizer": optimizer, "total_steps": total_steps})
        self.version = 0

    def replace_reference(self) -> None:
        """As `TorchLearner.replace_reference`."""
        self._ask("replace_reference")

    def reset_optimizer(self) -> None:
        """As `TorchLearner.reset_optimizer`."""
        self._ask("reset_optimizer")

    def publish(self) -> WeightsRef:
        """As `Learner.publish`; engines sample from the policy alone."""
        assert self.name == POLICY, f"{self.name!r} is not what engines sample from"
        return self._publish()

    def trained(self) -> Mapping[str, Tensor]:
        """As `Learner.trained`."""
        return self._ask("trained") if self.own is None else self.own.trained()

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """As `Learner.set_trained`."""
        self._ask("set_trained", weights=dict(weights))

    def state(self) -> dict[str, Any]:
        """As `Learner.state`."""
        return self._ask("state") if self.own is None else self.own.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """As `Learner.restore`."""
        self._ask("restore", state=dict(state))
        self.version = int(state["version"])

    def movement(self) -> Callable[[], float]:
        """As `Learner.movement`."""
        if self.own is not None:
            return self.own.movement()
        self._ask("watch_movement")
        return lambda: self._ask("moved")

    def save(self, path: str) -> None:
        """As `Learner.save`."""
        if self.own is not None:
            self.own.save(path)
        else:
            self._ask("save", {"path": str(Path(path).resolve())})

    def _ask(self, method: str, given: Mapping[str, Any] | None = None, /, **local: Any) -> Any:
        return self._asks(method, {**(given or {}), "of": self.name}, **local)
