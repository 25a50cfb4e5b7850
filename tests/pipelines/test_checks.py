"""What pipelines refuse before their first stage: models that cannot be averaged or reported on."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.pipelines import Pipeline, plan_table, read_pipeline, run_pipeline
from groupwise.pipelines.checks import check_models
from small_runs import Quiet


def written(folder: Path, text: str) -> Pipeline:
    (folder / "p.toml").write_text(text, encoding="utf-8")
    return read_pipeline(folder / "p.toml", output=folder / "out")


def assert_refused(folder: Path, text: str, *, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_pipeline(written(folder, text), progress=Quiet())
    assert not (folder / "out").exists()


UNLIKE = """
[[stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems-sft"
model = "bundled"
SET

[[stages]]
name = "mean"
stage = "average"
models = ["@tuned", "OTHER"]
"""


@pytest.mark.parametrize(
    "other, change, said",
    [
        ("bundled:search", "", "mean: bundled:search: its parameter .*one architecture"),
        ("bundled", 'set = ["model.adapter.rank=4"]', "mean: @tuned: is an adapter"),
    ],
)
def test_models_that_cannot_be_averaged_are_refused_before_the_first_stage(
    other: str, change: str, said: str, tmp_path: Path
) -> None:
    text = UNLIKE.replace("OTHER", other).replace("SET", change)
    assert_refused(tmp_path, text, said=said)


FROM_NOTHING = """
[[stages]]
name = "small"
stage = "base"
phases = "korean-base"

[[stages]]
name = "mean"
stage = "average"
models = ["@small", "@small"]
"""


def test_models_that_a_stage_makes_from_nothing_may_be_averaged(tmp_path: Path) -> None:
    pipeline = written(tmp_path, FROM_NOTHING)
    check_models(pipeline.stage("mean"), pipeline)


@pytest.mark.parametrize(
    "model, said",
    [("@other", "mean: @other: its parameter"), ("bundled", "mean: bundled: its parameter")],
)
def test_unlike_models_from_nothing_are_refused_before_the_first_stage(
    model: str, said: str, tmp_path: Path
) -> None:
    text = FROM_NOTHING.replace('"@small"]', f'"{model}"]')
    other = FROM_NOTHING.split("[[stages]]")[1].replace('"small"', '"other"')
    text = f"[[stages]]{other.replace('korean-base', 'search-base')}{text}"
    assert_refused(tmp_path, text, said=said)


ADAPTERS = """
[[stages]]
name = "low"
stage = "sft"
recipe = "word-problems"
set = ["model.adapter.rank=4", "warmup.steps=3"]

[[stages]]
name = "whole"
stage = "merge"
adapter = "@low"

[[stages]]
name = "mean"
stage = "average"
models = ["@whole", "bundled"]
"""


def test_a_merged_adapter_may_be_averaged(tmp_path: Path) -> None:
    pipeline = written(tmp_path, ADAPTERS)
    check_models(pipeline.stage("mean"), pipeline)


def test_a_merged_adapter_of_another_base_may_not(tmp_path: Path) -> None:
    text = ADAPTERS.replace('"bundled"]', '"bundled:search"]')
    assert_refused(tmp_path, text, said="mean: bundled:search: its parameter")


REPORT = """
[[stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems"
set = ["warmup.steps=3"]

[[stages]]
name = "trained"
stage = "train"
recipe = "word-problems"

[[stages]]
name = "shown"
stage = "report"
models = ["@trained"]
"""


@pytest.mark.parametrize(
    "models, said",
    [
        ('"@trained", "@tuned"', "shown: @tuned: is the model of a stage sft.*train or distil"),
        ('"bundled"', "shown: run = .*must "),
    ],
)
def test_a_report_on_a_model_that_no_run_trained_is_refused(
    models: str, said: str, tmp_path: Path
) -> None:
    assert_refused(tmp_path, REPORT.replace('"@trained"', models), said=said)


@pytest.mark.parametrize("figure", ["", "paper", "reward", "reward_length", "held_out.greedy"])
def test_figures_that_runs_have_may_be_drawn(figure: str, tmp_path: Path) -> None:
    assert plan_table(written(tmp_path, f'{REPORT}figure = "{figure}"\n'))


@pytest.mark.parametrize("figure", ["rewrad", "held_out.greddy", "greedy"])
def test_a_misspelt_figure_of_a_report_is_refused(figure: str, tmp_path: Path) -> None:
    text = f'{REPORT}figure = "{figure}"\n'
    assert_refused(tmp_path, text, said=f"shown: figure = '{figure}': must be")
