"""Pipeline files: loops, references, overrides, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.config import Config, load
from groupwise.errors import UsageError
from groupwise.pipelines import Pipeline, packaged_pipelines, plan_table, read_pipeline
from groupwise.pipelines.stages import Work, kind_of

SAMPLE = """
[[stages]]
name = "answers"
stage = "sample"
recipe = "word-problems"
model = "bundled"
"""
SELECT = """
[[stages]]
name = "kept"
stage = "select"
rows = "@answers"
keep = ["correct"]
"""
EVAL = """
[[stages]]
name = "table"
stage = "eval"
models = ["bundled"]
recipe = RECIPE
"""
TRAIN = """
[[stages]]
name = "learns"
stage = "train"
recipe = "word-problems"
set = ["steps=4", "schedules=[{setting='SETTING', points=POINTS}]"]
"""
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

[[stages.stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems"
model = "bundled"
rows = "@answers"
set = ["warmup.steps=1"]

[[stages]]
name = "mean"
stage = "average"
models = ["bundled", "@tuned"]
"""


def read(folder: Path, text: str, *overrides: str) -> Pipeline:
    path = folder / "p.toml"
    path.write_text(text, encoding="utf-8")
    return read_pipeline(path, overrides, output=folder / "out")


def test_a_loop_is_written_out_and_each_round_takes_the_one_before(tmp_path: Path) -> None:
    pipeline = read(tmp_path, LOOP)
    assert [(s.name, s.settings.get("model"), dict(s.takes)) for s in pipeline.stages] == [
        ("round-1/answers", "bundled", {}),
        ("round-1/tuned", "bundled", {"answers": "round-1/answers"}),
        ("round-2/answers", "@tuned", {"tuned": "round-1/tuned"}),
        ("round-2/tuned", "bundled", {"answers": "round-2/answers"}),
        ("mean", None, {"tuned": "round-2/tuned"}),
    ]


def test_a_setting_changes_the_key_of_its_stage_and_of_those_after_it(tmp_path: Path) -> None:
    before = {s.stage.name: s.key for s in plan_table(read(tmp_path, LOOP))}
    after = {s.stage.name: s.key for s in plan_table(read(tmp_path, LOOP, "tuned.warmup.steps=2"))}
    assert before["round-1/answers"] == after["round-1/answers"]
    assert all(before[name] != after[name] for name in before if name != "round-1/answers")


def test_an_override_reaches_the_stage_or_its_recipe(tmp_path: Path) -> None:
    pipeline = read(tmp_path, SAMPLE + SELECT, "answers.count=3", "*.sampling.max_tokens=9")
    assert pipeline.stages[0].settings["count"] == 3
    assert pipeline.stages[0].settings["set"] == ["sampling.max_tokens=9"]
    assert "set" not in pipeline.stages[1].settings


