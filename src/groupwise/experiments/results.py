"""Result files: the learning curve and the evaluations of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from groupwise.config import Config
from groupwise.errors import RunError, UsageError
from groupwise.report import RunData
from groupwise.rundir.files import read_lines, replace_text
from groupwise.rundir.provenance import digest

FORMAT = 1

COLUMNS = (
    "accuracy",
    "reward",
    "length",
    "entropy",
    "kl",
    "grad_norm",
    "signal_share",
    "positive_share",
    "nonzero_share",
    "effective_samples",
    "truncated_share",
)
"""Metrics of the curve, beside step and the cumulative tokens and seconds."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of an experiment.

    Attributes:
        experiment: hash of the plan.
        arm, algorithm, seed, learning_rate: identify the run.
        tuning: whether it is a tuning run.
        status: "failed" after an error; its partial results are kept.
        error: message of a failed run.
        ended: whether it ended at its last step or its budget.
        config_hash: of all settings except the folder.
        curve: values per step by metric: `{"step": [1, 2], "accuracy": [.1, .2]}`; "tokens" and
            "seconds" are sums from the first step on.
        evaluations: rows `{"step", "split", "figures": {name: {"value", "low", "high"}}}`.
        versions: of Python and the main packages.
        base: fingerprint of the model that training started from; None where it is unknown. Runs of
            different bases are not paired.
    """

    experiment: str
    arm: str
    algorithm: str
    seed: int
    learning_rate: float
    tuning: bool = False
    status: Literal["finished", "failed"] = "finished"
    error: str | None = None
    ended: Literal["steps", "budget"] = "steps"
    config_hash: str = ""
    curve: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None

    @property
    def name(self) -> str:
        """The run in words."""
        rate = f" at {self.learning_rate:g}" if self.tuning else ""
        return f"{self.arm}{rate} seed {self.seed}"

    def used(self, axis: str) -> float:
        """Total "tokens", "seconds" or steps ("samples") of the run."""
        values = self.curve.get("step" if axis == "samples" else axis, ())
        return float((values[-1] if values else 0) or 0)

    def run_data(self, *, label: str | None = None) -> RunData:
        """The run as data of a report, under the name of its arm or another."""
        keys = [key for key in self.curve if key not in ("tokens", "seconds")]
        columns = zip(*(self.curve[key] for key in keys), strict=True)
        rows = [dict(zip(keys, row, strict=True)) for row in columns]
        return RunData(
            label=label or self.arm,
            algorithm=self.algorithm,
            seed=self.seed,
            metrics=rows,
            evaluations=self.evaluations,
        )

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            RunError: it cannot be written.
        """
        values = {"format": FORMAT, **vars(self)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}).") from None
        replace_text(path, json.dumps(values, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file.

        Raises:
            UsageError: the file is not a result, or of another format.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise ValueError
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{path}: is not the result of a run in format {FORMAT}; delete it to "
                "repeat the run."
            ) from None


def place(folder: Path, *, arm: str, seed: int, rate: float | None = None) -> Path:
    """Path of the result of a run; with a learning rate, of a tuning run.

    Example:
        >>> str(place(Path("x"), arm="grpo", seed=3))
        'x/results/grpo-seed-3.json'
    """
    if rate is None:
        return folder / "results" / f"{arm}-seed-{seed}.json"
    return folder / "results" / "tuning" / f"{arm}-lr-{rate:g}-seed-{seed}.json"


def read_results(folder: str | Path) -> list[Result]:
    """All results in the folder of an experiment, those of tuning last."""
    root = Path(folder) / "results"
    return [Result.read(p) for p in (*sorted(root.glob("*.json")), *sorted(root.glob("*/*.json")))]


def read_curve(path: Path) -> dict[str, list[float | None]]:
    """The curve of a run by metric; empty without steps.

    Args:
        path: `metrics.jsonl` of the run.
    """
    rows = list(read_lines(path)) if path.exists() else []
    if not rows:
        return {}
    curve: dict[str, list[float | None]] = {"step": [row["step"] for row in rows]}
    for key in COLUMNS:
        if any(row.get(key) is not None for row in rows):
            curve[key] = [_short(row.get(key)) for row in rows]
    for key in ("tokens", "seconds"):
        total = 0.0
        curve[key] = [_short(total := total + float(row.get(key) or 0)) for row in rows]
    return curve


def hash_of(config: Config) -> str:
    """Hash of the settings of a run.

    Defaults are excluded, so that a new setting in a later version keeps old hashes valid; so are
    imports, whose paths differ from machine to machine.
    """
    excluded = {"output", "imports"}
    return digest(config.model_dump(mode="json", exclude_defaults=True, exclude=excluded))


def _short(value: float | None) -> float | None:
    """The value with six significant digits; integers stay integers."""
    if value is None:
        return None
    if value == int(value):
        return int(value)
    return float(f"{value:.6g}")
