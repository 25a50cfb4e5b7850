"""Evaluations while a run trains: of the base model, once, and without changing what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.cli.train import _print_results
from groupwise.config import load
from groupwise.errors import GroupwiseError
from groupwise.models import save_policy
from groupwise.rundir.files import append_text, read_lines
from groupwise.training.prepare import prepare
from groupwise.types import Prompt
from small_runs import Quiet, prepared, timeless, tiny

HELD_OUT = [Prompt(id=str(n), text=f"{n}+1=", answer=str(n + 1)) for n in range(3)]


class Shown(Quiet):
    """Progress that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.held_out: list[float | None] = []

    def step(self, run: str, step: int, metrics: dict[str, float]) -> None:
        self.held_out.append(metrics.get("held_out"))

    def log(self, text: str) -> None:
        self.lines.append(text)


def trained(folder: Path, *settings: str, **given: object) -> Shown:
    shown = Shown()
    run = prepared(folder, "steps=2", *settings, eval_prompts=HELD_OUT, progress=shown, **given)
    run.trainer.run()
    run.close()
    return shown


def test_the_base_model_is_evaluated_first_and_nothing_else_changes(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", "evaluation.at_start=false")
    shown = trained(tmp_path / "first")
    rows = [*read_lines(tmp_path / "first" / "evaluations.jsonl")]
    assert [row["step"] for row in rows] == [0, 2]
    assert rows[1] == next(iter(read_lines(tmp_path / "plain" / "evaluations.jsonl")))
    assert timeless(tmp_path / "first") == timeless(tmp_path / "plain")
    base = rows[0]["figures"]["greedy"]["value"]
    assert plain.held_out == [None, None] and shown.held_out == [base, base]
    assert any("evaluating the base model" in line for line in shown.lines)
    told = f"greedy {100 * base:.1f} %"
    assert any("held-out" in line and told in line for line in shown.lines)


def test_a_run_says_which_model_it_loads(tmp_path: Path) -> None:
    save_policy(tiny(), tmp_path / "model")
    shown = Shown()
    given = [
        "steps=1",
        "threads=1",
        f"model.path={tmp_path / 'model'}",
        f"output={tmp_path / 'run'}",
    ]
    prepare(load("word-problems", given), progress=shown).close()
    assert shown.lines[0] == f"loading {tmp_path / 'model'}"


def test_a_model_is_named_before_it_is_loaded(tmp_path: Path) -> None:
    save_policy(tiny(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    shown = Shown()
    given = ["steps=1", f"model.path={tmp_path / 'model'}", f"output={tmp_path / 'run'}"]
    with pytest.raises(GroupwiseError):
        prepare(load("word-problems", given), progress=shown)
    assert shown.lines == [f"loading {tmp_path / 'model'}"]


def test_a_run_that_goes_on_does_not_evaluate_the_base_again(tmp_path: Path) -> None:
    trained(tmp_path)
    shown = trained(tmp_path, "steps=3", resume=True)
    assert [row["step"] for row in read_lines(tmp_path / "evaluations.jsonl")] == [0, 2, 3]
    assert not any("base model" in line for line in shown.lines)


def test_a_base_evaluation_that_is_cut_off_has_all_splits_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"validation": HELD_OUT, "held_out": HELD_OUT}
    run = prepared(tmp_path, "steps=1", eval_prompts=splits)
    with monkeypatch.context() as patched:

        def killed(path: Path, text: str) -> None:
            if path.name == "evaluations.jsonl":
                append_text(path, text)
                raise KeyboardInterrupt

        patched.setattr("groupwise.rundir.files.append_text", killed)
        with pytest.raises(KeyboardInterrupt):
            run.trainer.run()
    run.close()
    rows = [*read_lines(tmp_path / "evaluations.jsonl")]
    assert {(row["step"], row["split"]) for row in rows} == {(0, split) for split in splits}
    again = prepared(tmp_path, "steps=1", eval_prompts=splits, resume=True)
    again.trainer.run()
    again.close()
    found = {(row["step"], row["split"]) for row in read_lines(tmp_path / "evaluations.jsonl")}
    assert found == {(step, split) for step in (0, 1) for split in splits}


@pytest.mark.parametrize(
    "text", ["[1]\n[2]\n", '{"step": 1}\n{"step": 2, "split": []}\n', '{"step": 0, "figures": 3}\n']
)
def test_figures_that_are_damaged_do_not_hide_where_the_model_is(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluations.jsonl").write_text(text)
    _print_results(tmp_path, load("word-problems"))
    said = capsys.readouterr().out
    assert "evaluations.jsonl cannot be read (" in said and f"model   {tmp_path / 'final'}" in said


def test_a_run_without_a_best_model_says_why_it_ends_early(tmp_path: Path) -> None:
    early = ("steps=4", "evaluation.every_steps=1", "evaluation.patience=1")
    shown = trained(tmp_path, *early, "evaluation.keep_best=false", "optimizer.learning_rate=0")
    said = "evaluation.patience = 1: the score stopped improving; the run ends at step 2 of 4"
    assert any(said in line for line in shown.lines), shown.lines
    assert not (tmp_path / "best").exists()


def test_the_held_out_column_is_that_of_the_split_held_out(tmp_path: Path) -> None:
    """Other splits are measured too, such as those of the demo."""
    shown = Shown()
    run = prepared(tmp_path, "steps=1", eval_prompts=[], progress=shown)
    for split, accuracy in (("held_out", 0.5), ("larger_numbers", 0.25)):
        figures = {"greedy": {"value": accuracy, "low": 0.0, "high": 1.0}}
        run.trainer.monitor.write_evaluation(0, {"split": split, "figures": figures})
    run.trainer.run()
    run.close()
    assert shown.held_out == [0.5]
