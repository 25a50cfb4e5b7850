"""Experiment trackers behind one small protocol; each is imported only when it is asked for."""

from __future__ import annotations

import html
import importlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.errors import UsageError, install_command, suggest
from groupwise.rundir.files import replace_text
from groupwise.types import ScoredGroups

IDS = "trackers.json"
"""File of the run directory with the ids of its runs at trackers."""
COLUMNS = ("step", "prompt", "completion", "answer", "reward", "status")
"""Columns of a table of completions."""
TABLE = "completions.json"
"""Name of the table of completions at MLflow."""
TABLE_ROWS = 32
"""Maximum rows of a table of completions; trackers keep every table."""

Row = tuple[int, str, str, str, float, str]


@runtime_checkable
class Tracker(Protocol):
    """Receives every metric of a run, and completions of some steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Completions of a step; a row has the values of `COLUMNS`."""
        ...

    def close(self) -> None:
        """Called at the end of the run."""
        ...


class TensorBoard:
    """Event files for TensorBoard, in the folder `tensorboard` of the run directory. A resumed run
    replaces the steps that it repeats."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], *, resume_at: int | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_at is None else resume_at + 1
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self.writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in settings.items()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Add the completions as a table in the tab Text."""
        lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
        text = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        self.writer.add_text("completions", text, step)

    def close(self) -> None:
        """Write what is buffered."""
        self.writer.close()


def kept_id(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """The id of a tracker's run, made on the first call and kept in the run directory, so that a
    resumed run continues the tracker's run too."""
    path = folder / IDS
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    if tracker not in known:
        known[tracker] = make()
        replace_text(path, json.dumps(known) + "\n")
    return str(known[tracker])


class WeightsAndBiases:
    """A run of Weights & Biases, named after the run directory; WANDB_… variables apply. A resumed
    run continues it, and does not send the steps again that the server already has."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], *, resume_at: int | None = None
    ) -> None:
        wandb = importlib.import_module("wandb")
        self.run = wandb.init(
            project="groupwise",
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            id=kept_id(folder, "wandb", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
        )
        self.first: int = self.run.step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics under the step."""
        if step >= self.first:
            self.run.log(dict(metrics), step=step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Add the completions as a table."""
        if step < self.first:
            return
        wandb = importlib.import_module("wandb")
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.run.log({"completions": table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class MLflow:
    """A run of MLflow, named after the run directory; MLFLOW_… variables apply. A resumed run
    continues it and adds only the steps that it lacks.

    Without MLFLOW_TRACKING_URI, MLflow's default location is used. The completions of an SQLite
    database are stored in the folder `mlruns` beside it.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], *, resume_at: int | None = None
    ) -> None:
        # Otherwise every table of completions draws a progress bar.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        mlflow = importlib.import_module("mlflow")
        self.entities = importlib.import_module("mlflow.entities")
        self.client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "groupwise")
        found = self.client.get_experiment_by_name(name)
        if found is None:
            place = _artifacts_of(mlflow.get_tracking_uri())
            experiment = self.client.create_experiment(name, artifact_location=place)
        else:
            experiment = found.experiment_id

        def create() -> str:
            run = self.client.create_run(experiment, run_name=folder.name).info.run_id
            values = {key: str(value)[:LONGEST_PARAMETER] for key, value in settings.items()}
            parameters = [self.entities.Param(key, value) for key, value in values.items()]
            self.client.log_batch(run, params=parameters)
            return run

        self.run = kept_id(folder, "mlflow", create)
        self.client.update_run(self.run, status="RUNNING")
        self.last = {
            name: max(point.step for point in self.client.get_metric_history(self.run, name))
            for name in self.client.get_run(self.run).data.metrics
        }
        self.last_table = 0
        if TABLE in [file.path for file in self.client.list_artifacts(self.run)]:
            table = self.client.load_table(experiment, TABLE, [self.run])
            self.last_table = int(table["step"].max())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics under the step, in one request."""
        now = time.time_ns() // 1_000_000
        named = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        new = [
            self.entities.Metric(name, value, now, step)
            for name, value in named.items()
            if step > self.last.get(name, -1)
        ]
        self.client.log_batch(self.run, metrics=new)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Append the completions to the table `completions.json`."""
        if step <= self.last_table:
            return
        data = {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)}
        self.client.log_table(self.run, data, TABLE)

    def close(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run)


def _artifacts_of(uri: str) -> str | None:
    """The folder beside an SQLite database; None leaves the choice to MLflow, which would put the
    files of a database into the working directory."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else (Path(path).resolve().parent / "mlruns").as_uri()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""Trackers by their names in `logging.trackers`."""
LONGEST_PARAMETER = 500
"""Characters of a setting that every MLflow server takes."""


def completion_rows(step: int, scored: ScoredGroups) -> list[Row]:
    """The first completions of a step for a tracker's table, in whole groups."""
    rows: list[Row] = []
    for place, group in enumerate(scored.groups):
        if rows and len(rows) + len(group.completions) > TABLE_ROWS:
            break
        answer = "" if group.prompt.answer is None else str(group.prompt.answer)
        for i, completion in enumerate(group.completions):
            reward, status = float(scored.scores.total[place, i]), scored.scores.status[place][i]
            text = (str(group.prompt), completion.text, answer)
            rows.append((step, *text, reward, status.value))
    return rows[:TABLE_ROWS]


def _cell(value: object) -> str:
    """A value as a cell of a Markdown table; markup of a completion is shown, not rendered."""
    text = f"{value:g}" if isinstance(value, float) else html.escape(str(value))
    return text.replace("|", "&#124;").replace("\n", "<br>")


def check_trackers(names: Sequence[str]) -> None:
    """Raise an error for a name that is not in `TRACKERS`.

    Raises:
        UsageError: as said.
    """
    for name in names:
        if name not in TRACKERS:
            raise UsageError(
                f"logging.trackers = {name!r}: no such tracker; " + suggest(name, TRACKERS)
            )


def make_trackers(
    names: Sequence[str],
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    resume_at: int | None = None,
) -> tuple[Tracker, ...]:
    """The trackers asked for.

    Args:
        resume_at: the step that a resumed run continues from; the steps after it, which the
            interrupted run may have logged, are logged once.

    Raises:
        UsageError: unknown name, or its package is not installed.
    """
    check_trackers(names)
    made: list[Tracker] = []
    for name in names:
        try:
            made.append(TRACKERS[name](Path(folder), settings, resume_at=resume_at))
        except ImportError as error:
            raise UsageError(
                f"logging.trackers = {name!r}: needs the package {error.name}; "
                f"{install_command('mlflow' if name == 'mlflow' else 'trackers')}."
            ) from None
    return tuple(made)
