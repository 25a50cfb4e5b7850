"""Jobs: runs passed from one process to another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from groupwise.experiments.results import Result


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of an experiment.

    Attributes:
        recipe, overrides: its configuration.
        splits: held-out splits to measure.
        result: identifies the run; curve and evaluations are filled in.
        place: file of the result.
        base: folder of the evaluations before training, which runs share.
        steps: expected number of steps.
        axis: unit of the budget.
        budget: the run ends at the first step that has used this much; None sets no budget.
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
