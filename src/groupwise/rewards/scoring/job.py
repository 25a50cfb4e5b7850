"""What the workers of rewards do, in a form that can be sent to them."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError
from groupwise.rewards.scoring.adapters import Place, inner, make_ready
from groupwise.rewards.scoring.pipeline import Composition, RewardComponent, run

Stages = tuple[tuple[RewardComponent, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RewardJob:
    """Runs the parts of a reward.

    Attributes:
        first: a value ends a call (see `run`).
        prepare: the stage whose reward is made ready first; the trainer is told how that went.
    """

    stages: Stages
    first: bool
    prepare: int | None

    def begin(self) -> bytes | None:
        """[None, ""], or the kind of error and its message; None where nothing is made ready."""
        if self.prepare is None:
            return None
        for part in self.stages[self.prepare]:
            try:
                make_ready(part.reward)
            except Exception as error:
                return json.dumps([type(error).__name__, f"{part.label}: {error}"]).encode()
        return json.dumps([None, ""]).encode()

    def answer(self, message: bytes) -> bytes:
        """The result of a call."""
        call = pickle.loads(message)
        result = run(self.stages[call.stage], call, first=self.first)
        return json.dumps([result.values, result.seconds, result.failure, result.failures]).encode()


def _parts(composition: Composition, *, place: Place, stage: int | None) -> list[RewardComponent]:
    chosen = [p for n, parts in enumerate(composition.stages) if stage in (None, n) for p in parts]
    return [part for part in chosen if part.place == place]


def _modules(composition: Composition, *, place: Place, stage: int | None) -> list[str]:
    """What is imported before any worker is forked."""
    parts = _parts(composition, place=place, stage=stage)
    asked = [name for part in parts for name in getattr(inner(part.reward), "imports", ())]
    return [*(["groupwise.types"] if any("group" in p.reward.names for p in parts) else []), *asked]


def worker_setup(
    composition: Composition,
    *,
    place: Place = "anywhere",
    stage: int | None = None,
    memory_mb: int | None = None,
) -> dict[str, Any]:
    """What some workers run, in a form that can be sent to another process.

    Args:
        composition: the reward.
        place: of the parts that they run.
        stage: only the parts of this stage; None for those of all stages.
        memory_mb: address space that a worker may use beyond what it needs to start.

    Raises:
        UsageError: a function that another process cannot import.
    """
    job = RewardJob(
        stages=picklable(composition, place=place, stage=stage),
        first=composition.combination.stops_at_first,
        prepare=stage,
    )
    return {
        "job": pickle.dumps(job),
        "modules": _modules(composition, place=place, stage=stage),
        "memory": memory_mb,
    }


def picklable(
    composition: Composition, *, place: Place = "anywhere", stage: int | None = None
) -> Stages:
    """The stages for some workers; parts that run elsewhere are left out.

    Args:
        place: of the parts that they run.
        stage: only the parts of this stage; None for those of all stages.

    Raises:
        UsageError: a function that another process cannot import.
    """
    chosen = _parts(composition, place=place, stage=stage)
    for part in chosen:
        function = getattr(part.reward, "function", part.reward)
        try:
            pickle.dumps(part)
            reachable = getattr(function, "__module__", "") != "__main__"
        except Exception as error:
            raise UsageError(
                f"reward {part.label}: cannot be sent to worker processes ({error}); define it at "
                "the top level of a module, or score in this process with workers = 0."
            ) from None
        if not reachable:
            raise UsageError(
                f"reward {part.label}: is defined in the script itself, which worker processes "
                "cannot import; move it to a module, or score in this process with workers = 0."
            )
    return tuple(tuple(part for part in parts if part in chosen) for parts in composition.stages)
