"""A pipeline for several seeds, and its figures over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.evaluation import paired_seeds, seed_mean
from groupwise.evaluation.intervals import Estimate
from groupwise.evaluation.tables import is_share
from groupwise.pipelines.eval_stage import sections_of
from groupwise.pipelines.plan import Pipeline
from groupwise.pipelines.resolved import starts_of
from groupwise.pipelines.running import RECORD, REPORTS, checked_plan, run_pipeline
from groupwise.pipelines.summary import table_lines
from groupwise.rundir.files import replace_text
from groupwise.rundir.foreign import refuse_foreign_files, refuse_linked_folders


def run_seeds(
    pipeline: Pipeline, *, seeds: int, first: str | None = None, only: str | None = None
) -> Path:
    """Run a pipeline for several seeds, each in its own folder `seed-N`.

    Args:
        pipeline: its seed is the first one; 0 where it has none.
        seeds: how many; they are counted up.
        first, only: as in `run_pipeline`.

    Returns:
        The report over seeds: every evaluation with Student's t intervals, and the differences of
        each model from the last one, paired by seed.

    Raises:
        UsageError: as `run_pipeline`, for any seed before the first stage of the first one.
    """
    runs = of_seeds(pipeline, seeds)
    if not any(run.output.exists() for run in runs):
        refuse_foreign_files(pipeline.output, REPORTS)
    refuse_linked_folders(pipeline.output)
    for run in runs:
        checked_plan(run, first=first, only=only)
    for run in runs:
        run_pipeline(run, first=first, only=only)
    return report_over_seeds(pipeline, runs)


def of_seeds(pipeline: Pipeline, seeds: int) -> list[Pipeline]:
    """The pipeline of each seed, in its own folder `seed-N`."""
    start = pipeline.seed or 0
    return [
        replace(pipeline, seed=seed, output=pipeline.output / f"seed-{seed}")
        for seed in range(start, start + seeds)
    ]


def report_over_seeds(pipeline: Pipeline, runs: Sequence[Pipeline]) -> Path:
    """Write `report.json` and `report.md` over the evaluations that every seed has finished."""
    lines = [f"# {pipeline.title}, {len(runs)} seeds"]
    values: dict[str, Any] = {"title": pipeline.title, "seeds": [run.seed for run in runs]}
    for stage in pipeline.stages:
        if stage.kind.name != "eval":
            continue
        found = [_sections(run.output / stage.name / RECORD, stage.name) for run in runs]
        for section in found[0]:
            if not all(section in each for each in found):
                continue  # Not every seed has wrong answers to recover from.
            over, differences = combined([each[section] for each in found])
            lines += ["", f"## {section}", "", *table_lines(over)]
            *_, last = over
            lines += ["", f"Differences from {last}, paired by seed:", ""]
            lines += table_lines(differences)
            values[section] = {"models": over, "differences": differences}
            gains = gains_of([each[section] for each in found], starts_of(pipeline))
            if gains:
                lines += ["", "Differences from the model that a stage started from:", ""]
                lines += table_lines(gains)
                values[section]["gains"] = gains
    path = pipeline.output / "report.md"
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    replace_text(pipeline.output / "report.json", text)
    replace_text(path, "\n".join(lines) + "\n")
    return path


Cells = dict[str, dict[str, dict[str, float | None]]]


def combined(runs: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> tuple[Cells, Cells]:
    """Figures over seeds, and differences of each model from the last one, paired by seed.

    Args:
        runs: by seed: figures by model and name.

    Example:
        >>> runs = [{"a": {"greedy": {"value": v + .1}}, "b": {"greedy": {"value": v}}}
        ...         for v in (.5, .6, .7)]
        >>> over, differences = combined(runs)
        >>> round(over["b"]["greedy"]["value"], 3), round(differences["a"]["greedy"]["value"], 3)
        (0.6, 0.1)
    """
    models = list(runs[0])
    *others, last = models
    values = {
        model: {
            name: [run[model][name]["value"] for run in runs]
            for name in runs[0][model]
            if all(run[model].get(name, {}).get("value") is not None for run in runs)
        }
        for model in models
    }
    over: Cells = {
        model: {name: _mean(name, each).as_dict() for name, each in figures.items()}
        for model, figures in values.items()
    }
    differences: Cells = {}
    for model in others:
        differences[model] = {}
        for name in values[model]:
            if name in values[last]:
                found = paired_seeds(values[model][name], values[last][name])
                differences[model][name] = found.difference.as_dict()
    return over, differences


def gains_of(
    runs: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]], starts: Mapping[str, str]
) -> Cells:
    """Differences of each model from the one that its stage started from, paired by seed, where
    that one was measured and is not the last, with which all are compared.

    Args:
        runs: by seed: figures by model and name.
        starts: as `starts_of` finds them.

    Example:
        >>> runs = [{n: {"greedy": {"value": v + k}} for n, k in (("b", .3), ("a", .1), ("0", 0))}
        ...         for v in (.5, .6, .7)]
        >>> found = gains_of(runs, {"b": "a", "a": "0"})
        >>> {k: round(v["greedy"]["value"], 3) for k, v in found.items()}
        {'b − a': 0.2}
    """
    gains: Cells = {}
    *others, _ = runs[0]
    for model in others:
        if (start := starts.get(model)) in others:
            pair = [{model: run[model], start: run[start]} for run in runs]
            gains[f"{model} − {start}"] = combined(pair)[1][model]
    return gains


def _mean(name: str, values: Sequence[float]) -> Estimate:
    found = seed_mean(values)
    return found.as_share() if is_share(name, values) else found


def _sections(path: Path, stage: str) -> Mapping[str, Any]:
    """The sections of an evaluation; none where it is not finished."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return sections_of(record["figures"], stage) if record.get("finished") else {}
