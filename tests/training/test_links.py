"""No command writes or deletes through a link in its output folder, which may come from somebody
else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.cli.demo import _emptied
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.experiments import compare
from groupwise.experiments.plan import make_plan, toml
from groupwise.experiments.running import run_plan
from groupwise.pipelines import read_pipeline, run_pipeline
from groupwise.pipelines.over_seeds import run_seeds
from groupwise.report.png import write_figure
from groupwise.rollouts.batch_journal import BatchJournal
from groupwise.rundir.files import append_text, replace_text
from groupwise.rundir.foreign import refuse_linked_folders
from groupwise.training.offline.preference import prefer
from groupwise.training.offline.reward_model import train_reward_model
from groupwise.training.offline.supervised import fine_tune
from small_runs import Quiet, prepared

IN_RUNS = (
    "rollouts",
    "suspects",
    "journal",
    "checkpoints",
    "checkpoints/step-000002",
    "checkpoints/.writing-000001",
    "checkpoints/.replaced-000002",
    "best",
    "final",
    ".final.old",
    "upload",
    "tensorboard",
    "wandb",
)
"""Folders that runs write, drafts of folders, and one checkpoint."""

PIPELINE = """
[[stages]]
name = "answers"
stage = "sample"
model = "bundled"
recipe = "word-problems"
count = 2
prompts = 4
set = ["sampling.max_tokens=6", "data.limit=80"]
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody's own, with the names of files that runs replace and delete."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("step-000001.jsonl", "step-000009.jsonl", "model.safetensors", "manifest.json"):
        (folder / name).write_text("mine")
    (folder / "step-000001").mkdir()
    (folder / "step-000001" / "manifest.json").write_text("mine")
    return folder


def foreign(folder: Path, name: str, target: Path) -> Path:
    """A run directory with a link in it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"config": {}, "versions": {}}))
    (folder / name).symlink_to(target)
    return folder


def content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def run(output: Path, resume: bool) -> object:
    return prepared(output, "steps=1", resume=resume).trainer.run()


def preferences(output: Path, resume: bool) -> object:
    return prefer(load("word-problems-dpo", [f"output={output}"]), resume=resume, progress=Quiet())


def reward_model(output: Path, resume: bool) -> object:
    given = [f"output={output}"]
    recipe = load("word-problems-reward-model", given)
    return train_reward_model(recipe, resume=resume, progress=Quiet())


def supervised(output: Path, resume: bool) -> object:
    recipe = load("word-problems-sft", [f"output={output}"])
    return fine_tune(recipe, resume=resume, progress=Quiet())


def comparison(output: Path, resume: bool) -> object:
    if resume:
        plan = make_plan(
            {"recipe": "word-problems", "seeds": [0, 1, 2], "arms": [{"algorithm": "grpo"}]}
        )
        (output / "experiment.toml").write_text(toml(plan))
        return run_plan(plan, output=output)
    return compare("word-problems", algorithms=["grpo"], seeds=3, output=output)


def pipeline(output: Path, resume: bool) -> object:
    (output.parent / "pipeline.toml").write_text(PIPELINE)
    plan = read_pipeline(output.parent / "pipeline.toml", output=output)
    return run_pipeline(plan, progress=Quiet(), first="answers" if resume else None)


def over_seeds(output: Path, resume: bool) -> object:
    (output.parent / "pipeline.toml").write_text(PIPELINE)
    plan = read_pipeline(output.parent / "pipeline.toml", output=output)
    return run_seeds(plan, seeds=2, first="answers" if resume else None)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *[(run, name) for name in IN_RUNS],
        *[(each, n) for each in (preferences, reward_model, supervised) for n in ("final", "best")],
        *[(comparison, name) for name in ("runs", "results", "logs", "base", "runs/grpo/seed-0")],
        *[(pipeline, name) for name in ("answers", "answers/deeper")],
        *[(over_seeds, name) for name in ("seed-0", "seed-1/answers")],
    ],
)
def test_links_to_folders_are_refused_before_anything_is_written(
    command: Callable[[Path, bool], object],
    name: str,
    resume: bool,
    tmp_path: Path,
    elsewhere: Path,
) -> None:
    folder, before = foreign(tmp_path / "run", name, elsewhere), content(elsewhere)
    with pytest.raises(
        UsageError, match=r"a link to .*elsewhere|contains files that no stage made"
    ):
        command(folder, resume)
    assert content(elsewhere) == before and (folder / name).is_symlink()


def test_a_link_to_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "run", "rollouts", tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"a link to .*nowhere"):
        run(folder, False)
    assert not (tmp_path / "nowhere").exists()


def test_a_demonstration_deletes_nothing_behind_a_link(tmp_path: Path, elsewhere: Path) -> None:
    folder, before = foreign(tmp_path / "demo", "grpo-seed0", elsewhere), content(elsewhere)
    (folder / ".demo").touch()
    with pytest.raises(UsageError, match=r"a link to .*elsewhere"):
        _emptied(folder)
    assert content(elsewhere) == before


def test_links_that_lead_nowhere_else_are_allowed(tmp_path: Path, elsewhere: Path) -> None:
    real = tmp_path / "disk"
    (real / "wandb" / "run-1").mkdir(parents=True)
    (real / "wandb" / "latest-run").symlink_to(real / "wandb" / "run-1")
    (real / "notes.md").symlink_to(elsewhere / "manifest.json")
    (real / "checkpoints" / "step-000002").mkdir(parents=True)
    (real / "latest").symlink_to("checkpoints/step-000002")
    (tmp_path / "link").symlink_to(real)  # the folder itself
    refuse_linked_folders(tmp_path / "link")
    for name in ("best", "checkpoints/step-000003"):
        link = real / name
        link.symlink_to(real / "checkpoints" / "step-000002")
        with pytest.raises(UsageError, match=f"contains '{name}', a link to"):
            refuse_linked_folders(real)
        link.unlink()


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("report.png", "comparison.json", "rows.jsonl", "batch-000001.tmp"):
        (tmp_path / name).symlink_to(mine)
    write_figure(Figure(), tmp_path / "report.png")
    replace_text(tmp_path / "comparison.json", "{}")
    BatchJournal(tmp_path).write(1, {})
    with pytest.raises(Exception, match="Too many levels of symbolic links"):
        append_text(tmp_path / "rows.jsonl", "row")
    assert mine.read_text() == "mine"
