"""A worker process that trains runs of an experiment, one at a time.

    python -m groupwise.experiments.worker

It reads a job per line of JSON, and writes a line per step and one for the end of the job. A run
continues from its last checkpoint if there is one. The process ends with its input. If its output
is closed, the current run writes a checkpoint first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from groupwise.config import Config, load
from groupwise.config.data import load_eval
from groupwise.errors import UsageError
from groupwise.experiments.jobs import Job
from groupwise.experiments.results import Result, hash_of, read_curve
from groupwise.models import base_fingerprint
from groupwise.rundir.files import read_lines, replace_text, surroundings
from groupwise.rundir.provenance import digest
from groupwise.training.callbacks import Callback
from groupwise.training.prepare import Prepared, prepare
from groupwise.training.resume import plain_settings
from groupwise.types import Metrics, Prompt

SHOWN = ("accuracy", "reward")
"""Metrics in the messages."""

OF_THE_BASE = ("model", "data", "sampling", "engine", "combine", "rewards", "evaluation", "warmup")
"""Sections that determine the evaluation before the first step."""


class Reporter:
    """Progress of a run as lines for the process that asked for it.

    Args:
        stream: where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def send(self, **message: Any) -> None:
        """Write a line."""
        print(json.dumps(message), file=self.stream, flush=True)

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step."""
        self.send(step=step, metrics={key: metrics[key] for key in SHOWN if key in metrics})

    def log(self, text: str) -> None:
        """Print a line to the log of the process."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


class Budget(Callback):
    """Ends a run that has used up its tokens or seconds.

    Args:
        axis: metric that is counted.
        limit: the budget; None is unlimited.
        used: what earlier attempts at the run have used.
    """

    def __init__(self, axis: str, *, limit: float | None, used: float = 0.0) -> None:
        self.axis, self.limit, self.used = axis, limit, used

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.limit is not None and self.used >= self.limit

    def should_stop(self, metrics: Metrics) -> bool:
        """Count a step; whether nothing is left after it."""
        self.used += metrics[self.axis]
        return self.spent


def held_out(job: Job) -> dict[str, Sequence[Prompt]]:
    """The held-out prompts of every split of a job that has any."""
    found = {}
    for split in job.splits:
        config = load(job.recipe, [*job.overrides, f"data.eval_split={json.dumps(split)}"])
        if prompts := load_eval(config):
            found[split] = prompts
    return found


def evaluate_base(job: Job, prepared: Prepared) -> None:
    """Log the evaluations before the first step, which all arms of a seed share."""
    config = plain_settings(prepared.config)
    basis = {name: config[name] for name in OF_THE_BASE}
    if config["warmup"] is not None:
        basis["seed"] = config["seed"]
    for split in prepared.splits:
        path = job.base / f"{split}-{digest(basis)}.json"
        if path.exists():
            row = json.loads(path.read_text(encoding="utf-8"))
        else:
            row = prepared.evaluate(split)
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")  # several arms of a seed may evaluate at once
            replace_text(new, json.dumps(row))
            new.replace(path)
        prepared.trainer.monitor.write_evaluation(0, row)
    prepared.trainer.evaluation.at_start = False  # It has just been done.


def train(job: Job, reporter: Reporter) -> Result:
    """Train a run, or the rest of it, and write its result.

    Raises:
        UsageError: a setting, a file or the run directory cannot be used.
        KeyboardInterrupt: after a signal; the run has a checkpoint.
    """
    config = load(job.recipe, job.overrides)
    folder = Path(config.output)
    told: dict[str, Any] = {}
    try:
        told |= _trained(job, config, reporter)
    except (UsageError, BrokenPipeError):
        raise
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split())
        told |= {"status": "failed", "error": f"{type(error).__name__}: {reason}"}
    result = replace(
        job.result,
        **told,
        config_hash=hash_of(config),
        curve=read_curve(folder / "metrics.jsonl"),
        evaluations=_evaluations(folder / "evaluations.jsonl", finished=not job.result.algorithm),
        versions=surroundings()["versions"],
    )
    result.write(job.place)
    if result.status == "finished":
        for name in ("checkpoints", "journal"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return result


def _trained(job: Job, config: Config, reporter: Reporter) -> dict[str, Any]:
    """Train to the end; returns the base model and what ended the run."""
    budget = Budget(job.axis, limit=job.budget)
    prepared = prepare(
        config,
        progress=reporter,
        name=job.result.name,
        eval_prompts=held_out(job),
        resume=True,
        callbacks=[budget],
    )
    try:
        if prepared.trainer.done == 0:
            evaluate_base(job, prepared)
        used = read_curve(Path(config.output) / "metrics.jsonl").get(job.axis) or [0.0]
        budget.used = used[-1] or 0.0
        finished_model = not job.result.algorithm
        if not budget.spent and not finished_model:
            prepared.trainer.run()
        return {
            "ended": "budget" if budget.spent else "steps",
            "base": base_fingerprint(prepared.policy.model),
        }
    finally:
        prepared.close()


def _evaluations(path: Path, *, finished: bool = False) -> list[dict[str, Any]]:
    """The evaluations without duplicates, which a resumed run may have.

    Args:
        finished: of a finished model, whose figures count as those after training.
    """
    rows = read_lines(path) if path.exists() else ()
    if finished:
        rows = ({**row, "step": 1} for row in rows)
    return list({(row["step"], row["split"]): row for row in rows}.values())


def main() -> int:
    """Run incoming jobs until there are no more."""
    jobs, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    # Output of libraries must not mix with the messages.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    reporter = Reporter(answers)
    try:
        for line in jobs:
            try:
                result = train(Job.read(line), reporter)
            except UsageError as error:
                reporter.send(ended="refused", error=str(error))
            else:
                reporter.send(ended=result.status, error=result.error)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # the run has its checkpoint
    return 0


if __name__ == "__main__":
    sys.exit(main())
