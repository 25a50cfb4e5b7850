"""Reward models: the packed loss, what a run writes, its figures, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from data_folder import data_file
from groupwise import RANKINGS
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.models import load_policy
from groupwise.models.scoring import scorer_of
from groupwise.prompts.generators.word_problem_rankings import ranking_rows
from groupwise.prompts.preferences import read_comparisons
from groupwise.rewards.judges.models import answer_tokens, reward_scores
from groupwise.rundir.files import read_lines
from groupwise.settings import OptimizerSettings, RewardModelSettings
from groupwise.training.offline.encoding import Encoded, encode
from groupwise.training.offline.ranking_figures import ranking_figures
from groupwise.training.offline.reward_model import (
    RewardModelTask,
    flips,
    ranking_function,
    train_reward_model,
)
from groupwise.types import Prompt
from groupwise.updates import Score, TorchLearner
from small_runs import Quiet, tiny

ROWS = list(ranking_rows(6))
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completions"][0], "rejected": answer, "margin": 0.5}
    for row in ROWS
    for answer in row["completions"][1:]
]


def made(rows: list[dict[str, Any]], loss: dict[str, Any]) -> RewardModelTask:
    settings = RewardModelSettings(data="here", loss=loss)
    policy = scorer_of(tiny())
    with torch.no_grad():
        policy.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    items = encode(read_comparisons(rows).items, policy, settings, where="reward_model").items
    learner = TorchLearner(
        policy,
        optimizer=OptimizerSettings(),
        head=Score(policy.model, reads={"after"}),
    )
    return RewardModelTask(
        learner=learner, function=ranking_function(settings), items=items, held_out=items
    )


def alone(task: RewardModelTask, item: Encoded, answer: int) -> torch.Tensor:
    """The score of one answer by a plain forward pass of the classifier, with gradient."""
    ids = torch.tensor([[*item.prompt, *item.answers[answer]]])
    states = task.learner.model.model(ids).last_hidden_state[0, -1]
    return task.learner.model.score(states)[0]


@pytest.mark.parametrize("as_pairs", [True, False], ids=["pairs", "rankings"])
def test_the_packed_loss_and_gradient_are_those_of_the_pairs_one_by_one(as_pairs: bool) -> None:
    task = made(PAIRS if as_pairs else ROWS, {"name": "bradley_terry", "center": 0.1})
    batch, objective = task.batch(range(len(task.items)))
    gradient = task.learner.gradient(batch, objective)
    losses = []
    for item in task.items:
        each = []
        for ranking in item.comparison.rankings:
            for better, worse in ranking.pairs:
                first, second = alone(task, item, better), alone(task, item, worse)
                lead = first - second - ranking.margin
                each.append(-F.logsigmoid(lead) + 0.1 * (first + second) ** 2)
        losses += each if as_pairs else [torch.stack(each).mean()]
    task.learner.optimizer.clear()
    torch.stack(losses).mean().backward()
    expected = task.learner.optimizer.pop_gradient()
    assert float(expected.norm()) > 0.1
    torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-6 * float(expected.norm()))


@pytest.mark.parametrize("name", RANKINGS.names())
def test_every_loss_gives_the_same_gradient_however_the_step_is_split(name: str) -> None:
    task = made(ROWS, {"name": name})
    batch, objective = task.batch([4, 0, 2])
    whole = task.learner.gradient(batch, objective)
    task.learner.tokens_per_microbatch = 1
    assert len(task.learner.parts(batch, objective)) == 3
    parts = task.learner.gradient(batch, objective)
    assert float(whole.norm()) > 0
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5 * float(whole.norm()))


def test_the_reward_reads_what_training_reads() -> None:
    """Prompts of messages and plain prompts alike, to the last token."""
    texts = {"prompt": "Count: 1, 2", "chosen": ", 3", "rejected": ", 4"}
    rows = [*ROWS[:2], texts]
    policy = tiny()
    given = RewardModelSettings(data="here")
    for row in read_comparisons(rows).items:
        (item,) = encode([row], policy, given, where="here", whole_turns=True).items
        for answer, tokens in zip(row.answers, item.answers, strict=True):
            text = answer if isinstance(answer, str) else answer[-1]["content"]
            read = answer_tokens(row.prompt, text, policy.tokenizer)
            assert read == [*item.prompt, *tokens]


def test_a_prompt_is_computed_once_for_all_its_pairs() -> None:
    task = made(PAIRS, {"name": "bradley_terry"})
    batch, _ = task.batch(range(len(task.items)))
    assert len(batch.prompts) == len(ROWS)
    assert len(batch.tokens) == sum(len(row["completions"]) for row in ROWS) < 2 * len(PAIRS)


def run(tmp_path: Path, name: str, *more: str, **how: Any) -> Path:
    model = tmp_path / "model"
    if not model.exists():
        policy = tiny()
        policy.model.save_pretrained(model)
        policy.tokenizer.save_pretrained(model)
    given = [
        f"output={tmp_path / name}",
        f"model.path={model}",
        "reward_model.prompts=40",
        "reward_model.held_out=0.2",
        "steps=4",
        "prompts_per_step=8",
        "evaluation.every_steps=0",
        "optimizer.schedule=constant",
        *more,
    ]
    return train_reward_model(load("word-problems-reward-model", given), progress=Quiet(), **how)


def test_the_result_is_a_classifier_that_scores_conversations_alike_everywhere(
    tmp_path: Path,
) -> None:
    folder = run(tmp_path, "out")
    rows = list(read_lines(folder / "evaluations.jsonl"))
    assert {row["split"] for row in rows} >= {"preferences", "preferences, level 1"}
    last = [row for row in rows if row["split"] == "preferences"][-1]
    assert {"pair_accuracy", "calibration_error", "score_target"} <= last["figures"].keys()
    model, load_report = AutoModelForSequenceClassification.from_pretrained(
        folder / "final", output_loading_info=True
    )
    assert not load_report["missing_keys"] and model.config.num_labels == 1
    turns = [*ROWS[0]["prompt"], *ROWS[0]["completions"][0]]
    asked = Prompt(id="p", messages=tuple(ROWS[0]["prompt"]), answer=None)
    (score,) = reward_scores(asked, [turns[-1]["content"]], model=str(folder / "final"))
    assert isinstance(score, float)
    policy = load_policy("bundled")
    ids = torch.tensor([policy.tokenizer.apply_chat_template(turns, return_dict=False)])
    assert score != 0 and model(ids).logits.item() == pytest.approx(score, abs=1e-5)
    assert "text-classification" in (folder / "final" / "README.md").read_text()


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole")
    run(tmp_path, "cut", "steps=2")
    cut = run(tmp_path, "cut", resume=True)
    first, second = (load_file(f / "final" / "model.safetensors") for f in (whole, cut))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_noise_turns_the_stated_share_of_rankings_round() -> None:
    items = made(list(ranking_rows(200)), {"name": "bradley_terry"}).items
    assert len(flips(items, 0.25, seed=0)) == pytest.approx(50, abs=18)
    assert not flips(items, 0.0, seed=0)


def test_figures_are_those_worked_by_hand() -> None:
    task = made(ROWS[:2], {"name": "bradley_terry"})
    first, second = task.items
    scores = [[0.0] * len(first.answers), [0.0] * len(second.answers)]
    scores[0][0], scores[1][0] = 2.0, -2.0
    found = ranking_figures(task.items, scores)
    # The first prompt has all pairs right and the second none: half, with σ(2) = .880797 each time,
    # so that the calibration error over n + m pairs is |n/(n + m) − .880797|.
    n, m = len(first.answers) - 1, len(second.answers) - 1
    assert found["pair_accuracy"].value == 0.5
    assert found["calibration_error"].value == pytest.approx(abs(n / (n + m) - 0.880797), abs=1e-6)
    assert math.isfinite(found["squared_error"].value)
    tied = ranking_figures(task.items, [[0.0] * len(item.answers) for item in task.items])
    assert tied["pair_accuracy"].value == 0.5 and "score_target" not in tied


def test_wrong_answers_are_hard_and_only_one_is_right() -> None:
    rows = list(ranking_rows(300))
    rows += ranking_rows(300, name="word_problem_slips")
    assert all(row["scores"].count(1.0) == 1 and len(row["scores"]) >= 3 for row in rows)
    texts = [[turns[0]["content"] for turns in row["completions"]] for row in rows]
    assert all(len(set(answers)) == len(answers) for answers in texts)
    lengths = np.array(
        [[len(answers[0]), np.mean(list(map(len, answers[1:])))] for answers in texts]
    )
    assert abs(lengths[:, 0].mean() - lengths[:, 1].mean()) < 0.5, "length gives nothing away"


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"prompt": "p", "completion": "a", "label": True}], "", "Use 'regression'"),
        (PAIRS, "reward_model.loss={name='regression'}", "needs a score for every answer"),
        (PAIRS, "reward_model.loss={name='bradly_terry'}", "did you mean bradley_terry"),
        (PAIRS, "reward_model=null", "add a section"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], more: str, message: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=message):
        run(tmp_path, "out", f"reward_model.data={data}", *([more] if more else []))


def test_rankings_of_real_samples_are_read_and_a_length_heuristic_is_measured() -> None:
    lines = data_file("sampled_maths/math_cot_100.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    rows = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completions": [[{"role": "assistant", "content": text}] for text in row["code"]],
            "scores": [float(right) for right in row["score"]],
            "source": row["level"],
        }
        for row in found
    ]
    read = read_comparisons(rows, bad_rows="drop")
    mixed = [row for row in found if 0 < sum(row["score"]) < 8]
    assert 0 < len(read.items) <= len(mixed)
    settings = RewardModelSettings(data="here", too_long="cut")
    items = encode(read.items, tiny(), settings, where="reward_model").items
    figures = ranking_figures(items, [[-float(len(a)) for a in item.answers] for item in items])
    assert figures["score_length"].value == pytest.approx(-1)
    assert figures["pair_accuracy"].low < figures["pair_accuracy"].value
    assert {item.comparison.source for item in items} <= {f"Level {n}" for n in range(1, 6)}
