"""Pipelines run what is missing, go on after a kill to the same bytes, and refuse the rest."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.evaluation.agreement import agreement_figures
from groupwise.models import save_policy
from groupwise.pipelines import (
    Pipeline,
    packaged_pipelines,
    plan_table,
    read_pipeline,
    run_pipeline,
)
from groupwise.pipelines.checks import check_overlap
from groupwise.pipelines.over_seeds import run_seeds
from groupwise.pipelines.running import LOG, RECORD
from groupwise.rundir.provenance import fingerprint
from groupwise.settings import EvaluationSettings
from pipeline_runs import content, killed
from small_runs import Quiet, tiny

TEXT = """
seed = 3

[[stages]]
name = "answers"
stage = "sample"
recipe = "word-problems"
model = "MODEL"
count = 2
prompts = 70
set = ["sampling.max_tokens=6", "data.limit=80"]

[[stages]]
name = "kept"
stage = "select"
rows = "@answers"
keep = ["distinct", "at_most(count=1)"]

[[stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems"
model = "MODEL"
rows = "@kept"
set = ["warmup.steps=3", "warmup.batch_size=4", "sampling.max_tokens=20"]

[[stages]]
name = "trained"
stage = "train"
recipe = "word-problems"
model = "@tuned"
set = ["steps=3", "prompts_per_step=2", "group_size=2", "sampling.max_tokens=6", "data.limit=20",
    "checkpoint.every_steps=1", "guards.silent_rewards=say", "evaluation.prompts=2",
    "evaluation.samples=1", "guards.max_bad_steps=100"]

[[stages]]
name = "mean"
stage = "average"
models = ["@tuned", "@trained"]

[[stages]]
name = "shown"
stage = "report"
models = ["@trained"]
figure = "reward"
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    save_policy(tiny(), folder / "model")
    path = folder / "p.toml"
    path.write_text(TEXT.replace("MODEL", str(folder / "model")), encoding="utf-8")
    return path


def at(file: Path, output: Path, *overrides: str) -> Pipeline:
    return read_pipeline(file, overrides, output=output)


@pytest.fixture(scope="module")
def finished(file: Path) -> Path:
    output, progress = file.parent / "whole", Quiet()
    run_pipeline(at(file, output), progress=progress)
    assert not [line for line in progress.said if "has no checkpoint" in line]
    return output


def test_every_stage_leaves_its_output_and_what_made_it(finished: Path) -> None:
    for stage in ("tuned", "trained", "mean"):
        assert (finished / stage / "final" / "model.safetensors").is_file()
    record = json.loads((finished / "mean" / RECORD).read_text(encoding="utf-8"))
    assert set(record["inputs"]) == {"tuned", "trained"} and all(record["inputs"].values())
    assert "reward" in (finished / "shown" / "report.html").read_text(encoding="utf-8")
    assert (finished / "shown" / "figure-reward.png").is_file()
    assert "| kept | select | answers |" in (finished / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", packaged_pipelines())
def test_a_pipeline_may_be_moved(name: str, tmp_path: Path) -> None:
    keys = [
        [state.key for state in plan_table(read_pipeline(name, output=tmp_path / place))]
        for place in ("here", "there")
    ]
    assert keys[0] == keys[1]


def test_whether_the_best_model_is_kept_makes_no_stage_run_again(
    file: Path, tmp_path: Path
) -> None:
    keys = [
        [state.key for state in plan_table(at(file, tmp_path, f"trained.evaluation.{setting}"))]
        for setting in ("keep_best=true", "keep_best=false", "samples=3")
    ]
    assert keys[0] == keys[1] != keys[2]


def test_nor_does_it_where_nothing_else_of_evaluations_is_set(file: Path, tmp_path: Path) -> None:
    defaults = EvaluationSettings().model_dump(exclude={"keep_best"})
    plain = [f"trained.evaluation.{name}={str(value).lower()}" for name, value in defaults.items()]
    keys = [
        [state.key for state in plan_table(at(file, tmp_path, *plain, setting))]
        for setting in ("trained.evaluation.keep_best=true", "trained.evaluation.keep_best=false")
    ]
    assert keys[0] == keys[1]


def test_what_is_up_to_date_is_not_run_again(file: Path, finished: Path) -> None:
    before = (finished / LOG).read_text(encoding="utf-8")
    assert {state.state for state in plan_table(at(file, finished))} == {"done"}
    run_pipeline(at(file, finished), progress=Quiet())
    assert (finished / LOG).read_text(encoding="utf-8") == before


def assert_survives(file: Path, finished: Path, output: Path, *, kills: int, seed: int) -> None:
    """Kill a pipeline at random moments, then let it finish."""
    draw = random.Random(seed)
    for _ in range(kills):
        killed(at(file, output), draw.uniform(0.05, 1.0))
    run_pipeline(at(file, output), progress=Quiet())
    assert content(output) == content(finished)


def test_a_killed_pipeline_goes_on_to_the_same_files(
    file: Path, finished: Path, tmp_path: Path
) -> None:
    assert_survives(file, finished, tmp_path / "out", kills=4, seed=1)


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(5))
def test_thirty_kills(file: Path, finished: Path, tmp_path: Path, seed: int) -> None:
    assert_survives(file, finished, tmp_path / "out", kills=6, seed=seed)


def test_output_of_other_settings_is_refused_and_from_makes_it_again(
    file: Path, finished: Path, tmp_path: Path
) -> None:
    other = at(file, finished, "kept.keep=['distinct']")
    before = content(finished)
    with pytest.raises(UsageError, match=r"kept: .*other settings.*--from kept"):
        run_pipeline(other, progress=Quiet())
    with pytest.raises(UsageError, match="other settings"):
        run_pipeline(other, only="tuned", progress=Quiet())
    assert content(finished) == before


@pytest.mark.parametrize("place", ["answers/thesis.txt", "mean", "report.md", "report.json"])
def test_files_that_no_stage_made_are_refused_and_stay(
    place: str, file: Path, tmp_path: Path
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    for first in (None, "answers"):
        with pytest.raises(UsageError, match="no stage made|no run made"):
            run_pipeline(at(file, tmp_path), first=first, progress=Quiet())
    if "report" in place:
        with pytest.raises(UsageError, match="no run made"):
            run_seeds(at(file, tmp_path), seeds=1)
    assert (tmp_path / place).read_text() == "mine"


def test_a_stage_may_have_the_name_of_a_file_of_runs(file: Path, tmp_path: Path) -> None:
    text = file.read_text(encoding="utf-8").split("[[stages]]")
    (tmp_path / "p.toml").write_text("[[stages]]".join(text[:2]).replace('"answers"', '"final"'))
    for _ in range(2):
        run_pipeline(at(tmp_path / "p.toml", tmp_path / "out"), progress=Quiet())
    assert (tmp_path / "out" / "final" / RECORD).is_file()


def test_an_output_that_somebody_changed_is_refused(
    file: Path, finished: Path, tmp_path: Path
) -> None:
    rows = finished / "kept" / "rows.jsonl"
    before = rows.read_bytes()
    rows.write_bytes(before[:-2] + b"}\n\n")
    try:
        with pytest.raises(UsageError, match="changed after it was made"):
            run_pipeline(at(file, finished), progress=Quiet())
        run_pipeline(at(file, finished), first="kept", progress=Quiet())
        assert rows.read_bytes() == before
    finally:
        rows.write_bytes(before)


def test_an_input_that_is_not_there_is_refused_before_the_first_stage(
    file: Path, tmp_path: Path
) -> None:
    missing = at(file, tmp_path / "out", f"tuned.model={tmp_path / 'nothing'}")
    with pytest.raises(UsageError, match="tuned: .*is not on this machine"):
        run_pipeline(missing, progress=Quiet())
    with pytest.raises(UsageError, match="kept: takes the output of answers, which is not there"):
        run_pipeline(at(file, tmp_path / "out"), only="kept", progress=Quiet())
    assert not (tmp_path / "out").exists()


def test_held_out_prompts_that_are_trained_on_are_refused(file: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1?", "answer": "2"}\n', encoding="utf-8")
    own = [f"trained.data.train={data}", f"trained.data.eval={data}"]
    with pytest.raises(UsageError, match="1 of 1 held-out prompts are training prompts"):
        run_pipeline(at(file, tmp_path / "out", *own), progress=Quiet())
    assert not (tmp_path / "out").exists()


MEASURED = """
[[stages]]
name = "learnt"
stage = "KIND"
recipe = "word-problems"
MODEL
set = ["data.train=DATA", "warmup.steps=1"]

[[stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems"
model = "bundled"
TAKES
set = ["data.train=OTHER", "warmup.steps=1"]

[[stages]]
name = "table"
stage = "eval"
recipe = "word-problems"
models = ["@tuned"]
set = ["data.train=DATA", "data.eval=DATA"]
"""


@pytest.mark.parametrize(
    "kind, model, takes",
    [
        ("sft", "", 'model = "@learnt"'),
        ("sample", 'model = "bundled"', 'rows = "@learnt"'),
        ("sample", 'model = "bundled"\nsplit = "eval"', 'rows = "@learnt"'),
    ],
)
def test_an_evaluation_on_prompts_that_an_earlier_stage_learnt_is_refused(
    kind: str, model: str, takes: str, tmp_path: Path
) -> None:
    for name, prompt in (("one", "1+1?"), ("two", "2+2?")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "2"}}\n')
    text = MEASURED.replace("KIND", kind).replace("MODEL", model).replace("TAKES", takes)
    if "split" in model:
        text = text.replace('DATA"', 'DATA", "data.eval=DATA"', 1)
    text = text.replace('model = "bundled"\nmodel', "model")
    text = text.replace("DATA", str(tmp_path / "one.jsonl"))
    (tmp_path / "p.toml").write_text(text.replace("OTHER", str(tmp_path / "two.jsonl")))
    said = "table: 1 of 1 held-out prompts are training prompts of learnt"
    with pytest.raises(UsageError, match=said):
        run_pipeline(at(tmp_path / "p.toml", tmp_path / "out"), progress=Quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [n for n in packaged_pipelines() if n.endswith("-small")])
def test_packaged_pipelines_evaluate_on_prompts_that_no_stage_learns(name: str) -> None:
    pipeline = read_pipeline(name)
    for stage in pipeline.stages:
        check_overlap(stage, pipeline)


VERIFIER = """
[[stages]]
name = "verifier"
stage = "reward-model"
recipe = "word-problems-reward-model"
model = "MODEL"
set = ["steps=1", "prompts_per_step=2", "reward_model.prompts=40", "evaluation.every_steps=1"]

[[stages]]
name = "judged"
stage = "sample"
recipe = "word-problems"
model = "bundled"
reward_model = "@verifier"
count = 4
prompts = 12

[[stages]]
name = "agreement"
stage = "select"
rows = "@judged"
agreement = "reward_model"
"""


def test_a_verifier_is_measured_against_the_rewards_of_the_recipe(
    file: Path, tmp_path: Path
) -> None:
    text = VERIFIER.replace("MODEL", str(file.parent / "model"))
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    run_pipeline(at(tmp_path / "p.toml", tmp_path / "out"), progress=Quiet())
    rows = [json.loads(line) for line in (tmp_path / "out/judged/rows.jsonl").open()]
    assert {*rows[0]["parts"]} == {"exact_answer", "reward_model"}
    assert all(row["reward"] == row["parts"]["reward_model"] for row in rows)
    assert {row["correct"] for row in rows} == {0.0, 1.0}
    record = json.loads((tmp_path / "out/agreement" / RECORD).read_text(encoding="utf-8"))
    found = agreement_figures(rows, "reward_model")
    assert record["figures"]["auc"] == round(found["all answers"]["auc"].value, 4)
    best = max(each["kappa"].value for each in found.values() if "kappa" in each)
    assert record["figures"]["kappa"] == round(best, 4)


RECOVERY = """
[[stages]]
name = "table"
stage = "eval"
recipe = "word-problems"
models = ["MODEL", "bundled"]
reflection = true
seeds = 3
set = ["evaluation.prompts=12", "evaluation.samples=1"]
"""


def test_an_evaluation_measures_recovery_and_how_often_a_seed_ranks_models_otherwise(
    file: Path, tmp_path: Path
) -> None:
    text = RECOVERY.replace("MODEL", str(file.parent / "model"))
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    pipeline = at(tmp_path / "p.toml", tmp_path / "out")
    run_pipeline(pipeline, progress=Quiet())
    record = json.loads((tmp_path / "out/table" / RECORD).read_text(encoding="utf-8"))["figures"]
    assert record["reordered"] == 0.0
    assert {"held_out", "reflection", "reflection_after_wait"} <= {*record["sections"]}
    for models in record["sections"].values():
        assert len(models) == 2
    assert "corrected" in record["sections"]["reflection"]["bundled"]
    with pytest.raises(UsageError, match="table: reflection = true: takes one recipe"):
        plan_table(at(tmp_path / "p.toml", tmp_path / "out", "table.budgets=[8]"))


SEVERAL = """
[[stages]]
name = "table"
stage = "eval"
recipe = ["word-problems", "knights-knaves"]
models = ["MODEL", "OTHER"]
budgets = [4, 6]
set = ["evaluation.prompts=2", "evaluation.samples=2", "sampling.max_tokens=6",
    "model.dtype=float32"]
"""


def test_an_evaluation_of_several_tasks_has_a_table_for_each(file: Path, tmp_path: Path) -> None:
    save_policy(tiny(seed=1), tmp_path / "other")
    path = tmp_path / "several.toml"
    text = SEVERAL.replace("MODEL", str(file.parent / "model"))
    path.write_text(text.replace("OTHER", str(tmp_path / "other")), encoding="utf-8")
    report = run_seeds(at(path, tmp_path / "out"), seeds=2)
    values = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    tasks = ("word-problems", "knights-knaves")
    headings = [f"table: {task}, {budget} tokens" for task in tasks for budget in (4, 6)]
    assert [key for key in values if key.startswith("table")] == headings
    first = tmp_path / "out" / "seed-0"
    record = json.loads((first / "table" / RECORD).read_text(encoding="utf-8"))["figures"]
    for heading in headings:
        one = record["sections"][heading.removeprefix("table: ")]
        assert list(one) == [str(file.parent / "model"), str(tmp_path / "other")]
        lengths = [figures["length"]["value"] for figures in one.values()]
        assert max(lengths) <= int(heading.split()[-2])
        over = values[heading]["models"][str(tmp_path / "other")]["length"]["value"]
        assert over != lengths[0] or lengths[0] == lengths[1]
    assert f"## {headings[0]}" in (first / "report.md").read_text(encoding="utf-8")
    assert all(state.state == "done" for state in plan_table(replace(at(path, first), seed=0)))


def test_every_seed_is_checked_before_the_first_one_starts(file: Path, tmp_path: Path) -> None:
    (tmp_path / "seed-4" / "mean").mkdir(parents=True)
    (tmp_path / "seed-4" / "mean" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="mean: its folder contains files that no stage made"):
        run_seeds(at(file, tmp_path), seeds=2)
    assert not (tmp_path / "seed-3").exists()


def test_a_single_stage_runs_for_every_seed(file: Path, tmp_path: Path) -> None:
    given = "answers.prompts=2"
    report = run_seeds(at(file, tmp_path, given), seeds=2, only="answers")
    assert report.is_file()
    for seed in (3, 4):
        states = plan_table(replace(at(file, tmp_path / f"seed-{seed}", given), seed=seed))
        assert [state.state for state in states[:2]] == ["done", "to do"]


GAINS = """
[[stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems"
model = "MODEL"
set = ["warmup.steps=2", "warmup.column=solution", "sampling.max_tokens=80", "data.limit=20"]

[[stages]]
name = "further"
stage = "sft"
recipe = "word-problems"
model = "@tuned"
set = ["warmup.steps=2", "warmup.column=solution", "sampling.max_tokens=80", "data.limit=20"]

[[stages]]
name = "table"
stage = "eval"
recipe = "word-problems"
models = ["@further", "@tuned", "MODEL"]
set = ["evaluation.prompts=3", "evaluation.samples=2", "sampling.max_tokens=6"]
"""


def test_the_report_says_what_each_stage_gained(file: Path, tmp_path: Path) -> None:
    text = GAINS.replace("MODEL", str(file.parent / "model"))
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    report = run_seeds(at(tmp_path / "p.toml", tmp_path / "out"), seeds=2)
    record = json.loads((tmp_path / "out/seed-0/table" / RECORD).read_text(encoding="utf-8"))
    said = " ".join(record["figures"]["verdicts"])
    assert "further and tuned" in said and "tuned and further" not in said
    values = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["table"]
    assert list(values["gains"]) == ["further − tuned"]  # tuned is compared with the last anyway
    assert "length" in values["gains"]["further − tuned"]
    assert "from the model that a stage started from" in report.read_text(encoding="utf-8")
    tuned = json.loads((tmp_path / "out/seed-0/tuned" / RECORD).read_text(encoding="utf-8"))
    assert tuned["recipe"]["warmup"]["steps"] == 2
    model = str(file.parent / "model")
    assert tuned["outside"] == {model: fingerprint(model), "word_problems": "word_problems"}


@pytest.mark.parametrize(
    "more, said",
    [
        ('keep = ["correct", "length(least=9)"]', "leaves none of the 1 rows before it"),
        ("pairs = true", "none of 1 prompts has a right answer beside a wrong"),
    ],
)
def test_a_selection_that_leaves_nothing_of_a_file_is_refused_before_the_first_stage(
    more: str, said: str, file: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    row = {"id": "a", "completion": "x", "tokens": 1, "correct": 1.0}
    answers.write_text(json.dumps(row) + "\n", encoding="utf-8")
    select = f'[[stages]]\nname = "few"\nstage = "select"\nrows = "{answers}"\n{more}\n'
    (tmp_path / "p.toml").write_text(file.read_text(encoding="utf-8") + select, encoding="utf-8")
    with pytest.raises(UsageError, match=f"few: .*{said}"):
        run_pipeline(at(tmp_path / "p.toml", tmp_path / "out"), progress=Quiet())
    assert not (tmp_path / "out").exists()


LOOP = """
[[stages]]
name = "round"
rounds = 2
start = { tuned = "bundled" }

[[stages.stages]]
name = "answers"
stage = "sample"
recipe = "word-problems"
model = "@tuned"
count = 2
prompts = 4
set = ["sampling.max_tokens=30"]

[[stages.stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems"
model = "bundled"
rows = "@answers"
set = ["warmup.steps=2", "warmup.batch_size=2", "warmup.learning_rate=1e-2"]
"""


def test_each_round_of_a_loop_takes_the_model_of_the_round_before(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(LOOP, encoding="utf-8")
    out = tmp_path / "out"
    run_pipeline(at(tmp_path / "p.toml", out), progress=Quiet())
    first, second = (out / f"round-{n}" for n in (1, 2))
    origin = json.loads((second / "answers/rows.origin.json").read_text(encoding="utf-8"))
    assert origin["model_hash"] == fingerprint(first / "tuned/final")
    rows = [(each / "answers/rows.jsonl").read_text(encoding="utf-8") for each in (first, second)]
    assert rows[0] != rows[1]
    run_pipeline(at(tmp_path / "p.toml", out), first="round-2/answers", progress=Quiet())
    assert rows[1] == (second / "answers/rows.jsonl").read_text(encoding="utf-8")
