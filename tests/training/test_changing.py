"""Data and numbers that change while a run goes on: as scheduled, and the same after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.data import load_train, split_validation
from groupwise.errors import UsageError
from groupwise.training.stages.warmup import worked_examples
from groupwise.types import Prompt
from small_runs import config, prepared, timeless, tiny

CHANGING = (
    "schedules=[{setting = 'rewards.0.weight', points = [[1, 0.5], [4, 2.0]]}, "
    "{setting = 'algorithm.divergence.coefficient', points = [[1, 0.0], [4, 0.3]]}]",
    "algorithm.name=grpo",
    "algorithm.divergence={name = 'k3', coefficient = 0.04}",
    "model.reference_every=2",
    "optimizer.reset_every=2",
    "data.order={name = 'prioritised', floor = 0.1}",
    "guards.silent_rewards=say",
    "checkpoint.every_steps=1",
)


def run(folder: Path, *more: str, **given: Any) -> Any:
    made = prepared(folder, *CHANGING, *more, **given)
    try:
        made.trainer.run()
        return {n: w.clone() for n, w in made.trainer.policy.trained().items()}
    finally:
        made.close()


def test_a_resumed_run_changes_as_the_unbroken_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    for stop in (1, 2, 3):
        folder = tmp_path / str(stop)
        made = prepared(folder, *CHANGING)
        for _ in range(stop):
            made.trainer.advance()
        made.trainer.save(wait=True)
        made.close()
        resumed = run(folder, resume=True)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole), stop
        assert timeless(folder) == timeless(tmp_path / "whole")


def test_the_numbers_of_every_step_are_those_of_the_schedule(tmp_path: Path) -> None:
    made = prepared(tmp_path / "run", *CHANGING)
    seen = []
    for _ in range(4):
        made.trainer.advance()
        weight = made.trainer.source.scorer.composition.parts[0].weight
        seen.append((weight, made.trainer.algorithm.row.divergence_coefficient))
    made.close()
    assert seen == [(0.5, 0.0), (1.0, pytest.approx(0.1)), (1.5, pytest.approx(0.2)), (2.0, 0.3)]


def test_the_reference_becomes_the_policy_when_it_is_due(tmp_path: Path) -> None:
    made = prepared(tmp_path / "run", *CHANGING)
    learner: Any = made.trainer.policy
    for step in range(1, 5):
        made.trainer.advance()
        own, kept = learner.trained(), learner.frozen.named()
        assert all(torch.equal(own[n], kept[n]) for n in own) is (step % 2 == 0)
        assert bool(learner.optimizer.adam.state) is (step % 2 == 1)
    made.close()


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("schedules=[{setting = 'rewards.0.weight', points = [[9, 1.0]]}]", "has only 4 steps"),
        ("schedules=[{setting = 'optimizer.eps', points = [[1, 1.0]]}]", "must be a weight"),
        (
            "schedules=[{setting = 'rewards.0.penalty', points = [[1, 1.0]]}]",
            "must be a weight",  # a scorer is made once, with its settings
        ),
        ("schedules=[{setting = 'rewards.0.weight', points = [[2, 1], [1, 0]]}]", "ascend"),
        ("data.sources=[{name = 'a', data = 'countdown', share = 0.5}]", "add up to 0.5"),
        ("data.order={name = 'curriculum'}", "data.order.column: must be given"),
        ("data.transforms=['target_length(low=9, high=3)']", "must be 1 ≤ low ≤ high"),
        ("data.transforms=['target_lenght()']", "did you mean target_length"),
    ],
)
def test_what_cannot_work_is_refused_at_load(tmp_path: Path, wrong: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config(tmp_path, wrong)


def test_a_schedule_of_a_part_that_is_not_there_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="rewards"):
        prepared(tmp_path, "schedules=[{setting = 'rewards.7.weight', points = [[1, 1.0]]}]")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_sources_are_mixed_and_named(tmp_path: Path) -> None:
    found = load_train(
        config(
            tmp_path,
            "data.sources=[{name = 'few', data = 'knights_knaves(people=[2, 2])', share = 0.25, "
            "limit = 5}, {name = 'many', data = 'word_problems', share = 0.75, limit = 6}]",
            "data.transforms=['target_length(low=3, high=9)']",
        )
    )
    assert [p.columns["source"] for p in found] == ["few"] * 5 + ["many"] * 6
    assert {p.columns["people"] for p in found[:5]} == {2}
    assert all(3 <= p.columns["num_tokens"] <= 9 for p in found)
    assert str(found[0]).endswith(f"Think for {found[0].columns['num_tokens']} tokens.")


def test_validation_prompts_are_not_trained_on_and_choose_the_best(tmp_path: Path) -> None:
    settings = config(tmp_path)
    prompts = load_train(settings)
    rest, apart = split_validation(prompts, 5)
    assert len(apart) == 5 and not {p.id for p in rest} & {p.id for p in apart}
    made = prepared(tmp_path / "run", "evaluation.validation=5", eval_prompts=list(prompts[:2]))
    assert list(made.splits) == ["validation", "held_out"]
    assert not {p.id for p in apart} & {p.id for p in made.trainer.source.prompts}
    made.close()


def test_training_prompts_that_repeat_a_validation_prompt_are_left_out() -> None:
    prompts = [
        Prompt(id=str(n), text=f"{n // 2}+1?") for n in range(20)
    ]  # every text is there twice
    rest, apart = split_validation(prompts, 5)
    assert len(apart) == 5 and rest
    assert not {p.text for p in rest} & {p.text for p in apart}


def test_the_warm_up_sees_prompts_as_training_does(tmp_path: Path) -> None:
    settings = config(
        tmp_path,
        "data.transforms=['target_length(low=3, high=9)']",
        "warmup.column=solution",
        "sampling.max_tokens=64",
    )
    trained = {p.id: str(p) for p in load_train(settings)}
    learned = [each.prompt for each in worked_examples(settings, tiny())]
    shared = [p for p in learned if p.id in trained]
    assert shared and all(str(p) == trained[p.id] for p in shared)


def test_a_run_ends_when_its_evaluations_stop_rising(tmp_path: Path) -> None:
    scores = iter([0.1, 0.3, 0.2, 0.3, 0.9])
    made = prepared(
        tmp_path / "run",
        "steps=8",
        "evaluation.patience=2",
        "evaluation.every_steps=1",
        "evaluation.at_start=false",
    )
    made.trainer.evaluation.evaluate = lambda step: {"score": next(scores), "split": "held_out"}
    made.trainer.run()
    made.close()
    assert made.trainer.done == 4  # 0.2 and 0.3 are no new best
    saved = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert saved["config"]["evaluation"]["patience"] == 2
