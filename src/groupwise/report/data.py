"""The data of a report: runs, read from their folders or made in memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError
from groupwise.evaluation import Estimate
from groupwise.report.text import number
from groupwise.rundir.overview import learned_by

# Larger rollout files would not fit into a page.
READ_LIMIT_BYTES = 64 * 2**20

Row = Mapping[str, Any]


_OF_A_RUN = ("metrics", "alarms")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run of a report.

    Attributes:
        label: name in legends and tables; runs that differ only in their seed share it.
        algorithm: row of the algorithm table.
        seed: of the run.
        metrics: one row per step: `{"step": 1, "accuracy": .5, "seconds": {"rollout": .8}}`.
        evaluations: rows `{"step", "split", "figures": {name: {"value", "low", "high"}}}`.
        alerts: rows `{"step", "alarm", "text"}` of the alerts that fired.
        timeline: rows `{"step", "spans": [[process, what, start, end]], "queue": {name: count}}`.
        samples: answers to fixed prompts, before and after:
            `{"step", "prompt": {"id", "text", "answer"}, "text", "correct"}`.
        rollouts: groups, as the lines of the rollout files.
        config: the resolved settings.
        skipped: number of damaged lines.
        unread: number of rollout files omitted for size.
        axis: unit of "step" in metrics and evaluations.
    """

    label: str
    algorithm: str
    seed: int
    metrics: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    alerts: Sequence[Row] = ()
    timeline: Sequence[Row] = ()
    samples: Sequence[Row] = ()
    rollouts: Sequence[Row] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0
    unread: int = 0
    axis: str = "steps"

    @classmethod
    def read(cls, run_dir: str | Path, *, label: str | None = None) -> RunData:
        """Read a run directory; damaged lines are counted and skipped, absent files are empty.

        Args:
            run_dir: folder with `metrics.jsonl` and, where there are, `evaluations.jsonl`,
                `rollouts/step-*.jsonl` and `config.json`.
            label: name in legends; None takes the algorithm's.

        Raises:
            UsageError: no such folder, or nothing of a run in it.
        """
        folder = Path(run_dir)
        if not folder.is_dir():
            raise UsageError(
                f"run = {str(run_dir)!r}: must be a run directory; the folder does not exist."
            )
        files = sorted((folder / "rollouts").glob("step-*.jsonl"))
        # A run that ended in its first step has nothing but the reason.
        if not files and not any((folder / f"{name}.jsonl").exists() for name in _OF_A_RUN):
            raise UsageError(
                f"run = {str(run_dir)!r}: must contain metrics.jsonl, alarms.jsonl or rollouts/; "
                "it has none of them."
            )
        metrics, skipped = _lines(folder / "metrics.jsonl")
        evaluations, more = _lines(folder / "evaluations.jsonl")
        alerts, cut = _lines(folder / "alarms.jsonl")
        timeline, torn = _lines(folder / "timeline.jsonl")
        chosen = _within(files, READ_LIMIT_BYTES)
        rollouts, lost = [], 0
        for file in chosen:
            rows, bad = _lines(file)
            rollouts += rows
            lost += bad
        config, broken = _config(folder / "config.json")
        algorithm = learned_by(config) or "run"
        return cls(
            label=label or algorithm,
            algorithm=algorithm,
            seed=int(number(config.get("seed")) or 0),
            metrics=_latest(metrics),
            evaluations=tuple(row for row in evaluations if isinstance(row.get("figures"), dict)),
            alerts=tuple(alerts),
            timeline=_latest(timeline),
            samples=tuple(_samples(evaluations)),
            rollouts=tuple(rollouts),
            config=config,
            skipped=skipped + more + lost + broken + cut + torn,
            unread=len(files) - len(chosen),
        )


