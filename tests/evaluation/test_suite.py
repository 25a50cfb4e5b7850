"""Several models on several tasks: the curve over k, the family of differences, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import groupwise
from groupwise.cli import main
from groupwise.config import load
from groupwise.evaluation import Estimate, holm, pass_at_k
from groupwise.evaluation.details import curve_over_k
from groupwise.evaluation.measure import measure
from groupwise.evaluation.sections import Section, sections
from groupwise.evaluation.suite import SuiteResult
from groupwise.rewards import from_functions
from groupwise.rollouts import ScriptedEngine
from groupwise.training.stages.base_model import small_policy
from groupwise.training.stages.sft import save
from groupwise.types import Prompt, Sampling

LESS = ["--set", "evaluation.prompts=4", "--set", "evaluation.samples=2", "--set", "threads=1"]


def test_curve_over_k_uses_one_set_of_samples() -> None:
    said = ["7", "7", "8", "9"]

    def answer(prompt: Prompt, sample: int) -> str:
        return f"<answer>{said[sample]}</answer>"

    with from_functions(["exact_answer"]) as scorer:
        measured = measure(
            ScriptedEngine(answer),
            scorer,
            [Prompt(id="1", text="?", answer="7")],
            [(1,)],
            sampling=Sampling(max_tokens=60),
            samples=4,
        )
    curve = curve_over_k(measured, [1, 2, 4], style="answer_tag")
    assert [curve[f"pass_at_{k}"].value for k in (1, 2, 4)] == pytest.approx(
        [pass_at_k(4, 2, k=k) for k in (1, 2, 4)]
    )
    # Of the 6 pairs 77 is right, 78 and 79 (twice each) are ties, 89 is wrong.
    assert [curve[f"maj_at_{k}"].value for k in (1, 2, 4)] == pytest.approx([1 / 2, 1 / 2, 1])
    assert not [name for name in curve_over_k(measured, [2]) if name.startswith("maj")]


def test_models_by_tasks_by_budgets(tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / "suite.json"
    save(small_policy(hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=64), other)
    again = tmp_path / "again.toml"
    again.write_text((Path(groupwise.__file__).parent / "recipes/word-problems.toml").read_text())
    words = ["--task", f"word-problems,{again}", "--budgets", "8,48", "--k", "1,2"]
    picture = tmp_path / "curve.png"
    files = ["--json", str(file), "--png", str(picture)]
    assert main(["eval", "bundled", str(other), *words, *files, *LESS]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(file.read_text())
    sections = [
        f"{task}, {budget} tokens" for task in ("word-problems", again) for budget in (8, 48)
    ]
    assert set(found["models"]) == {"bundled", "other"}
    assert list(found["models"]["bundled"]) == sections
    bundled = found["models"]["bundled"]
    short, whole = (bundled[section] for section in sections[:2])
    assert {"pass_at_1", "pass_at_2", "maj_at_2"} <= set(whole)
    assert short["length"]["value"] <= 8 < whole["length"]["value"]
    for figures in (short, whole):
        kept = figures["within_budget"]["value"] + figures["truncated"]["value"]
        assert kept == pytest.approx(1)
    differences = found["differences"]
    assert [(d["model"], d["section"]) for d in differences] == [("other", s) for s in sections]
    assert [d["p_holm"] for d in differences] == pytest.approx(holm([d["p"] for d in differences]))
    for d in differences:
        first, second = (found["models"][m][d["section"]]["sampled"] for m in ("other", "bundled"))
        assert np.isclose(d["value"], first["value"] - second["value"])


def test_one_model_over_target_lengths_and_templates(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain.txt", tmp_path / "suite.json"
    plain.write_text("Question: {question}\nAnswer:\n")
    words = ["--target-lengths", "24,8", "--templates", f"recipe,{plain}", "--json", str(file)]
    asked = ["--set", "data.transforms=[\"target_length(wording=' In {n} words.')\"]"]
    assert main(["eval", "bundled", *words, *asked, *LESS]) == 0
    sections = json.loads(file.read_text())["models"]["bundled"]
    assert list(sections) == [
        f"word-problems, template {name}, target {n}"
        for name in ("recipe", "plain")
        for n in (8, 24)
    ]
    for place, figures in enumerate(sections.values()):
        target, found = (8, 24)[place % 2], {k: v["value"] for k, v in figures.items()}
        assert {"sampled", "well_formed"} <= set(found)
        assert found["length_deviation"] == pytest.approx(found["length"] / target - 1)
        assert found["length_rmse"] >= abs(found["length_deviation"]) - 1e-9
        assert 0 <= found["within_target"] <= 1
    recipe, other = (
        sections[f"word-problems, template {n}, target 24"] for n in ("recipe", "plain")
    )
    assert recipe["length"] != other["length"]


def test_the_curve_runs_over_numbers_or_else_over_models() -> None:
    def suite(found: list[Section], models: str = "ab", ks: tuple[int, ...] = ()) -> SuiteResult:
        cells = {each.name: at(10 * place) for place, each in enumerate(found)}
        figures = {model: cells for model in models}
        return SuiteResult(figures=figures, sections=tuple(found), ks=ks, differences={}, notes=())

    def at(value: float) -> dict[str, Estimate]:
        names = ("sampled", "pass_at_1", "pass_at_4", "maj_at_1")
        return {
            name: Estimate(value=value + number, low=0, high=1) for number, name in enumerate(names)
        }

    config = load("word-problems")
    plain = sections({"x": config, "y": config})
    curve = suite(sections({"x": config, "y": config}, budgets=[40, 8])).curve()
    assert (curve.axis, curve.places) == ("token budget", (8, 40))
    values = {name: [cell and cell.value for cell in line] for name, line in curve.lines.items()}
    assert values == {f"{m}, {t}": v for m in "ab" for t, v in (("x", [0, 10]), ("y", [20, 30]))}
    over = suite(plain).curve()
    assert (over.axis, over.places, list(over.lines)) == ("model", ("a", "b"), ["x", "y"])
    alone = suite(plain, "a").curve()
    assert (alone.places, list(alone.lines)) == (("x", "y"), ["a"])
    by_k = suite(plain[:1], "a", (1, 4)).curve()
    assert [cell and cell.value for cell in by_k.lines["a, x, pass@k"]] == [1, 2]
    assert [cell and cell.value for cell in by_k.lines["a, x, maj@k"]] == [3, None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bundled", "bundled"], "must differ"),
        (["bundled", "--task", "word-problems,word-problems"], "tasks must differ"),
        (["bundled", "--task", "word-problems,word-problms"], "word-problms"),
        (["bundled", "no-such-folder/model/at-all"], "no-such-folder"),
        (["bundled", "--budgets", "24,4096"], "must be at most 48, sampling.max_tokens"),
        (["bundled", "--budgets", "0"], "at least 1"),
        (["bundled", "--target-lengths", "64"], "must be at most 48, sampling.max_tokens"),
        (["bundled", "--target-lengths", "16"], "has no transform target_length"),
        (["bundled", "--templates", "none.txt"], "must be a text file with {question}"),
        (["bundled", "--templates", "recipe,recipe"], "names must differ"),
        (["bundled", "--png", "x.png"], "several models"),
        (["bundled", "--k", "1", "--png", "x.txt"], "must end in .png, .svg or .pdf"),
        (["bundled", "--k", "1,4"], "--set evaluation.samples=4"),
        (["bundled", "--k", "1,x"], "whole numbers"),
        (["bundled", "--k", "1", "--against", "x"], "--against"),
    ],
)
def test_bad_suites_are_refused_before_a_model_is_loaded(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("groupwise.evaluation.evaluate.load_to_answer", loaded)
    assert main(["eval", *words, *LESS]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
