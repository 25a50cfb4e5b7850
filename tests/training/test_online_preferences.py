"""Preferences among a run's own rollouts: which pairs, their loss, resuming, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groupwise.config import load, load_run
from groupwise.errors import UsageError
from groupwise.report.data import RunData
from groupwise.rundir.overview import overview
from groupwise.training.offline.preference import prefer
from groupwise.training.online_preferences import (
    OnlinePreferenceTrainer,
    pair_metrics,
    paired,
    rollout_pairs,
)
from groupwise.training.prepare import Prepared, prepare
from groupwise.training.run import train_config
from groupwise.types import Completion, Group, Prompt, ScoredGroups, Scores, Status
from groupwise.updates import sequences
from small_runs import Quiet, assert_resumes_to_the_bit

NAN = float("nan")


def completion(text: str, *, finish: str = "stop", tokens: int = 2) -> Completion:
    return Completion(
        tokens=[7] * tokens,
        mask=[True] * tokens,
        logprobs=[-1.0] * tokens,
        text=text,
        finish=finish,  # pyright: ignore[reportArgumentType]
    )


def scored(*groups: list[tuple[Completion, float]]) -> ScoredGroups:
    total = torch.tensor([[reward for _, reward in group] for group in groups])
    valid = ~total.isnan()
    return ScoredGroups(
        groups=tuple(
            Group(
                prompt=Prompt(id=str(i), text="?", answer=None),
                prompt_tokens=(5, 6 + i),
                completions=tuple(c for c, _ in group),
            )
            for i, group in enumerate(groups)
        ),
        scores=Scores(
            total=total,
            correct=torch.full_like(total, NAN),
            parts={},
            status=tuple((Status.OK,) * len(group) for group in groups),
            valid=valid,
        ),
        keep=valid,
        drawn=len(groups),
    )


GROUPS = scored(
    [
        (completion("worst", tokens=3), 0.0),
        (completion("cut", finish="length"), 9.0),
        (completion("best"), 1.0),
        (completion("middle"), 0.5),
        (completion("best"), 1.0),
    ],
    [(completion(name), 1.0) for name in "abcde"],
    [
        (completion("unjudged"), NAN),
        (completion("left"), 0.0),
        (completion("right"), 1.0),
        (completion("left"), 0.0),
        (completion("other"), 0.0),
    ],
)
"""Rows 0 to 4, 5 to 9 and 10 to 14. The second group says nothing."""


def test_the_best_answer_is_paired_with_the_worst_or_all_that_differ() -> None:
    assert rollout_pairs(GROUPS, "best_worst").tolist() == [[2, 0], [12, 14]]
    every = rollout_pairs(GROUPS, "all").tolist()
    assert every == [[2, 3], [2, 0], [3, 0], [12, 11], [12, 14]]
    keep = GROUPS.keep.clone()
    keep[2] = False
    assert rollout_pairs(replace(GROUPS, keep=keep), "best_worst").tolist() == [[2, 0]]


def test_only_rows_of_pairs_are_computed_each_pair_with_the_same_weight() -> None:
    whole = sequences(GROUPS)
    batch, pairs = paired(whole, rollout_pairs(GROUPS, "best_worst"))
    assert pairs.tolist() == [[1, 0], [2, 3]]
    assert batch.length.tolist() == [3, 2, 2, 2] and batch.group.tolist() == [0, 0, 2, 2]
    assert batch.row_weight is not None and batch.row_weight.tolist() == [0.5] * 4
    assert batch.columns["row"].tolist() == [0, 1, 2, 3]
    assert pair_metrics(GROUPS, batch, pairs) == {
        "pairs": 2.0,
        "unpaired_share": pytest.approx(1 / 3),
    }
    none, no_pairs = paired(whole, torch.zeros(0, 2, dtype=torch.long))
    assert len(none.tokens) == 0
    assert pair_metrics(GROUPS, none, no_pairs) == {"pairs": 0.0, "unpaired_share": 1.0}


def made(folder: Path, *more: str, resume: bool = False) -> Prepared:
    given = [
        f"output={folder}",
        "steps=4",
        "data.limit=100",
        "prompts_per_step=4",
        "group_size=4",
        "evaluation.every_steps=0",
        "evaluation.prompts=2",
        "evaluation.samples=2",
        "optimizer.learning_rate=1e-3",
        *more,
    ]
    config = load("word-problems-online-dpo", given)
    return prepare(config, progress=Quiet(), eval_prompts=[], resume=resume)


def test_the_first_loss_is_that_of_a_margin_of_zero_and_margins_grow(tmp_path: Path) -> None:
    run = made(
        tmp_path, "preference.nll=0.0", "prompts_per_step=12", "optimizer.learning_rate=2e-4"
    )
    assert isinstance(run.trainer, OnlinePreferenceTrainer)
    assert run.trainer.monitor.name == "logistic"
    rows = [run.trainer.advance().metrics for _ in range(3)]
    run.close()
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[2]["margin"] > 0.01 and rows[2]["loss"] < math.log(2)
    assert all(row["pairs"] > 0 and 0 <= row["unpaired_share"] < 1 for row in rows)


def test_a_function_without_a_reference_has_none(tmp_path: Path) -> None:
    run = made(tmp_path, "preference.loss={name='simpo'}", "steps=1")
    assert run.trainer.policy.reference == "none"  # pyright: ignore[reportAttributeAccessIssue]
    row = run.trainer.advance().metrics
    run.close()
    assert row["pairs"] > 0 and "chosen_delta" not in row


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    assert_resumes_to_the_bit(made, tmp_path, steps=4)


def test_a_run_from_the_command_line_is_named_by_its_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"output={tmp_path / 'run'}", "steps=1", "prompts_per_step=4", "group_size=4"]
    given += ["evaluation.prompts=2", "evaluation.samples=2", "data.limit=100"]
    run = train_config(load("word-problems-online-dpo", given))
    assert "logistic  step 1/1" in capsys.readouterr().err
    assert repr(run).startswith("Run(logistic, 1 steps")
    [found] = overview(run.folder)
    assert (found.algorithm, found.steps) == ("logistic", 1)
    assert RunData.read(run.folder).label == "logistic"
    card = (run.folder / "final" / "README.md").read_text()
    assert "by online preference optimization with logistic" in card and "softrank" not in card
    assert load_run(run.folder).algorithm.name == "softrank"  # as it was set


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("preference.data=pairs.jsonl", "preference.data = 'pairs.jsonl': .* remove it"),
        ("preference.loss={name='kto'}", "'kto': judges single answers"),
        ("group_size=1", "group_size = 1: must be at least 2 to form pairs"),
        ("update.epochs=2", "update.epochs = 2: online preferences take one"),
        ("algorithm.name=ppo", "algorithm.name = 'ppo': trains the second learner 'critic'"),
        ("process={function='steps.py:f'}", "process"),
        ("ahead=1", "ahead: answers of earlier weights"),
        ("streaming={}", "streaming: answers of earlier weights"),
        ("partial_rollouts={tokens_per_step=8}", "partial_rollouts: answers of earlier weights"),
        ("preference.epochs=3", "preference.epochs = 3.0: applies only to pairs formed before"),
        ("preference.prompts=9", "preference.prompts = 9: applies only to pairs formed before"),
        (
            "preference.held_out=0.1",
            "preference.held_out = 0.1: applies only to pairs formed before",
        ),
        ("cluster={}", "preference.online = true: cannot be combined with .cluster."),
    ],
)
def test_what_has_no_meaning_online_is_refused(more: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("word-problems-online-dpo", [more])


def test_no_reference_and_the_other_command_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="preference.loss needs a reference"):
        made(tmp_path, "model.reference=none")
    with pytest.raises(UsageError, match="preference.online = true: .* use groupwise train"):
        prefer(load("word-problems-online-dpo"))


@pytest.mark.parametrize(
    ("recipe", "more", "setting"),
    [
        ("word-problems-online-dpo", [], "preference.online = true"),
        ("word-problems-distil", ["distillation.top_k=5"], "distillation.top_k = 5"),
    ],
)
def test_ranks_of_torchrun_are_refused_before_anything_is_loaded(
    recipe: str, more: list[str], setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{setting}: cannot be combined with torchrun"):
        train_config(load(recipe, [f"output={tmp_path / 'run'}", *more]), progress=Quiet())