def read_runs(folders: Sequence[str | Path]) -> list[RunData]:
    """Read several runs; runs of one algorithm and seed are labelled by their folders.

    Args:
        folders: run directories, each once.

    Raises:
        UsageError: as `RunData.read`, or a folder given twice.
    """
    places = [Path(folder).resolve() for folder in folders]
    if len(set(places)) < len(places):
        raise UsageError(f"runs = {', '.join(map(str, folders))}: must be different folders.")
    runs = [RunData.read(folder) for folder in folders]
    count = Counter((run.label, run.seed) for run in runs)
    twice = {label for (label, _), times in count.items() if times > 1}
    names = [place.name for place in places]
    short = len(set(names)) == len(names)
    return [
        replace(run, label=f"{run.label} {place.name if short else place}")
        if run.label in twice
        else run
        for run, place in zip(runs, places, strict=True)
    ]


def settings_of(run_dir: str | Path) -> dict[str, Any]:
    """The settings of a run; empty where its `config.json` cannot be read."""
    return _config(Path(run_dir) / "config.json")[0]


def figures_at(run: RunData, *, last: bool) -> dict[str, dict[str, Estimate]]:
    """Figures by split from a run's last evaluation of each split, or from those at step 0.

    Example:
        >>> row = {"step": 0, "split": "held_out", "figures": {"greedy": {"value": .1}}}
        >>> run = RunData(label="a", algorithm="a", seed=0, evaluations=[row])
        >>> figures_at(run, last=False)["held_out"]["greedy"].value, figures_at(run, last=True)
        (0.1, {})
    """
    steps = {str(row.get("split")): 0.0 for row in run.evaluations}
    if last:
        for row in run.evaluations:
            split = str(row.get("split"))
            steps[split] = max(steps[split], number(row.get("step")) or 0.0)
    found: dict[str, dict[str, Estimate]] = {}
    for row in run.evaluations:
        split, step = str(row.get("split")), number(row.get("step"))
        if step is not None and step == steps[split] and (step > 0) is last:
            figures = {str(name): estimate(given) for name, given in row["figures"].items()}
            found.setdefault(split, {}).update({n: e for n, e in figures.items() if e})
    return found


def estimate(given: object) -> Estimate | None:
    """An estimate from `{"value", "low", "high"}` or from a bare number; None from anything else.

    Example:
        >>> print(estimate({"value": .5, "low": .4, "high": .6}), estimate("?"))
        0.5 [0.4, 0.6] None
    """
    if isinstance(given, Estimate):
        return given
    row = given if isinstance(given, Mapping) else {"value": given}
    value, low, high = (number(row.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return None
    unknown = float("nan")
    ends = (unknown, unknown) if low is None or high is None else (low, high)
    return Estimate(value=value, low=ends[0], high=ends[1])


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a JSON Lines file, and the number of other lines."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return [], 0
    rows, skipped = [], 0
    for line in text.split("\n"):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                skipped += 1
    return rows, skipped


def _config(path: Path) -> tuple[dict[str, Any], int]:
    """The settings of a run, which `config.json` wraps with versions and hardware."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}, 0
    except (ValueError, RecursionError):
        return {}, 1
    if not isinstance(found, dict):
        return {}, 1
    inner = found.pop("config", None)
    return found | (inner if isinstance(inner, dict) else {}), 0


def _latest(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Rows by ascending step; of a repeated step, the last row."""
    by_step = {step: row for row in rows if (step := number(row.get("step"))) is not None}
    return tuple(by_step[step] for step in sorted(by_step))


def _samples(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers stored with the evaluations."""
    return [
        {"step": row.get("step"), "split": row.get("split"), **sample}
        for row in evaluations
        if isinstance(row.get("samples"), list)
        for sample in row["samples"]
        if isinstance(sample, dict)
    ]


def _within(files: list[Path], limit: int) -> list[Path]:
    """Evenly spaced files, with both ends, whose total size is within the limit."""
    chosen = files
    while len(chosen) > 2 and sum(file.stat().st_size for file in chosen) > limit:
        chosen = [*chosen[:-1:2], chosen[-1]]
    return chosen
