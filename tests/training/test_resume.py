"""Resuming never loses what is there without a word."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.errors import UsageError
from groupwise.models import load_policy, save_policy
from groupwise.models.loading import place_fingerprint
from groupwise.settings import AdapterSettings, RewardSettings
from groupwise.training.checkpoint.files import newest
from groupwise.training.resume import check_fingerprints, fingerprints
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


def test_a_run_whose_checkpoints_are_gone_is_restarted_only_when_told_to(tmp_path: Path) -> None:
    stopped(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    before = timeless(tmp_path)
    with pytest.raises(UsageError, match="no checkpoint, although the run wrote some and has tak"):
        prepared(tmp_path, resume=True)
    assert timeless(tmp_path) == before, "the metrics are still there"
    run = prepared(tmp_path, resume=True, restart=True)
    run.trainer.advance()
    run.close()
    prepared(tmp_path, resume=True).close()  # It was killed before its first checkpoint.


@pytest.mark.parametrize("written", ["", "final"])
def test_a_run_without_a_checkpoint_starts_again_unless_it_had_one(
    written: str, tmp_path: Path
) -> None:
    """A job that was killed before its first checkpoint; a finished run of an earlier version."""
    run = prepared(tmp_path)
    run.trainer.advance()
    run.close()
    if written:
        (tmp_path / written).mkdir()
        with pytest.raises(UsageError, match="has taken 1 steps"):
            prepared(tmp_path, resume=True)
    else:
        prepared(tmp_path, resume=True).close()


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
    names = ("distillation.teacher", "rewards.0.path")
    expected = sorted(name + what for name in names for what in ("", " (config.json)"))
    assert sorted(before) == expected, "the policy has no folder"
    saved_model(judge, seed=1)
    after = fingerprints(settings, tiny())
    assert [name for name in after if after[name] != before[name]] == ["rewards.0.path"]


def test_a_changed_configuration_of_the_same_weights_is_refused(tmp_path: Path) -> None:
    base, run = saved_model(tmp_path / "base", seed=0), tmp_path / "run"
    stopped(run, f"model.path={base}")
    about = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**about, "rms_norm_eps": 1e-3}))
    with pytest.raises(UsageError, match=r"the model of model.path \(config.json\) has changed"):
        prepared(run, f"model.path={base}", resume=True)


@pytest.mark.parametrize("setting", ["process.model", "critic.model", "token_reward.model"])
def test_further_models_of_a_run_have_fingerprints(setting: str, tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", seed=0)
    algorithm = {"process": "grpo_process", "critic": "ppo", "token_reward": "oreal"}
    name = f"algorithm.name={algorithm[setting.partition('.')[0]]}"
    settings = config(tmp_path / "run", f"{setting}={model}", name)
    before = fingerprints(settings, tiny())
    assert sorted(before) == [setting, f"{setting} (config.json)"]
    saved_model(model, seed=1)
    assert fingerprints(settings, tiny())[setting] != before[setting]


def test_a_teacher_that_is_an_adapter_has_the_fingerprint_of_its_base(tmp_path: Path) -> None:
    base = saved_model(tmp_path / "base", seed=0)
    adapter = AdapterSettings(rank=2)
    save_policy(load_policy(base, adapter=adapter), tmp_path / "teacher")
    settings = config(
        tmp_path / "run", f"distillation.teacher={tmp_path / 'teacher'}", "algorithm.name=opd"
    )
    before = fingerprints(settings, tiny())
    saved_model(base, seed=1)
    after = fingerprints(settings, tiny())
    changed = [name for name in after if after[name] != before[name]]
    assert changed == ["distillation.teacher (base)"]


def test_a_model_of_the_hub_has_its_commit_for_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--teacher"
    for commit in ("a" * 40, "b" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    found = []
    for commit in ("a" * 40, "b" * 40):
        (folder / "refs" / "main").write_text(commit)
        found.append(place_fingerprint("someone/teacher"))
    assert found == [f"commit:{'a' * 40}", f"commit:{'b' * 40}"]
    assert place_fingerprint("someone/else") is None
    assert place_fingerprint("no name, but a sentence") is None


def test_a_checkpoint_that_knows_fewer_fingerprints_is_resumed(tmp_path: Path) -> None:
    base, run = saved_model(tmp_path / "base", seed=0), tmp_path / "run"
    stopped(run, f"model.path={base}")
    saved, _ = newest(run / "checkpoints")
    assert saved is not None
    models = saved.about["models"]
    assert set(models) == {"model.path", "model.path (config.json)"}
    older = replace(saved, about={**saved.about, "models": {"model.path": models["model.path"]}})
    check_fingerprints(older, models, allow_changes=False, log=print)
    with pytest.raises(UsageError, match="has changed since step 2"):
        check_fingerprints(older, {"model.path": "another"}, allow_changes=False, log=print)


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
