"""Experiment trackers, the real ones: what a run hands them can be read back from their files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from groupwise.errors import RunError
from groupwise.rundir.files import read_lines
from groupwise.training import prepare
from groupwise.training.monitor.trackers import Row, kept_id, make_trackers
from small_runs import prepared

SETTINGS = {"seed": 3, "model": {"path": "bundled"}}


def test_tensorboard_files_hold_every_figure_and_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'groupwise[dev]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_trackers(["tensorboard"], tmp_path, settings=SETTINGS)
    tracker.log(1, {"reward": 0.25, "completions/length": 12.0})
    tracker.log(2, {"reward": 0.5})
    tracker.table(2, [(2, "1 + 1?", "<b>a|b</b>\nc", "2", 0.5, "ok")])
    tracker.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in read.Scalars("completions/length")] == [(1, 12.0)]
    (text,) = read.Tensors("config/text_summary")
    assert b"seed = 3" in text.tensor_proto.string_val[0]
    (table,) = read.Tensors("completions/text_summary")
    shown = table.tensor_proto.string_val[0].decode()
    assert table.step == 2 and "| step | prompt | completion |" in shown
    assert "| 1 + 1? | &lt;b&gt;a&#124;b&lt;/b&gt;<br>c | 2 | 0.5 | ok |" in shown


def test_tensorboard_shows_the_steps_that_a_resumed_run_repeats_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'groupwise[dev]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_at, steps in ((None, (1, 2, 3)), (1, (2, 3, 4))):
        (tracker,) = make_trackers(["tensorboard"], tmp_path, SETTINGS, resume_at=resume_at)
        for step in steps:
            tracker.log(step, {"reward": step / 10})
        tracker.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [e.step for e in read.Scalars("reward")] == [1, 2, 3, 4]


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_evaluations_of_a_run_and_of_the_run_that_resumes_it_reach_trackers(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(tracker, reason="needs a tracker: pip install 'groupwise[trackers,mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    more = (f'logging.trackers=["{tracker}"]', "evaluation.every_steps=1")
    for steps, resume in ((2, False), (3, True)):
        run = prepared(tmp_path / "run", f"steps={steps}", *more, resume=resume, eval_prompts=None)
        run.trainer.run()
        run.close()
    rows = read_lines(tmp_path / "run" / "evaluations.jsonl")
    wanted = [(row["step"], row["figures"]["reward"]["value"]) for row in rows]
    assert [step for step, _ in wanted] == [0, 1, 2, 3]
    found = logged(tracker, tmp_path / "run", "held_out/reward")
    assert [step for step, _ in found] == [0, 1, 2, 3]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted])
    assert [step for step, _ in logged(tracker, tmp_path / "run", "loss")] == [1, 2, 3]


def logged(tracker: str, folder: Path, name: str) -> list[tuple[int, float]]:
    """What a tracker has of a metric: steps and values."""
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder / "tensorboard"))
        read.Reload()
        return [(event.step, event.value) for event in read.Scalars(name)]
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("groupwise").experiment_id])
    history = client.get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.value) for point in history)


class Recording:
    """A tracker that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[int | str] = []
        self.rows: list[Row] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(step)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)

    def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.parametrize("fault", ["", "no checkpoint can be read"])
