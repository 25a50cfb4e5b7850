"""A run to be done, as one process hands it to another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from groupwise.experiments.results import Result


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of an experiment that is to be done.

    Attributes:
        recipe, overrides: its configuration.
        splits: held-out splits to measure.
        result: which run it is; its curve and its evaluations are filled in.
        place: file of the result.
        base: folder in which measurements of the model before training are shared.
        steps: how many it is expected to take.
        axis: what a budget counts.
        budget: the run ends at the first step that has used so much; None ends it by steps alone.
    """

    recipe: str
    overrides: tuple[str, ...]
    splits: tuple[str, ...]
    result: Result
    place: Path
    base: Path
    steps: int
    axis: Literal["tokens", "seconds"] = "tokens"
    budget: float | None = None

    def line(self) -> str:
        """The job as a line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def read(cls, line: str) -> Job:
        """The job of such a line."""
        values = json.loads(line)
        values |= {key: Path(values[key]) for key in ("place", "base")}
        values |= {key: tuple(values[key]) for key in ("overrides", "splits")}
        return cls(**{**values, "result": Result(**values["result"])})
