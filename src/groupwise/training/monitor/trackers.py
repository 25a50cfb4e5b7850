"""Experiment trackers behind one small protocol; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.errors import UsageError, suggest


@runtime_checkable
class Tracker(Protocol):
    """Receives every metric of a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class TensorBoard:
    """Event files for TensorBoard, in the folder `tensorboard` of the run directory."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in settings.items()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named after the run directory; WANDB_… variables apply."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project="groupwise", name=folder.name, dir=str(folder), config=dict(settings)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics under the step."""
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def make_trackers(
    names: Sequence[str], folder: str | Path, settings: Mapping[str, Any]
) -> tuple[Tracker, ...]:
    """The trackers asked for.

    Raises:
        UsageError: unknown name, or its package is not installed.
    """
    made: list[Tracker] = []
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"logging.trackers = {name!r}: no such tracker; " + suggest(name, TRACKERS)
            )
        try:
            made.append(TRACKERS[name](Path(folder), settings))
        except ImportError as error:
            raise UsageError(
                f"logging.trackers = {name!r}: needs the package {error.name}; "
                "pip install 'groupwise[trackers]'."
            ) from None
    return tuple(made)
