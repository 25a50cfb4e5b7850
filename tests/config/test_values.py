"""Values that are odd but legal TOML: paths, null, huge numbers, limits that nothing heeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from groupwise.config import build, load
from groupwise.config.connect import make_scorer
from groupwise.errors import UsageError
from groupwise.prompts.sources import load_prompts


def test_home_is_expanded_in_every_path() -> None:
    home = str(Path.home())
    config = build({"output": "~/r", "model": {"path": "~/m"}, "data": {"train": "~/t.jsonl"}})
    assert config.output == f"{home}/r"
    assert (config.model.path, config.data.train) == (f"{home}/m", f"{home}/t.jsonl")


@pytest.mark.parametrize("setting", ["stesp", "checkpoint.every_minuets", "nothing.at.all"])
def test_a_setting_that_does_not_exist_cannot_be_reset(setting: str) -> None:
    with pytest.raises(UsageError, match=rf"--set {setting}=: no such setting; (did you|known)"):
        load("word-problems", [f"{setting}="])
    load("word-problems", ["rewards.0.weight=", "streaming=", "optimizer=", "data.chat="])


@pytest.mark.parametrize("path", ["a\nb", "a\x1b[2J"])
def test_control_characters_in_paths_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="output = .*: .*must not contain control characters"):
        build({"output": path})


def test_null_switches_a_setting_off_and_nothing_takes_its_default() -> None:
    assert load("word-problems", ["checkpoint.every_minutes=null"]).checkpoint.every_minutes is None
    reset = load("word-problems", ["checkpoint.every_minutes="]).checkpoint.every_minutes
    assert reset == build({}).checkpoint.every_minutes
    with pytest.raises(UsageError, match="group_size = None: must be a valid integer"):
        load("word-problems", ["group_size=null"])


@pytest.mark.parametrize(
    "setting",
    [
        f"steps={10**30}",
        "prompts_per_step=1000000000",
        "reward_pool.workers=100000",
        "threads=1000000",
        "watchdog.limit_minutes=1e300",
        f"seed={10**30}",
        "optimizer.betas=[0.9, 1.0]",
    ],
)
def test_absurd_numbers_are_refused_at_load(setting: str) -> None:
    with pytest.raises(UsageError, match="must be less than"):
        load("word-problems", [setting])


@pytest.mark.parametrize("setting", ["timeout_s=5.0", "memory_mb=2048"])
def test_limits_of_workers_need_workers(setting: str) -> None:
    with pytest.raises(UsageError, match=r"reward_pool\..* needs worker processes"):
        load("word-problems", [f"reward_pool.{setting}"])
    assert load("word-problems", [f"reward_pool.{setting}", "reward_pool.workers=1"])


def test_limits_of_workers_and_functions() -> None:
    async def judged(text: str) -> float:
        return 1.0

    config = build({"reward_pool": {"timeout_s": 90.0}})
    with pytest.raises(UsageError, match=r"reward_pool.timeout_s = 90.0: needs worker processes"):
        make_scorer(config, [len])
    make_scorer(config, [judged]).close()
    with pytest.raises(UsageError, match=r"reward_pool.memory_mb = 99: needs worker processes"):
        make_scorer(build({"reward_pool": {"memory_mb": 99}}), [judged])


@pytest.mark.parametrize("wording", ["{question:>999999999}", "{question!r}"])
def test_wording_has_no_widths_or_conversions(tmp_path: Path, wording: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1+1?"}\n')
    with pytest.raises(UsageError, match="data.wording = .*: must name columns"):
        load_prompts(str(data), wording=wording)


def test_a_pipe_is_no_recipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="must be a regular file"):
        load(pipe)


def test_a_run_directory_is_no_recipe_and_the_message_says_what_is(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    said = f"Give the recipe of the run .* its model is '{tmp_path}/final'"
    with pytest.raises(UsageError, match=said):
        load(tmp_path)


def test_a_folder_named_like_a_packaged_recipe_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "word-problems").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("word-problems").data.train == "word_problems"


@pytest.mark.parametrize("label", [".", "..", ".hidden"])
def test_labels_of_arms_are_names_of_folders(label: str) -> None:
    from groupwise.experiments.plan import make_plan

    with pytest.raises(UsageError, match=r"arms\.0\.label"):
        make_plan(
            {
                "recipe": "word-problems",
                "seeds": [0, 1, 2],
                "arms": [{"label": label, "algorithm": "grpo"}],
            }
        )
