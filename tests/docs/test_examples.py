"""The examples, as users run them, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise import ADVANTAGES
from groupwise.algorithms import ALGORITHMS, bind
from groupwise.config import Config, load
from groupwise.experiments import read_plan
from groupwise.training.stages.sample import sample
from small_runs import Quiet

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def registries_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is not there for the tests after it."""
    monkeypatch.setattr(ADVANTAGES, "_functions", dict(ADVANTAGES._functions))
    monkeypatch.setattr(ALGORITHMS, "_rows", dict(ALGORITHMS._rows))


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_are_short_and_whole(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    compile(text, name, "exec")


def test_the_ablation_adds_the_parts_of_dapo_one_by_one() -> None:
    plan = read_plan(EXAMPLES / "dapo_ablation.toml")
    arms = [differences_between(plan.config(a), plan.config(b)) for a, b in pairwise(plan.arms)]
    assert arms == [
        {"filter"},
        {"surrogate"},
        {"penalty"},
        {"weighting"},
        {"filter"},  # dynamic sampling in place of overlong filtering
    ]


def differences_between(first: Config, second: Config) -> set[str]:
    """The slots in which two configurations differ, and whether the penalty for length does."""
    rows = [bind(c.algorithm.name, c.algorithm.overrides()).row for c in (first, second)]
    slots = ("advantage", "ratio", "surrogate", "correction", "weighting", "filter")
    differing = {slot for slot in slots if getattr(rows[0], slot) != getattr(rows[1], slot)}
    used = [row.divergence_coefficient for row in rows]
    assert used == [0.0, 0.0]
    if first.rewards[1].weight != second.rewards[1].weight:
        differing.add("penalty")
    return differing


def test_a_migrated_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = example("trl_migration").main(2, str(tmp_path / "run"))
    assert trainer.state.global_step == 2
    assert "step 2: reward" in capsys.readouterr().out
    assert 0 < trainer.state.log_history[0]["answered"] <= 1


def test_rewards_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = example("own_reward")
    assert own.closeness("<answer>7</answer>", "9") == pytest.approx(1 / 3)  # off by 2
    assert own.closeness("7", "9") == 0.0 and own.closeness("<answer>7</answer>", "?") is None
    assert own.shortest(["</answer>", "</answer>", ""], [5, 4, 1]) == [0.0, 0.1, 0.0]
    run = own.main(1, str(tmp_path / "run"))
    assert 0 < run.metrics[0]["reward_closeness"] <= 1
    assert "closeness: " in capsys.readouterr().out


def test_an_advantage_of_ones_own(tmp_path: Path) -> None:
    run = example("own_advantage").main(1, str(tmp_path / "run"))
    # Rewards 0, 1, 3 around their median 1, times the scale 2 of the row.
    advantages = bind("median").advantage({"rewards": _row(0, 1, 3)})
    assert advantages.tolist() == [[-2.0, 0.0, 4.0]]
    assert run.config.algorithm.name == "median" and len(run.metrics) == 1


def _row(*values: float):
    import torch

    return torch.tensor([values], dtype=torch.float32)


def test_gsm8k_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": f"Ann has {n} pens and gets 2?", "answer": f"{n}+2={n + 2}\n#### {n + 2}"}
        for n in range(2, 14)
    ]
    for name, part in (("train", rows[:8]), ("test", rows[8:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    small = ("steps=1", "prompts_per_step=2", "group_size=2", "warmup.steps=2", "threads=1")
    few = ("sampling.max_tokens=16", "evaluation.samples=2", "guards.silent_rewards=say",
           "evaluation.validation=2")  # fmt: skip
    files = [str(tmp_path / f"{name}.jsonl") for name in ("train", "test")]
    run = example("gsm8k").main(*files, f"output={tmp_path / 'run'}", *small, *few)
    assert (run.folder / "final" / "README.md").exists()
    said = capsys.readouterr().out
    assert "word-problems-base: greedy" in said or "bundled: greedy" in said
    assert "final: greedy" in said


def test_a_task_in_korean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score, run = example("korean_task").main(1, str(tmp_path / "run"))
    assert score.total[0] == pytest.approx(1.0) and score.total[1] == 0.0
    assert len(run.metrics) == 1
    assert "korean_exact_match: reference 1.00, no answer 0.00" in capsys.readouterr().out


def test_predictions_have_the_schema_and_the_ids_of_the_competition(tmp_path: Path) -> None:
    questions = [
        {
            "id": number,
            "input": {"question": f"{number}?"},
            "output": {"answer": '"가"가 옳다. 끝.'},
        }
        for number in ("623", "624")
    ]
    (tmp_path / "dev.json").write_text(json.dumps(questions), encoding="utf-8")
    data = [f"data.{split}={tmp_path / 'dev.json'}" for split in ("train", "eval")]
    config = load("korean-norms", [*data, "sampling.max_tokens=4"])
    sample(config, "bundled", tmp_path / "rows.jsonl", count=2, split="eval", progress=Quiet())
    example("competition_file").main(str(tmp_path / "rows.jsonl"), str(tmp_path / "made.json"))
    made = json.loads((tmp_path / "made.json").read_text(encoding="utf-8"))
    assert [item.keys() for item in made] == [{"id", "input", "output"}] * 2
    assert [(item["id"], item["input"]) for item in made] == [
        (item["id"], item["input"]) for item in questions
    ]
    assert all(isinstance(item["output"]["answer"], str) for item in made)


def test_the_first_answer_to_a_question_counts_without_its_reasoning(tmp_path: Path) -> None:
    asked = {"question": "가?", "type": "x"}
    questions: list[dict[str, Any]] = [{"input": asked}, {"question": "나?"}]
    written = [("1", "<think>왜?</think> 첫째"), ("1", "둘째"), ("2", "셋째")]
    rows = [{"id": n, "completion": text, **questions[int(n) - 1]} for n, text in written]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    example("competition_file").main(str(tmp_path / "rows.jsonl"), str(tmp_path / "made.json"))
    made = (tmp_path / "made.json").read_text(encoding="utf-8")
    assert json.loads(made) == [
        {"id": "1", "input": asked, "output": {"answer": "첫째"}},
        {"id": "2", "input": {"question": "나?"}, "output": {"answer": "셋째"}},
    ]
    assert "첫째" in made