REFUSED = {
    "a loop without an end": (LOOP.replace("rounds = 2\n", ""), "a loop must end"),
    "a loop without a start": (LOOP.replace("start =", "# start ="), "no stage before it"),
    "a stage that takes itself": (SELECT.replace("@answers", "@kept"), "its own output"),
    "a stage that comes later": (SELECT + SAMPLE, "no stage before it has that name"),
    "two of one name": (SAMPLE + SAMPLE, "name of another stage"),
    "an unknown kind": (SAMPLE.replace('"sample"', '"smaple"'), "did you mean sample"),
    "an unknown setting": (SAMPLE + "cuont = 3\n", "did you mean count"),
    "no stages": ("title = 'x'", "must have a list"),
    "not TOML": ("stages = [", "is not valid TOML"),
    "a folder outside": (SAMPLE.replace('"answers"', '"../answers"'), "of letters, digits"),
}
UNPLANNED = {
    "rows for a model": (
        SAMPLE + '[[stages]]\nname="m"\nstage="average"\nmodels=["bundled", "@answers"]\n',
        "takes a model, and answers leaves rows",
    ),
    "a rule that is not there": (SAMPLE + SELECT.replace("correct", "corect"), "did you mean"),
    "bounds of a rule that leave nothing": (
        SAMPLE + SELECT.replace("correct", "pass_rate(above=0.9, below=0.1)"),
        "kept: above, below = 0.9, 0.1: must be",
    ),
    "a rule with an unknown language": (
        SAMPLE + SELECT.replace("correct", "language(language='klingon')"),
        "kept: .*language = 'klingon'",
    ),
    "a recipe's setting": (SAMPLE + 'set = ["samplign.top_p=0.5"]\n', "no such setting"),
    "weights that do not fit": (
        SAMPLE + '[[stages]]\nname="m"\nstage="average"\nmodels=["bundled", "b"]\nweights=[1.0]\n',
        "give one for each of",
    ),
    "a count of nothing": (SAMPLE + "count = 0\n", "must be at least 1"),
    "rows for several recipes": (
        SAMPLE + EVAL.replace("RECIPE", '["word-problems", "countdown"]') + 'rows = "@answers"\n',
        "of one recipe, not of several",
    ),
    "a recipe twice": (
        EVAL.replace("RECIPE", '["word-problems", "word-problems"]'),
        "with different names",
    ),
    "targets that no prompt asks for": (
        EVAL.replace("RECIPE", '"word-problems"') + "targets = [20]\n",
        "no transform target_length",
    ),
    "a model twice": (
        EVAL.replace("RECIPE", '"word-problems"').replace('["bundled"]', '["bundled", "bundled"]'),
        "table: models = bundled, bundled: must differ",
    ),
    "a schedule beyond the last step": (
        TRAIN.replace("SETTING", "rewards.0.weight").replace("POINTS", "[[1, 0.0], [9, 1.0]]"),
        "learns: .*has a point at step 9, but the run has only 4 steps",
    ),
    "a schedule of a reward that is not there": (
        TRAIN.replace("SETTING", "rewards.7.weight").replace("POINTS", "[[1, 0.0]]"),
        "learns: schedules, step 1: .*rewards.7.weight",
    ),
    "a schedule with an impossible value": (
        TRAIN.replace("SETTING", "algorithm.advantage.tau").replace(
            "POINTS", "[[1, 1.0], [4, 0.0]]"
        ),
        "learns: schedules, step 4: .*tau",
    ),
    "shares that do not add up": (
        TRAIN.replace(
            "schedules=[{setting='SETTING', points=POINTS}]",
            "data.sources=[{name='a', data='countdown', share=0.5}, "
            "{name='b', data='word_problems', share=0.6}]",
        ),
        "learns: .*add up to 1.1",
    ),
    "a budget of nothing": (
        EVAL.replace("RECIPE", '"word-problems"') + "budgets = [0]\n",
        "at least 1",
    ),
    "sft without a section": (
        '[[stages]]\nname="s"\nstage="sft"\nrecipe="word-problems"\nmodel="bundled"\n',
        "no section",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_work_is_refused_when_it_is_read(tmp_path: Path, case: str) -> None:
    text, said = REFUSED[case]
    with pytest.raises(UsageError, match=said):
        read(tmp_path, text)


@pytest.mark.parametrize("case", UNPLANNED)
def test_stages_that_cannot_work_are_refused_before_the_first(tmp_path: Path, case: str) -> None:
    text, said = UNPLANNED[case]
    pipeline = read(tmp_path, text)
    with pytest.raises(UsageError, match=said):
        plan_table(pipeline)
    assert not (tmp_path / "out").exists()


PAPERS = (
    *(
        "r1-zero",
        "kimi-k1.5",
        "l1-exact",
        "l1-max",
        "dapo",
        "dr-grpo",
        "open-rs",
        "logic-rl",
        "orz",
    ),
    *("oreal", "cross-domain", "reflection", "sober", "r1-searcher", "research"),
)


@pytest.mark.parametrize("name", PAPERS)
def test_the_recipe_of_a_paper_can_be_read(name: str) -> None:
    assert load(name).steps >= 1


@pytest.mark.parametrize("name", sorted(packaged_pipelines()))
def test_every_packaged_pipeline_can_be_planned(name: str, tmp_path: Path) -> None:
    states = plan_table(read_pipeline(name, output=tmp_path / "out"))
    assert states and all(state.state == "to do" for state in states)


@pytest.mark.parametrize(
    "override, said",
    [
        ("imports=['{}']", "can run code"),
        ("rewards=[{{name='{}:f'}}]", "can run code"),
        ("hub.name=stranger/model", "sends the model to the hub"),
    ],
)
def test_a_pipeline_file_cannot_run_code_or_upload(
    tmp_path: Path, override: str, said: str
) -> None:
    """Its overrides are not the command line's, which a recipe's trust rests on."""
    text = override.format(tmp_path / "stranger.py")
    path = tmp_path / "pipeline.toml"
    path.write_text(f'{SAMPLE}set = ["{text}"]\n')
    with pytest.raises(UsageError, match=said):
        read_pipeline(path)


def test_a_pipeline_file_cannot_name_code_in_a_stage(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(SAMPLE + SELECT.replace('"@answers"', f'"{tmp_path / "stranger.py"}:f(a=1)"'))
    with pytest.raises(UsageError, match="kept.rows = .*: can run code, so a pipeline file"):
        read_pipeline(path)


@pytest.mark.parametrize("kind", ["train", "sft", "sample", "eval"])
def test_rows_have_been_through_the_transforms_already(kind: str, tmp_path: Path) -> None:
    configured = kind_of(kind).configured
    assert configured is not None
    work = Work(folder=tmp_path, seed=None, names={})
    given = {"recipe": "l1-exact", "set": ["warmup.steps=1"]}
    for rows, expected in ((None, 1), ("rows.jsonl", 0)):
        found = configured(work, rows=rows, **given)
        config = found if isinstance(found, Config) else found["l1-exact"]
        assert len(config.data.transforms) == expected
