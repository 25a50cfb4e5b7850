"""Preference training: batches, reference, resume, what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise import PREFERENCES
from groupwise.config import load, load_run
from groupwise.errors import UsageError
from groupwise.prompts.preferences import read_comparisons
from groupwise.report.data import RunData
from groupwise.rundir.files import read_lines
from groupwise.settings import OptimizerSettings, PreferenceSettings
from groupwise.training.offline.encoding import Encoded, encode
from groupwise.training.offline.preference import (
    PreferenceTask,
    mismatched,
    prefer,
    preference_function,
)
from groupwise.training.offline.reference import Reference
from groupwise.types import Batch, Outputs
from groupwise.updates import TorchLearner
from small_runs import Quiet, tiny

PAIRS = [
    {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"}
    for a in range(1, 6)
    for b in range(1, 4)
]
LABELS = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    policy = tiny()
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model: Path, output: Path, data: Path | None, *more: str, **how: Any) -> Path:
    given = [
        f"output={output}",
        f"model.path={model}",
        f"preference.data={data}",
        "rewards=[]",
        "steps=6",
        "prompts_per_step=4",
        "optimizer.learning_rate=3e-3",
        "preference.held_out=0.2",
        *more,
    ]
    return prefer(load("word-problems-dpo", given), progress=how.pop("progress", Quiet()), **how)


def items_of(rows: list[dict[str, Any]]) -> tuple[Encoded, ...]:
    settings = PreferenceSettings(data="here")
    return encode(read_comparisons(rows).items, tiny(), settings, where="preference").items


def made(name: str, items: tuple[Encoded, ...], **settings: Any) -> PreferenceTask:
    chosen = PreferenceSettings(data="here", loss={"name": name}, **settings)
    zero = Reference(sums=tuple(torch.zeros(len(item.answers)) for item in items))
    one = Reference(sums=tuple(torch.zeros(1) for _ in items))
    function = preference_function(chosen)
    return PreferenceTask(
        learner=TorchLearner(tiny(), optimizer=OptimizerSettings()),
        function=function,
        settings=chosen,
        items=items,
        held_out=(),
        reference=zero,
        mismatched=(mismatched(items), one) if "kl" in function.inputs else None,
    )


@pytest.mark.parametrize("name", PREFERENCES.names())
def test_every_function_gives_the_same_gradient_however_the_step_is_split(name: str) -> None:
    rows = LABELS if name == "kto" else [*PAIRS, {**PAIRS[0], "rejected": " nine"}]
    task = made(name, items_of(rows), nll=0.5)
    batch, objective = task.batch(range(6))
    whole = task.learner.gradient(batch, objective)
    task.learner.tokens_per_microbatch = 1
    assert len(task.learner.parts(batch, objective)) == 6, "a prompt with its answers is a part"
    parts = task.learner.gradient(batch, objective)
    assert float(whole.norm()) > 0
    torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6 * float(whole.norm()))


def test_three_answers_to_one_prompt_cost_one_prompt_and_the_loss_is_that_of_the_pairs() -> None:
    items = items_of([PAIRS[0], {**PAIRS[0], "rejected": " nine"}, PAIRS[7]])
    task = made("logistic", items)
    batch, objective = task.batch([0, 1])
    assert len(batch.prompts) == 2 and len(batch.tokens) == 5
    logp = task.learner.evaluate(batch, {"logp"})["logp"]
    sums = torch.where(batch.mask, logp, 0).sum(1)
    margins = torch.stack([sums[0] - sums[1], sums[0] - sums[2], sums[3] - sums[4]])
    expected = -torch.nn.functional.logsigmoid(0.1 * margins).mean()
    losses = objective(Outputs(logp=logp), batch)
    assert isinstance(batch, Batch) and batch.row_weight is not None
    torch.testing.assert_close((losses * batch.row_weight).sum(), expected)


def test_a_run_lowers_the_loss_and_writes_what_a_run_writes(model: Path, tmp_path: Path) -> None:
    folder = run(
        model,
        tmp_path / "out",
        written(tmp_path, PAIRS),
        "steps=12",
        "optimizer.learning_rate=2e-2",
    )
    before, after = read_lines(folder / "evaluations.jsonl")
    assert (before["step"], after["step"], after["split"]) == (0, 12, "preferences")
    rows = list(read_lines(folder / "metrics.jsonl"))
    assert len(rows) == 12 and rows[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["margin"] > 0.2 and rows[-1]["loss"] < rows[0]["loss"]
    assert {"chosen_logp", "rejected_logp", "chosen_delta", "grad_norm"} <= rows[-1].keys()
    assert (folder / "report.html").exists() and (folder / "final" / "README.md").exists()
    card = (folder / "final" / "README.md").read_text()
    assert "by preference optimization with logistic" in card and "softrank" not in card
    assert RunData.read(folder).algorithm == "logistic"
    again = load_run(folder)  # what `groupwise prefer --resume` without a recipe goes on with
    assert again.steps == 12 and again.algorithm.name == "softrank"


@pytest.mark.parametrize("name", ["logistic", "kto"])
def test_a_resumed_run_is_the_unbroken_one(model: Path, tmp_path: Path, name: str) -> None:
    data = written(tmp_path, LABELS if name == "kto" else PAIRS)
    more = [f"preference.loss={{name='{name}'}}", "checkpoint.every_steps=2"]
    whole = run(model, tmp_path / "whole", data, *more)
    run(model, tmp_path / "cut", data, *more, "steps=4")
    kept = (tmp_path / "cut" / "reference.safetensors").read_bytes()
    quiet = Quiet()
    cut = run(model, tmp_path / "cut", data, *more, resume=True, progress=quiet)
    assert "resumed at step 4" in quiet.said
    assert (cut / "reference.safetensors").read_bytes() == kept
    first, second = (load_file(f / "final" / "model.safetensors") for f in (whole, cut))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_lines_that_were_lost_are_named(model: Path, tmp_path: Path) -> None:
    data = written(tmp_path, PAIRS)
    folder = run(model, tmp_path / "cut", data, "steps=4")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:-1]))
    quiet = Quiet()
    run(model, folder, data, "steps=5", resume=True, progress=quiet)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert any(f"{name} lacks step 4" in line for line in quiet.said), quiet.said


def test_the_reference_is_read_from_the_run_directory_and_not_from_the_trained_weights(
    model: Path, tmp_path: Path
) -> None:
    data = written(tmp_path, PAIRS)
    run(model, tmp_path / "cut", data, "steps=4")
    (tmp_path / "cut" / "reference.safetensors").unlink()
    run(model, tmp_path / "cut", data, resume=True)  # made again from the model's first weights
    run(model, tmp_path / "whole", data)
    first, second = (
        load_file(tmp_path / f / "final" / "model.safetensors") for f in ("whole", "cut")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_answers_that_are_too_long_are_counted_and_said(model: Path, tmp_path: Path) -> None:
    long = {**PAIRS[0], "rejected": " many" * 40}
    data = written(tmp_path, [long, *PAIRS[1:]])
    for how, said in (("drop", "1 × answers left out at"), ("cut", "1 × answers cut at 30")):
        quiet = Quiet()
        more = (f"preference.too_long={how}", "preference.max_tokens=30", "steps=1")
        run(model, tmp_path / how, data, *more, progress=quiet)
        assert any(said in line for line in quiet.said), quiet.said
    with pytest.raises(UsageError, match="preference.too_long = 'drop' or 'cut'"):
        run(model, tmp_path / "c", data, "preference.too_long=refuse", "preference.max_tokens=30")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("preference.loss={name='logistc'}", "did you mean logistic?"),
        ("preference.loss={name='logistic', beta=-1}", "preference.loss.beta = -1"),
        ("preference.loss={name='kto'}", None),
        ("preference=null", "add a section \\[preference\\]"),
    ],
)
def test_what_cannot_work_is_refused(
    model: Path, tmp_path: Path, more: str, message: str | None
) -> None:
    if message is None:  # Pairs are labelled answers too: one wanted, one not.
        run(model, tmp_path / "out", written(tmp_path, PAIRS), more, "steps=1")
        return
    with pytest.raises(UsageError, match=message):
        run(model, tmp_path / "out", written(tmp_path, PAIRS), more)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_labels_are_no_pairs(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Use 'kto'"):
        run(model, tmp_path / "out", written(tmp_path, LABELS))


def test_an_answer_that_is_chosen_and_rejected_has_no_label(model: Path, tmp_path: Path) -> None:
    both = [{**PAIRS[0], "chosen": " six", "rejected": PAIRS[0]["chosen"]}, *PAIRS]
    data = written(tmp_path, both)
    with pytest.raises(UsageError, match="is chosen in one row and rejected in another. Use 'logi"):
        run(model, tmp_path / "out", data, "preference.loss={name='kto'}", "steps=1")
    run(model, tmp_path / "pairs", data, "steps=1")


def test_a_resumed_run_keeps_its_own_answers(tmp_path: Path) -> None:
    """Sampled again on a GPU, they could be others."""
    given = [
        f"output={tmp_path / 'out'}",
        "preference.prompts=16",
        "group_size=4",
        "prompts_per_step=4",
        "evaluation.prompts=2",
    ]
    first, second = Quiet(), Quiet()
    prefer(load("word-problems-dpo", [*given, "steps=1"]), progress=first)
    prefer(load("word-problems-dpo", [*given, "steps=2"]), progress=second, resume=True)
    assert any("own answers" in line for line in first.said)
    assert not any("own answers" in line for line in second.said)
    assert [row["step"] for row in read_lines(tmp_path / "out" / "metrics.jsonl")] == [1, 2]
