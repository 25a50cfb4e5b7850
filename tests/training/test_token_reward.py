"""Runs with a token reward model: what it learns, what the policy gets of it, and both learners in
checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from groupwise.config import load
from groupwise.config.memory import memory_plan
from groupwise.errors import UsageError
from groupwise.models import load_scorer, save_policy
from groupwise.training.prepare import Prepared
from groupwise.training.token_reward import TokenRewardTrainer, with_outcomes
from groupwise.updates import sequences
from made_up import one_group
from small_runs import assert_resumes_to_the_bit, config, prepared, settings, timeless, tiny

TOKEN = (
    "algorithm.name=oreal_token",
    "token_reward.optimizer.learning_rate=1e-2",
    "token_reward.freeze_policy_steps=1",
    "checkpoint.every_steps=2",
    "steps=5",
)


def early(text: str) -> float:
    """An outcome that the first token decides."""
    return float(text[:1] < "m")


def ready(folder: Path, *more: str, resume: bool = False) -> Prepared:
    return prepared(folder, *TOKEN, *more, functions=(early,), resume=resume)


@pytest.mark.parametrize(
    "more",
    [
        ("update.share_equal_rows=true", "update.minibatches=3"),
        ("token_reward.adapter.rank=2", "token_reward.freeze_policy_steps=3"),
    ],
)
def test_a_resumed_run_with_a_token_reward_model_equals_the_unbroken_one(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    save_policy(tiny(), tmp_path / "model")
    more = (f"model.path={tmp_path / 'model'}", *more)
    again = assert_resumes_to_the_bit(ready, tmp_path, *more, steps=5)
    assert set(again.trainer.learners) == {"policy", "token_reward"}
    assert min(learner.version for learner in again.trainer.learners.values()) >= 2


def test_it_learns_which_answers_are_right_and_says_what_it_thought_before(tmp_path: Path) -> None:
    run = ready(tmp_path)
    trainer, model = run.trainer, run.trainer.learners["token_reward"]
    assert isinstance(trainer, TokenRewardTrainer)
    scored = trainer.source.take(3, step=0)
    batch = trainer.evaluated(scored)
    right = scored.scores.total.flatten() > 0.5
    lengths = batch.mask.sum(1)
    for number in range(60):
        scores = model.evaluate(batch, {"values"})["values"]
        learned, (update,), metrics = trainer.learn(batch, scored)
        torch.testing.assert_close(learned.columns["token_scores"], scores, rtol=0, atol=1e-5)
        means = scores.sum(1) / lengths
        wanted = -torch.where(right, logsigmoid(means), logsigmoid(-means)).mean()
        assert update.loss == pytest.approx(float(wanted), abs=1e-5)
        chances = means.sigmoid()
        for name, rows in (("right", right), ("wrong", ~right)):
            chance = pytest.approx(float(chances[rows].mean()), abs=1e-5)
            assert metrics[f"token_reward_{name}"] == chance
        if number == 0:
            assert (scores == 0).all() and metrics["token_weight"] == 0
    assert metrics["token_reward_right"] > 0.8 > 0.2 > metrics["token_reward_wrong"]
    assert 0.3 < metrics["token_weight"] < 1
    run.close()


def test_the_policy_waits_and_then_moves_by_the_weights_of_the_tokens(tmp_path: Path) -> None:
    run = ready(tmp_path, "token_reward.freeze_policy_steps=2")
    start = {name: weight.clone() for name, weight in run.trainer.policy.trained().items()}
    for step in range(3):
        result = run.trainer.advance()
        moved = any(not torch.equal(w, start[n]) for n, w in run.trainer.policy.trained().items())
        assert moved == (step == 2)
        assert run.trainer.policy.version == max(0, step - 1)
        assert run.trainer.learners["token_reward"].version == step + 1
        assert result.advantages.ndim == 3 and (step == 0) == bool((result.advantages == 0).all())
    rows = timeless(tmp_path)
    assert ["grad_norm" in row for row in rows] == [False, False, True]
    assert all(row["token_reward.grad_norm"] > 0 for row in rows)
    run.close()


def test_only_completions_that_the_filter_keeps_have_an_outcome_to_learn() -> None:
    scored = one_group({"a": [1.0, 0.0, 0.0]}, [[1, 2, 3, 4]] * 3)
    scored = replace(scored, keep=torch.tensor([[True, True, False]]))
    judged = with_outcomes(sequences(scored), scored)
    assert judged.columns["outcome"].tolist() == [1.0, 0.0, 0.0]
    assert judged.row_weight is not None and judged.row_weight.tolist() == [0.5, 0.5, 0.0]


def test_it_is_saved_as_a_token_classifier_and_can_start_another_run(tmp_path: Path) -> None:
    run = ready(tmp_path / "first")
    run.trainer.run()
    run.trainer.finish()
    run.close()
    saved = load_scorer(tmp_path / "first" / "token_reward").model.state_dict()
    trained = run.trainer.learners["token_reward"].trained()
    assert all(torch.equal(saved[name], weight) for name, weight in trained.items())
    again = ready(tmp_path / "second", f"token_reward.model={tmp_path / 'first' / 'token_reward'}")
    own = again.trainer.learners["token_reward"].trained()
    assert all(torch.equal(own[name], weight) for name, weight in trained.items())
    again.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("steps=10",), "token_reward.freeze_policy_steps = 10: must be less than steps = 10"),
        (
            ("steps=20", "partial_rollouts={tokens_per_step=4, old_tokens='mask'}"),
            "'oreal_token' needs every token of a completion",
        ),
        (("steps=20", "preference.online=true"), "trains the second learner 'token_reward'"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        config(tmp_path, "algorithm.name=oreal_token", *more)


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tiny()
    other.tokenizer.add_tokens(["<more>"])
    other.model.resize_token_embeddings(len(other.tokenizer))
    save_policy(other, tmp_path / "other")
    where = f"token_reward.model={tmp_path / 'other'}"
    with pytest.raises(UsageError, match="token_reward.model = .*: its tokenizer has .* tokens"):
        ready(tmp_path / "run", where)


def test_the_plan_of_a_run_counts_it(tmp_path: Path) -> None:
    given = settings(tmp_path, "algorithm.name=oreal_token", "steps=20")
    plan = memory_plan(load("word-problems", given))
    own = plan.held["weights"] + plan.held["moments"]
    assert plan.held["token_reward"] == pytest.approx(own, rel=0.001)
    assert "critic" not in plan.held
    small = memory_plan(load("word-problems", [*given, "token_reward.adapter.rank=2"]))
    assert small.held["token_reward"] < 0.5 * plan.held["token_reward"]
