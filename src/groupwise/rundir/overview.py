"""A folder of runs as a table: the state and progress of each run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.errors import RunError, UsageError
from groupwise.rundir.files import read_lines


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """One run directory.

    Attributes:
        name: its path below the folder.
        algorithm: of its configuration; "?" where that cannot be read.
        state: "running" while a process holds its lock; "finished" with a final model, or with the
            result of a comparison; "damaged" where its files cannot be read; otherwise "stopped".
        step, steps: done, and planned.
        reward: mean reward of the last step.
        held_out: greedy accuracy of the last evaluation.
        seconds: time of all steps.
    """

    name: str
    algorithm: str = "?"
    state: Literal["running", "finished", "stopped", "damaged"] = "stopped"
    step: int = 0
    steps: int | None = None
    reward: float | None = None
    held_out: float | None = None
    seconds: float = 0.0


def learned_by(config: Mapping[str, Any]) -> str | None:
    """What a run learned by, from the settings in its `config.json`: its algorithm, or the loss
    that stands in its place; None where they do not say.

    Example:
        >>> learned_by({"algorithm": {"name": "grpo"}})
        'grpo'
        >>> learned_by({"algorithm": {"name": "grpo"}, "learned_by": "logistic"})
        'logistic'
    """
    section = config.get("learned_by", config.get("algorithm"))
    name = section.get("name") if isinstance(section, Mapping) else section
    return None if name is None else str(name)


def overview(folder: str | Path) -> list[RunOverview]:
    """The runs below a folder, by name; the folder itself may be one.

    Raises:
        UsageError: there is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"folder = {str(folder)!r}: must be a folder; it does not exist.")
    places = sorted({path.parent for path in root.rglob("metrics.jsonl")})
    return [_read(place, name=str(place.relative_to(root))) for place in places]


def _read(place: Path, *, name: str) -> RunOverview:
    name = place.resolve().name if name == "." else name
    config = _config(place / "config.json")
    try:
        rows = list(read_lines(place / "metrics.jsonl"))
        evaluations = _lines(place / "evaluations.jsonl")
    except (OSError, RunError):
        return RunOverview(name=name, state="damaged", **config)
    last: Mapping[str, Any] = rows[-1] if rows else {}
    if _held(place / ".lock"):
        state = "running"
    else:
        state = "finished" if (place / "final").is_dir() or _compared(place) else "stopped"
    return RunOverview(
        name=name,
        state=state,
        step=int(last.get("step") or 0),
        reward=last.get("reward"),
        held_out=_held_out(evaluations),
        seconds=sum(float(row.get("seconds") or 0) for row in rows),
        **config,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path)) if path.exists() else []


def _held_out(evaluations: Sequence[Mapping[str, Any]]) -> float | None:
    """Greedy accuracy of the last evaluation, of the split "held_out" if there are several."""
    held_out = [row for row in evaluations if row.get("split") == "held_out"]
    last: Mapping[str, Any] = [{}, *evaluations, *held_out][-1]
    cell = (last.get("figures") or {}).get("greedy")
    return cell.get("value") if isinstance(cell, Mapping) else cell


def _config(path: Path) -> dict[str, Any]:
    """Algorithm and number of steps of a run, as far as they are known."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        return {"algorithm": learned_by(config) or "?", "steps": int(config["steps"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _compared(run: Path) -> bool:
    """Whether a comparison holds the run's result, which stands in for its final model: of
    `runs/grpo/seed-3`, `results/grpo-seed-3.json`."""
    run = run.resolve()
    for folder in run.parents:
        if (folder / "experiment.toml").is_file() and run.is_relative_to(folder / "runs"):
            arm = run.parent.relative_to(folder / "runs")
            return _finished(folder / "results" / f"{arm}-{run.name}.json")
    return False


def _finished(result: Path) -> bool:
    try:
        return json.loads(result.read_text(encoding="utf-8"))["status"] == "finished"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _held(path: Path) -> bool:
    """Whether another process holds a run's lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
