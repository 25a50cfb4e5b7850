"""A run neither replaces nor deletes what no run made, and follows no links."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.cli.demo import _emptied
from groupwise.errors import RunError, UsageError
from groupwise.experiments import compare
from groupwise.experiments.plan import make_plan, toml
from groupwise.report import write_run_report
from groupwise.report.card import write_model_card
from groupwise.rewards.journal import StepFiles
from groupwise.rundir.files import RUN_FILES, RunLog, replace_text
from groupwise.rundir.foreign import refuse_foreign_files
from groupwise.rundir.lock import RunLock
from groupwise.training.checkpoint.files import recover_folder, replace_folder
from groupwise.training.stages.recipe import supervise
from small_runs import prepared


@pytest.mark.parametrize("name", sorted(RUN_FILES))
def test_files_that_no_run_made_are_refused_and_stay(name: str, tmp_path: Path) -> None:
    mine = tmp_path / name if "." in name else tmp_path / name / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text('{"mine": 1}')
    with pytest.raises(UsageError, match=rf"contains {name}, which no run made"):
        prepared(tmp_path)
    assert mine.read_text() == '{"mine": 1}'
    assert {path.name for path in tmp_path.iterdir()} == {name}


def test_other_files_beside_a_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "final").mkdir()
    RunLock(tmp_path).close()
    RunLog(tmp_path, settings={})
    refuse_foreign_files(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("inside", ["final", "final/other", "checkpoints", "journal/a/b"])
def test_a_run_inside_the_folders_of_another_is_refused(inside: str, tmp_path: Path) -> None:
    RunLog(tmp_path / "outer", settings={})
    with pytest.raises(UsageError, match=r"lies in \w+/ of the run '.*outer', which replaces"):
        RunLock(tmp_path / "outer" / inside)
    assert not (tmp_path / "outer" / inside / ".lock").exists()
    (tmp_path / "outer" / inside).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "outer" / inside)
    with pytest.raises(UsageError, match="of the run"):
        RunLock(tmp_path / "link")
    RunLock(tmp_path / "outer" / "beside").close()


def test_files_of_the_user_in_a_model_folder_outlive_its_replacement(tmp_path: Path) -> None:
    final = tmp_path / "final"

    def write(*names: str) -> Callable[[str], object]:
        return lambda place: [Path(place, name).write_text("new") for name in names]

    replace_folder(final, write("model-00001-of-00002.safetensors", "README.md", "vocab.txt"))
    (final / "notes.txt").write_text("mine")
    (final / "runs").mkdir()
    (final / "runs" / "a.json").write_text("mine")
    replace_folder(final, write("model.safetensors", "vocab.txt"))
    names = {"model.safetensors", "vocab.txt", "notes.txt", "runs"}
    assert {path.name for path in final.iterdir()} == names
    assert (final / "vocab.txt").read_text() == "new"
    (tmp_path / ".final.old").mkdir()  # killed before the old folder was emptied
    (tmp_path / ".final.old" / "more.txt").write_text("mine")
    recover_folder(final)
    assert {path.name for path in final.iterdir()} == names | {"more.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"final"}


def test_a_lock_file_of_another_program_is_refused_and_stays(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    for text in ("1234\n", '{"process": 1}', "[]", "x" * 100_000):
        lock.write_text(text)
        with pytest.raises(UsageError, match="contains a file .lock that no run made"):
            RunLock(tmp_path)
        assert lock.read_text() == text
    lock.write_text("\0\0")  # after a power cut
    RunLock(tmp_path).close()
    RunLock(tmp_path).close()


def test_a_file_of_the_name_of_a_plan_is_not_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text('name = "of another program"')
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "model.safetensors").write_text("mine")
    with pytest.raises(UsageError, match="contains final, which no run made"):
        RunLock(tmp_path)
    plan = make_plan({"recipe": "word-problems", "seeds": [0], "arms": [{"algorithm": "grpo"}]})
    (tmp_path / "experiment.toml").write_text(toml(plan))
    refuse_foreign_files(tmp_path)


def test_a_demonstration_deletes_its_own_runs_only(tmp_path: Path) -> None:
    mine = {".demo", "thesis/grpo-seed0.txt", "grpo-seed0-mine/notes.txt", "report.html"}
    for name in (*mine, "grpo-seed0/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    _emptied(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == mine


def test_a_model_folder_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(UsageError, match=r"contains config.json"):
        RunLock(tmp_path)


def test_supervised_training_does_not_write_over_another_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        supervise("word-problems-base", output=str(tmp_path))
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", ".config.json.new"])
def test_links_in_a_run_directory_are_replaced(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "run"
    RunLog(folder, settings={})
    (folder / name).symlink_to(mine)
    RunLog(folder, settings={}, resume_at=0).step(1, {"reward": 1.0})
    assert mine.read_text() == "mine" and not (folder / name).is_symlink()


def test_a_log_is_not_appended_to_through_a_link(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path / "run", settings={})
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written"):
        run_log.step(1, {"reward": 1.0})
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="cannot be written"):
        RunLock(tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_link_in_place_of_a_report_is_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "report.html").symlink_to(mine)
    (tmp_path / ".report.html.new").symlink_to(mine)
    replace_text(tmp_path / "report.html", "page")
    assert mine.read_text() == "mine" and (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()


def test_the_draft_of_a_file_is_no_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "report.new").write_text("mine")
    replace_text(tmp_path / "report.html", "page")
    assert (tmp_path / "report.new").read_text() == "mine"


def test_a_journal_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "verdicts-000001.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match="Too many levels of symbolic links"):
        StepFiles(tmp_path, prefix="verdicts").append(1, [{"group": "a"}])
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_report_of_a_run_follows_no_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = prepared(tmp_path / "run", "steps=1")
    run.trainer.run()
    run.close()
    (tmp_path / "run" / "report.html").symlink_to(mine)
    write_run_report(tmp_path / "run")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["comparison.json", "report.png", "results", "report.html"])
def test_an_experiment_does_not_replace_files_that_are_not_its_own(
    tmp_path: Path, name: str
) -> None:
    mine = tmp_path / name if "." in name else tmp_path / name / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UsageError, match=rf"contains {name}, which no run made"):
        compare("word-problems", algorithms=["grpo"], seeds=1, output=tmp_path)
    assert mine.read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == [name]


def test_a_model_card_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": {}, "versions": {}}))
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "README.md").symlink_to(tmp_path / "outside")
    write_model_card(tmp_path, tmp_path / "final")
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (tmp_path / "final" / "README.md").is_symlink()
