"""A recipe file cannot run code or send secrets away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.config import build, load, load_run, trusted_overrides
from groupwise.errors import RunError, UsageError
from groupwise.experiments import analysis_of, make_plan, read_plan, report, write_plan

PYTHON = '[engine]\nname = "vllm"\npython = "./evil"\n'
REMOTE = "[model]\ntrust_remote_code = true\n"
UNSANDBOXED = '[[rewards]]\nname = "code_stdio"\nallow_unsandboxed = true\n'
HUB = '[hub]\nname = "stranger/model"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [PYTHON, REMOTE, "model.trust_remote_code = true\n", UNSANDBOXED])
def test_a_recipe_file_cannot_run_code_unless_trusted(tmp_path: Path, text: str) -> None:
    recipe = written(tmp_path, text)
    with pytest.raises(
        UsageError, match="can run code, so a recipe or run directory may not set it"
    ):
        load(recipe)
    with pytest.warns(UserWarning, match="set by the recipe, and can run code"):
        load(recipe, trust_recipe=True)


def test_programs_run_unsandboxed_only_by_the_command_line(tmp_path: Path) -> None:
    recipe = written(tmp_path, '[[rewards]]\nname = "think_format"\n' + UNSANDBOXED)
    setting = "rewards.1.allow_unsandboxed"
    for override in ("rewards.0=", "steps=3"):
        with pytest.raises(UsageError, match=f"{setting} = 'True': can run code"):
            load(recipe, [override])
    assert load(recipe, [f"{setting}=true"]).rewards[1].settings["allow_unsandboxed"]
    assert not load(recipe, [f"{setting}=false"]).rewards[1].settings["allow_unsandboxed"]
    with pytest.warns(UserWarning, match="can run code"):
        assert trusted_overrides(recipe) == [f"{setting}=true"]


def test_every_command_that_reads_a_recipe_can_be_told_to_trust_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = REMOTE + 'path = "no/such/folder"\n[data]\ntrain = "word_problems"\n'
    recipe = str(written(tmp_path, text))
    for command in (
        ["sft", recipe],
        ["reward", "try", recipe],
        ["compare", recipe, "--jobs", "1"],
        ["train", recipe],
    ):
        assert main(command) == 2
        assert (
            "can run code, so a recipe or run directory may not set it" in capsys.readouterr().err
        )
        main([*command, "--trust-recipe"])  # fails later: there is no such model
        said = capsys.readouterr().err
        assert "\nerror" in f"\n{said}" and "may not set it" not in said


def test_a_trusted_recipe_hands_its_settings_to_the_plan_of_an_experiment(tmp_path: Path) -> None:
    recipe = written(tmp_path, REMOTE + "[engine]\npython = './x y'\nname = 'vllm'\n")
    with pytest.warns(UserWarning, match="can run code"):
        overrides = trusted_overrides(recipe)
    assert overrides == ['engine.python="./x y"', "model.trust_remote_code=true"]
    assert load(recipe, overrides).engine.python == "./x y"


def test_the_command_line_and_python_may_set_what_runs_code(tmp_path: Path) -> None:
    recipe = written(tmp_path, "steps = 3\n")
    assert load(recipe, ["model.trust_remote_code=true"]).model.trust_remote_code
    assert build({"model": {"trust_remote_code": True}}).model.trust_remote_code
    # An override replaces what the file says, so nothing of the file counts.
    assert not load(written(tmp_path, REMOTE), ["model.trust_remote_code=false"]).model.adapter


@pytest.mark.parametrize("setting", ["model.trust_remote_code=true", "model={path='x'}"])
def test_an_experiment_file_cannot_run_code(tmp_path: Path, setting: str) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'recipe = "word-problems"\nseeds = [0, 1, 2]\n[[arms]]\nalgorithm = "grpo"\n'
        f'set = ["{setting}"]\n'
    )
    with pytest.raises(UsageError, match="can run code, so an experiment file may not set it"):
        read_plan(plan)
    assert read_plan(plan, trusted=True).arms[0].set == (setting,)


@pytest.mark.parametrize(
    "arguments",
    [["--host", "0.0.0.0"], ["--middleware=os.system"], ["--trust-remote-code"], ["-O3"]],
)
def test_arguments_of_vllm_are_limited_to_speed_and_memory(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"engine\.arguments = .*: is not allowed"):
        build({"engine": {"name": "vllm", "arguments": arguments}})


def test_arguments_of_vllm_that_change_speed_are_allowed() -> None:
    given = ["--tensor-parallel-size", "2", "--swap-space=-1", "--seed", "-1"]
    assert build({"engine": {"name": "vllm", "arguments": given}}).engine.arguments == tuple(given)


@pytest.mark.parametrize("text", [HUB, 'hub = { name = "stranger/model" }\n', 'hub.name = "a/b"\n'])
def test_a_recipe_file_cannot_send_the_model_to_the_hub_unless_trusted(
    tmp_path: Path, text: str
) -> None:
    recipe = written(tmp_path, text)
    with pytest.raises(UsageError, match="hub.name = .*sends the model to the hub, so a recipe"):
        load(recipe)
    with pytest.warns(UserWarning, match="set by the recipe, and sends the model to the hub"):
        load(recipe, trust_recipe=True)
    assert load(recipe, ["hub.name=me/mine"]).hub.name == "me/mine"
    assert load(recipe, ["hub=null"]).hub is None


def test_a_recipe_file_cannot_publish_what_the_command_line_uploads(tmp_path: Path) -> None:
    name = ["hub.name=me/mine"]
    with pytest.raises(
        UsageError, match="hub.private = .*a recipe or run directory may not set it"
    ):
        load(written(tmp_path, "[hub]\nprivate = false\n"), name)
    assert load(written(tmp_path, "[hub]\nprivate = true\nevery_steps = 5\n"), name).hub.private


def test_a_run_directory_of_somebody_else_cannot_send_the_model_to_the_hub(tmp_path: Path) -> None:
    config = load("word-problems", ["hub.name=stranger/model"])
    about = {"config": json.loads(config.to_json())}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match="hub.name = .*sends the model to the hub"):
        load_run(tmp_path)


def test_experiments_upload_nothing(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    head = 'seeds = [0, 1, 2]\n[[arms]]\nalgorithm = "grpo"\n'
    for override in ("hub.name=stranger/model", "hub={name='stranger/model'}"):
        plan.write_text(f'recipe = "word-problems"\n{head}set = ["{override}"]\n')
        with pytest.raises(UsageError, match="sends the model to the hub, so an experiment file"):
            read_plan(plan)
        with pytest.raises(UsageError, match="models of an experiment are not uploaded"):
            read_plan(plan, trusted=True)
    recipe = written(tmp_path, HUB)
    plan.write_text(f'recipe = "{recipe}"\n{head}')
    arms = read_plan(plan)
    assert arms.config(arms.arms[0]).hub is None
    assert trusted_overrides(recipe) == []


def test_reading_an_experiment_of_somebody_else_runs_none_of_its_code(tmp_path: Path) -> None:
    """Its folder is reported on, drawn, and chosen as the output of another comparison."""
    code = tmp_path / "stranger.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    folder = tmp_path / "found"
    folder.mkdir()
    (folder / "experiment.toml").write_text(
        'recipe = "word-problems"\nseeds = [0, 1, 2]\nagainst = "grpo"\nsplits = ["held_out"]\n'
        f'[[arms]]\nalgorithm = "grpo"\nset = ["imports=[{str(code)!r}]"]\n'
    )
    refused = "can run code, so an experiment file may not set it; .* report --trust-recipe"
    with pytest.raises(UsageError, match=refused):
        report(folder)
    with pytest.raises(UsageError, match=refused):
        analysis_of(folder)
    other = make_plan(
        {"recipe": "word-problems", "seeds": [0, 1, 2], "arms": [{"algorithm": "grpo"}]}
    )
    with pytest.raises(UsageError, match="contains an experiment that differs in arms"):
        write_plan(other, folder)
    assert main(["report", str(folder)]) == 2
    assert not (tmp_path / "ran").exists()
    with pytest.raises(RunError, match="reference arm"):
        report(folder, trusted=True)
    assert (tmp_path / "ran").exists()


def test_the_output_of_an_experiment_may_hold_its_plan_as_it_was_written(tmp_path: Path) -> None:
    """Defaults that are filled in when a plan is made are no difference."""
    written = tmp_path / "experiment.toml"
    written.write_text(
        'recipe = "word-problems"\nseeds = [0, 1, 2]\n[tuning]\nseeds = [7]\n'
        '[[arms]]\nalgorithm = "softrank"\n[[arms]]\nalgorithm = "grpo"\n'
    )
    plan = read_plan(written)
    assert plan.against and plan.splits and plan.tuning and plan.tuning.learning_rates
    assert write_plan(plan, tmp_path) == written