def test_a_run_ends_its_trackers(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a run that fails before its first step."""
    tracker = Recording()
    monkeypatch.setattr(prepare, "make_trackers", lambda *_, **__: (tracker,))
    if fault:
        monkeypatch.setattr(prepare, "_restore", failing(RunError(fault)))
        with pytest.raises(RunError, match=fault):
            prepared(tmp_path, "steps=1")
    else:
        run = prepared(tmp_path, "steps=1")
        run.trainer.run()
        run.close()
    assert tracker.calls == (["closed"] if fault else [1, "closed"])
    # Three groups of four completions of the only step.
    assert [row[0] for row in tracker.rows] == ([] if fault else [1] * 12)
    assert all("?" in row[1] and row[5] == "ok" for row in tracker.rows)


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.verify
def test_weights_and_biases_writes_a_run_without_the_network(tmp_path: Path) -> None:
    """In a process of its own: wandb leaves a service and hooks behind in the one that loads it."""
    pytest.importorskip("wandb", reason="needs wandb: pip install 'groupwise[trackers]'")
    program = (
        "from groupwise.training.monitor.trackers import make_trackers\n"
        f"(tracker,) = make_trackers(['wandb'], {str(tmp_path)!r}, settings={SETTINGS!r})\n"
        "tracker.log(1, {'reward': 0.25, 'grad_norm': 2.0})\n"
        "tracker.log(2, {'reward': 0.5, 'grad_norm': 1.0})\n"
        "tracker.first = 2\n"  # as in a resumed run whose server has the first step
        "tracker.log(1, {'repeated': 0.25})\n"
        "tracker.table(1, [(1, '1 + 1?', 'repeated', '2', 0.5, 'ok')])\n"
        "tracker.table(2, [(2, '1 + 1?', 'two', '2', 0.5, 'ok')])\n"
        "tracker.close()\n"
    )
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "-c", program], env=offline, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert all(name in content for name in (b"grad_norm", b"reward", b"bundled", b"0.25"))
    assert b"repeated" not in content.replace(program.encode(), b"")
    (table,) = (tmp_path / "wandb").rglob("completions_*.table.json")
    assert '"two"' in table.read_text(encoding="utf-8")


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow_holds_every_figure_and_the_settings(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a resumed run, whose steps are stored once."""
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow-skinny")
    uri = (tmp_path / "mlflow").as_uri()
    if store == "sqlite":
        pytest.importorskip(
            "sqlalchemy", reason="needs a database: pip install 'groupwise[mlflow]'"
        )
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tracker,) = make_trackers(["mlflow"], tmp_path / "mine", settings=SETTINGS)
    tracker.log(1, {"reward": 0.25, "pass@8": 1.0})
    tracker.log(1, {"held_out/greedy": 0.5})
    tracker.table(1, [(1, "1 + 1?", "two", "2", 1.0, "ok")])
    tracker.log(2, {"reward": 0.375})
    tracker.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("groupwise").experiment_id])
    assert run.data.metrics == {"reward": 0.375, "pass_at_8": 1.0, "held_out/greedy": 0.5}
    assert run.data.params["seed"] == "3" and run.info.status == "FINISHED"
    (tracker,) = make_trackers(["mlflow"], tmp_path / "mine", settings=SETTINGS, resume_at=0)
    for step in (1, 2, 3):
        tracker.log(step, {"reward": step / 8, "held_out/greedy": 0.5})
        tracker.table(step, [(step, f"1 + {step}?", "four", "3", 0.0, "ok")])
    tracker.close()
    table = client.load_table(run.info.experiment_id, "completions.json", [run.info.run_id])
    assert list(table["completion"]) == ["two", "four", "four"] and list(table["step"]) == [1, 2, 3]
    (run,) = client.search_runs([run.info.experiment_id])
    assert run.data.metrics["reward"] == 0.375 and run.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "reward")]
    held_out = client.get_metric_history(run.info.run_id, "held_out/greedy")
    assert steps == [point.step for point in held_out] == [1, 2, 3]
    assert not list(here.iterdir())


def test_a_resumed_run_continues_that_of_its_tracker_and_a_new_one_does_not(tmp_path: Path) -> None:
    run = prepared(tmp_path, "steps=1")
    made = kept_id(tmp_path, "wandb", lambda: "first")
    run.trainer.save(wait=True)
    run.close()
    prepared(tmp_path, "steps=1", resume=True).close()
    assert kept_id(tmp_path, "wandb", lambda: "second") == made == "first"
    assert kept_id(tmp_path, "mlflow", lambda: "third") == "third"
    shutil.rmtree(tmp_path / "checkpoints")
    prepared(tmp_path, "steps=1").close()
    assert kept_id(tmp_path, "wandb", lambda: "second") == "second"
