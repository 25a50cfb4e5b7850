"""Inputs that no stage makes are looked for before the first stage, and are part of the hashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.models.loading import BUNDLED
from groupwise.pipelines import Pipeline, plan_table, read_pipeline, run_pipeline
from groupwise.pipelines.inputs import _has_model
from small_runs import Quiet

STAGE = """
[[stages]]
name = "made"
stage = "KIND"
recipe = "RECIPE"
model = "bundled"
"""
INPUTS = {
    "a source of prompts": (
        "train",
        "word-problems",
        "data.sources=[{name='a', data='FILE', share=1.0}]",
    ),
    "conversations": ("sft", "word-problems-sft", "sft.data=FILE"),
    "preferences": ("prefer", "word-problems-dpo", "preference.data=FILE"),
    "rankings": ("reward-model", "word-problems-reward-model", "reward_model.data=FILE"),
    "a corpus": ("train", "search-one-hop", "environment.corpus=FILE"),
    "a critic": ("train", "word-problems-ppo", "critic.model=FILE"),
    "a teacher": ("train", "word-problems-distil", "distillation.teacher=FILE"),
    "a reward model": (
        "train",
        "word-problems",
        "rewards=[{name='exact_answer'}, {name='reward_model', model='FILE'}]",
    ),
}


def pipeline(folder: Path, case: str) -> Pipeline:
    """A stage that takes `folder/input.jsonl` beside its prompts and its policy."""
    kind, recipe, override = INPUTS[case]
    path = folder / "p.toml"
    path.write_text(STAGE.replace("KIND", kind).replace("RECIPE", recipe), encoding="utf-8")
    given = override.replace("FILE", str(folder / "input.jsonl"))
    return read_pipeline(path, [f"made.{given}"], output=folder / "out")


@pytest.mark.parametrize("case", INPUTS)
def test_a_missing_input_is_refused_before_the_first_stage(case: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"made: '.*input.jsonl' is not on this machine"):
        run_pipeline(pipeline(tmp_path, case), progress=Quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", INPUTS)
def test_other_content_of_an_input_makes_the_stage_run_again(case: str, tmp_path: Path) -> None:
    keys = []
    for content in ("one", "two"):
        (tmp_path / "input.jsonl").write_text(content, encoding="utf-8")
        keys += [state.key for state in plan_table(pipeline(tmp_path, case))]
    assert keys[0] != keys[1]


def test_names_that_are_no_files_are_not_missing(tmp_path: Path) -> None:
    for case, name in (
        ("rankings", "word_problem_slips"),
        ("preferences", "trl-lib/ultrafeedback_binarized"),
        ("a corpus", "closed_world"),
        ("a teacher", "self"),
    ):
        kind, recipe, override = INPUTS[case]
        path = tmp_path / "p.toml"
        path.write_text(STAGE.replace("KIND", kind).replace("RECIPE", recipe), encoding="utf-8")
        own = ["made.distillation.prompt='{prompt}'"] if name == "self" else []
        given = [f"made.{override.replace('FILE', name)}", *own]
        assert not plan_table(read_pipeline(path, given, output=tmp_path))[0].missing


@pytest.mark.parametrize("name", list(BUNDLED))
def test_models_of_the_package_are_on_this_machine(name: str) -> None:
    assert _has_model(name)
