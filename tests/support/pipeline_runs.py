"""Pipelines that are killed, and the files that they promise."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from groupwise.pipelines import Pipeline, run_pipeline
from groupwise.pipelines.running import LOG
from small_runs import Quiet

VOLATILE = {LOG, ".lock", "config.json", "metrics.jsonl", "report.html"}
"""Files that name times."""


def content(folder: Path) -> dict[str, bytes]:
    """The files that a pipeline promises: rows, models, records and the report."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in VOLATILE
        and path.suffix != ".md"
        and not {"checkpoints", "journal", "rollouts", "best"} & {*path.parts}
    }


def killed(pipeline: Pipeline, seconds: float) -> bool:
    """Run in a child that is killed after some time; whether it was still running."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            run_pipeline(pipeline, progress=Quiet())
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
