"""Resuming never loses what is there without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.errors import UsageError
from groupwise.models import save_policy
from groupwise.settings import RewardSettings
from groupwise.training.resume import fingerprints
from small_runs import Quiet, config, prepared, timeless, tiny


def stopped(folder: Path, *more: str, **given: object) -> None:
    """A run that was stopped after two steps, with one checkpoint."""
    run = prepared(folder, *more, **given)
    for _ in range(2):
        run.trainer.advance()
    run.trainer.save(wait=True)
    run.close()


def test_a_run_without_an_intact_checkpoint_is_restarted_only_when_told_to(tmp_path: Path) -> None:
    stopped(tmp_path)
    (tmp_path / "checkpoints" / "step-000002" / "state.pt").write_bytes(b"damaged")
    before = timeless(tmp_path)
    with pytest.raises(UsageError, match="none of the 1 checkpoints .* is intact .* --restart"):
        prepared(tmp_path, resume=True)
    assert timeless(tmp_path) == before, "the metrics are still there"
    run = prepared(tmp_path, resume=True, restart=True)
    assert run.trainer.done == 0 and timeless(tmp_path) == []
    run.close()


def test_a_folder_without_a_run_is_named_when_it_is_resumed(tmp_path: Path) -> None:
    progress = Quiet()
    prepared(tmp_path / "mistyped", resume=True, progress=progress).close()
    assert any("mistyped has no checkpoint; the run starts at step 0" in s for s in progress.said)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_lines_that_were_lost_are_named(name: str, tmp_path: Path) -> None:
    stopped(tmp_path, "evaluation.every_steps=2", eval_prompts=None)
    file = tmp_path / name
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    progress = Quiet()
    again = prepared(
        tmp_path, "evaluation.every_steps=2", eval_prompts=None, resume=True, progress=progress
    )
    again.close()
    assert any(f"{name} lacks step 2" in text for text in progress.said)


def test_an_output_beside_resume_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "word-problems", "--resume", "runs/a", "--set", "output=runs/b"]
    assert main(given) == 2
    assert "--set = 'output=runs/b': --resume names the run directory" in capsys.readouterr().err


def saved_model(folder: Path, *, seed: int) -> Path:
    save_policy(tiny(seed=seed), folder)
    return folder


def test_another_base_under_the_same_name_is_refused(tmp_path: Path) -> None:
    base, run = saved_model(tmp_path / "base", seed=0), tmp_path / "run"
    given = [f"model.path={base}", "model.adapter.rank=2"]
    stopped(run, *given)
    prepared(run, *given, resume=True).close()
    saved_model(base, seed=1)
    with pytest.raises(UsageError, match=r"the model of model.path has changed .* --allow-"):
        prepared(run, *given, resume=True)
    progress = Quiet()
    prepared(run, *given, resume=True, allow_changes=True, progress=progress).close()
    assert "changed model.path: a different model with the same name" in progress.said


def test_frozen_models_of_rewards_and_teachers_have_fingerprints(tmp_path: Path) -> None:
    judge = saved_model(tmp_path / "judge", seed=0)
    settings = config(tmp_path / "run", "distillation.teacher=bundled", "algorithm.name=opd")
    rewards = [RewardSettings.model_validate({"name": "reward_model", "path": str(judge)})]
    settings = settings.model_copy(update={"rewards": tuple(rewards)})
    before = fingerprints(settings, tiny())
    assert sorted(before) == ["distillation.teacher", "rewards.0.path"], "the policy has no folder"
    saved_model(judge, seed=1)
    after = fingerprints(settings, tiny())
    assert [name for name in after if after[name] != before[name]] == ["rewards.0.path"]


def test_a_changed_row_of_a_large_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.prompts.rows.LARGE_BYTES", 1)
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(1000)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"data.train={data}", "data.limit=900"]
    stopped(tmp_path / "run", *given)
    rows[7]["answer"] = "9"  # As long as before, and not among the rows that are sampled.
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match="prompts: are not those"):
        prepared(tmp_path / "run", *given, resume=True)
