"""Every kind of stage survives a kill, also between its output and its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.models import save_policy
from groupwise.pipelines import Pipeline, read_pipeline, run_pipeline
from groupwise.pipelines.running import LOG, RECORD
from groupwise.pipelines.stages import _KINDS
from groupwise.rewards.code.sandbox import unavailable
from pipeline_runs import content, killed
from small_runs import Quiet, tiny

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

BASE = """
base = "korean_particles"
seed = 0

[model]
hidden = 16
layers = 1
heads = 2
key_value_heads = 1
feed_forward = 32
context = 512

[[phases]]
right = 1.0
picks = 0.5
steps = 2
batch_size = 4
learning_rate = 1e-3
warmup_steps = 1
final_fraction = 0.1
seed = 1
"""
STEPS = (
    '"steps=2", "prompts_per_step=2", "group_size=2", "sampling.max_tokens=6", "data.limit=20", '
    '"evaluation.prompts=2", "evaluation.samples=1", "guards.silent_rewards=say"'
)
TEXT = """
[[stages]]
name = "fresh"
stage = "base"
phases = "BASE"

[[stages]]
name = "candidates"
stage = "contexts"
recipe = "korean-norms"
by = "search"
count = 2
set = ["data.limit=6"]

[[stages]]
name = "chosen"
stage = "select-programs"
rows = "PROGRAMS"
inputs = 2
seconds = 20.0

[[stages]]
name = "answers"
stage = "sample"
recipe = "word-problems"
model = "bundled"
count = 4
prompts = 40
set = ["sampling.max_tokens=40"]

[[stages]]
name = "pairs"
stage = "select"
rows = "@answers"
pairs = true

[[stages]]
name = "tuned"
stage = "sft"
recipe = "word-problems-sft"
model = "MODEL"
set = [STEPS, "evaluation.every_steps=0", "sampling.max_tokens=60"]

[[stages]]
name = "preferred"
stage = "prefer"
recipe = "word-problems-dpo"
model = "MODEL"
rows = "@pairs"
set = [STEPS]

[[stages]]
name = "scorer"
stage = "reward-model"
recipe = "word-problems-reward-model"
model = "MODEL"
rows = "@pairs"
set = [STEPS, "evaluation.every_steps=0"]

[[stages]]
name = "adapted"
stage = "train"
recipe = "word-problems"
model = "MODEL"
reward_model = "@scorer"
set = [STEPS, "model.adapter.rank=2"]

[[stages]]
name = "student"
stage = "distil"
recipe = "word-problems-distil"
model = "MODEL"
teacher = "@tuned"
set = [STEPS, "evaluation.every_steps=0"]

[[stages]]
name = "merged"
stage = "merge"
adapter = "@adapted"

[[stages]]
name = "mean"
stage = "average"
models = ["@student", "@tuned"]

[[stages]]
name = "table"
stage = "eval"
recipe = "word-problems"
models = ["@mean", "@student"]
set = [STEPS]

[[stages]]
name = "shown"
stage = "report"
models = ["@student"]
"""
PROGRAM = {
    "completion": "def f(a):\n    return a + 1",
    "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    save_policy(tiny(), folder / "model")
    (folder / "base.toml").write_text(BASE, encoding="utf-8")
    rows = [{"id": n, **PROGRAM} for n in range(2)]
    programs = folder / "programs.jsonl"
    programs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = TEXT.replace("MODEL", str(folder / "model")).replace("STEPS", STEPS)
    text = text.replace("BASE", str(folder / "base.toml")).replace("PROGRAMS", str(programs))
    (folder / "p.toml").write_text(text, encoding="utf-8")
    return folder / "p.toml"


@pytest.fixture(scope="module")
def finished(file: Path) -> Path:
    pipeline = read(file, file.parent / "whole")
    assert {stage.kind.name for stage in pipeline.stages} == {*_KINDS}
    run_pipeline(pipeline, progress=Quiet())
    return pipeline.output


def read(file: Path, output: Path) -> Pipeline:
    return read_pipeline(file, output=output)


def test_a_kill_before_the_record_of_a_stage_changes_nothing(file: Path, finished: Path) -> None:
    before = content(finished)
    for path in finished.glob(f"*/{RECORD}"):
        values = json.loads(path.read_text(encoding="utf-8"))
        begun = {key: values[key] for key in values if key not in ("finished", "figures", "output")}
        path.write_text(json.dumps(begun), encoding="utf-8")
    run_pipeline(read(file, finished), progress=Quiet())
    assert content(finished) == before


def test_a_single_stage_that_is_up_to_date_is_not_run_again(file: Path, finished: Path) -> None:
    before = (finished / LOG).read_bytes()
    for stage in ("mean", "merged", "table"):
        run_pipeline(read(file, finished), only=stage, progress=Quiet())
    assert (finished / LOG).read_bytes() == before


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_goes_on_after_kills(
    file: Path, finished: Path, tmp_path: Path, seed: int
) -> None:
    for number in range(10):
        killed(read(file, tmp_path / "out"), 0.1 + (0.37 * (number + seed) % 2.0))
    run_pipeline(read(file, tmp_path / "out"), progress=Quiet())
    assert content(tmp_path / "out") == content(finished)
