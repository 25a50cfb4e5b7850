"""Models are not measured on prompts that a stage has learned, whatever way they reach it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.pipelines import Pipeline, read_pipeline, run_pipeline
from groupwise.pipelines.checks import check_overlap
from small_runs import Quiet

ONE, TWO = "1+1?", "2+2?"
TABLE = """
[[stages]]
name = "table"
stage = "eval"
recipe = "word-problems"
models = ["@tuned"]
set = ["data.train=FOLDER/two.jsonl", "data.eval=FOLDER/one.jsonl"]
"""
LEARNS = """
[[stages]]
name = "tuned"
stage = "KIND"
recipe = "RECIPE"
model = "bundled"
"""
ANSWERS = """
[[stages]]
name = "answers"
stage = "sample"
recipe = "word-problems"
model = "bundled"
set = ["data.train=FOLDER/one.jsonl"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, prompt in (("one", ONE), ("two", TWO)):
        row = {"id": name, "prompt": prompt, "answer": "2", "completion": "<answer>2</answer>"}
        row |= {"chosen": "2", "rejected": "3", "tokens": 3, "correct": 1.0, "reward": 1.0}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    said = [{"role": "user", "content": ONE}, {"role": "assistant", "content": "2"}]
    talk = json.dumps({"prompt": said[:1], "completion": said[1:]})
    (tmp_path / "talk.jsonl").write_text(talk + "\n", encoding="utf-8")
    return tmp_path


def read(folder: Path, text: str) -> Pipeline:
    path = folder / "p.toml"
    path.write_text(text.replace("FOLDER", str(folder)), encoding="utf-8")
    return read_pipeline(path, output=folder / "out")


def learns(kind: str, recipe: str, more: str) -> str:
    return LEARNS.replace("KIND", kind).replace("RECIPE", recipe) + more + "\n"


SFT = 'set = ["data.train=FOLDER/two.jsonl", "warmup.steps=1"]'
FROM_FILE = {
    "answers to learn": learns("sft", "word-problems", 'rows = "FOLDER/one.jsonl"\n' + SFT),
    "prompts of RL": learns("train", "word-problems", 'rows = "FOLDER/one.jsonl"'),
    "pairs": learns("prefer", "word-problems-dpo", 'rows = "FOLDER/one.jsonl"'),
    "conversations": learns(
        "sft", "word-problems-sft", 'set = ["sft.data=FOLDER/talk.jsonl", "sft.column="]'
    ),
    "a selection": '[[stages]]\nname = "kept"\nstage = "select"\nrows = "FOLDER/one.jsonl"\n'
    + learns("sft", "word-problems", 'rows = "@kept"\n' + SFT),
}


@pytest.mark.parametrize("case", FROM_FILE)
def test_prompts_of_a_file_that_a_stage_learns_are_not_measured(case: str, folder: Path) -> None:
    said = "table: 1 of 1 held-out prompts are training prompts of (tuned|kept)"
    with pytest.raises(UsageError, match=said):
        run_pipeline(read(folder, FROM_FILE[case] + TABLE), progress=Quiet())
    assert not (folder / "out").exists()
    other = FROM_FILE[case].replace("one.jsonl", "two.jsonl").replace("talk.jsonl", "none.jsonl")
    pipeline = read(folder, other + TABLE)
    check_overlap(pipeline.stage("table"), pipeline)


@pytest.mark.parametrize("rows", ["@answers", "FOLDER/one.jsonl"])
def test_an_evaluation_on_rows_of_learned_prompts_is_refused(rows: str, folder: Path) -> None:
    tuned = learns("sft", "word-problems", 'rows = "@answers"\nset = ["warmup.steps=1"]')
    table = TABLE.replace("set =", f'rows = "{rows}"\nset =')
    with pytest.raises(UsageError, match="table: 1 of 1 .* of answers; choose others by rows"):
        run_pipeline(read(folder, ANSWERS + tuned + table), progress=Quiet())


def test_rows_count_as_the_prompts_they_were_made_of_not_as_those_of_their_model(
    folder: Path,
) -> None:
    """`answers` are answers of `tuned` to prompts that it has not learned."""
    tuned = learns("sft", "word-problems", SFT)
    answers = ANSWERS.replace('"bundled"', '"@tuned"')
    pipeline = read(folder, tuned + answers + TABLE.replace("set =", 'rows = "@answers"\nset ='))
    check_overlap(pipeline.stage("table"), pipeline)


@pytest.mark.parametrize("kind", ["table", "answers"])
def test_a_stage_without_held_out_prompts_is_refused(kind: str, folder: Path) -> None:
    text = {
        "table": TABLE.replace(', "data.eval=FOLDER/one.jsonl"', "").replace("@tuned", "bundled"),
        "answers": ANSWERS + 'split = "eval"\n',
    }[kind]
    with pytest.raises(UsageError, match=f"{kind}: data.eval must be set"):
        run_pipeline(read(folder, text), progress=Quiet())
    assert not (folder / "out").exists()
