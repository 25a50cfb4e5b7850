"""Runs with a critic: values and returns, both learners in checkpoints, and that both learn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from bandits import bandit
from groupwise.algorithms.losses import VALUE_LOSSES, ValueObjective
from groupwise.cli import main
from groupwise.config import load
from groupwise.config.checks import value_loss
from groupwise.config.memory import memory_plan
from groupwise.errors import UsageError
from groupwise.models import load_scorer, save_policy, scorer_of
from groupwise.registry import spec
from groupwise.rundir.files import read_lines
from groupwise.settings import OptimizerSettings
from groupwise.training.critic import (
    POOLED_STEPS,
    CriticTrainer,
    PooledErrors,
    critic_metrics,
)
from groupwise.training.second_learner import with_column
from groupwise.types import Batch, Objective, Outputs, Update
from groupwise.updates import Score, TorchLearner, sequences
from small_runs import Quiet, assert_resumes_to_the_bit, prepared, settings, timeless, tiny

GAE = 'algorithm.advantage={name="gae"}'
STILL = "critic.optimizer.learning_rate=0.0"


class OneValue:
    """A critic that predicts one number, and counts what it is asked for."""

    def __init__(self, rate: float = 0.5) -> None:
        self.value = torch.zeros(1, requires_grad=True)
        self.rate, self.version, self.evaluations = rate, 0, 0

    def evaluate(self, batch: Batch, names: Collection[str]) -> Mapping[str, Tensor]:
        self.evaluations += 1
        return {"values": torch.where(batch.mask, self.value.detach(), 0)}

    def update(self, batch: Batch, objective: Objective) -> Update:
        values = self.value.expand(batch.mask.shape)
        loss = (objective(Outputs(values=values), batch) * batch.weight)[batch.mask].sum()
        (gradient,) = torch.autograd.grad(loss, self.value)
        before = values.detach().clone()
        with torch.no_grad():
            self.value -= self.rate * gradient
        self.version += 1
        nan = torch.full(batch.mask.shape, float("nan"))
        return Update(
            version=self.version,
            logp=nan,
            entropy=nan,
            computed=torch.ones(len(batch.mask), dtype=torch.bool),
            loss=float(loss.detach()),
            grad_norm=float(gradient.norm()),
            learning_rate=self.rate,
            values=before,
        )

    def trained(self) -> Mapping[str, Tensor]:
        return {"value": self.value.detach()}

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.value.copy_(weights["value"])

    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]

    def save(self, path: str) -> None:
        torch.save(self.value, Path(path) / "value.pt")


def bandit_with_critic(folder: Path, critic: OneValue, *more: str, **given: Any) -> CriticTrainer:
    config = load("word-problems", settings(folder, "algorithm.name=orz", *more))
    run = bandit(
        folder,
        kind=CriticTrainer,
        others={"critic": critic},
        algorithm="orz",
        critic=config.critic,
        freeze_policy_steps=config.critic.freeze_policy_steps,
        value_loss=value_loss(config),
        **given,
    )
    assert isinstance(run, CriticTrainer)
    return run


def test_ppo_learns_the_bandit_and_its_critic_the_mean_reward(tmp_path: Path) -> None:
    critic = OneValue()
    run = bandit_with_critic(tmp_path, critic, "critic.minibatches=4", steps=12)
    run.run()
    rows = list(read_lines(tmp_path / "metrics.jsonl"))
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    assert abs(float(critic.value) - rows[-1]["reward"]) < 0.15
    assert critic.version == 48 and run.policy.version == 12
    assert {"explained_variance", "value_loss", "returns", "critic.loss"} <= rows[0].keys()
    assert rows[0]["returns"] == pytest.approx(rows[0]["reward"])
    assert rows[0]["explained_variance"] == 0.0


def test_the_policy_waits_for_its_critic(tmp_path: Path) -> None:
    critic = OneValue()
    run = bandit_with_critic(tmp_path, critic, "critic.freeze_policy_steps=2", steps=4)
    run.run()
    rows = list(read_lines(tmp_path / "metrics.jsonl"))
    assert ["grad_norm" in row for row in rows] == [False, False, True, True]
    assert critic.version == 4 and run.policy.version == 2


def test_the_first_update_gives_the_values_of_its_rows(tmp_path: Path) -> None:
    """Only where the returns do not depend on them."""
    asked = {}
    for name, more in {
        "whole": (),
        "parts": ("critic.minibatches=4",),
        "lambda": ("critic.lam=0.9",),
    }.items():
        critic = OneValue()
        bandit_with_critic(tmp_path / name, critic, *more, steps=2).run()
        asked[name] = critic.evaluations
    assert asked == {"whole": 0, "parts": 2, "lambda": 2}


def test_a_critic_of_zeros_changes_nothing(tmp_path: Path) -> None:
    """With V ≡ 0 and γ = λ = 1, PPO is REINFORCE, bit for bit, through the whole loop."""
    weights = []
    for name, more in (("plain", ()), ("zeros", (GAE, STILL))):
        run = prepared(tmp_path / name, "algorithm.name=reinforce", "steps=3", *more)
        run.trainer.run()
        run.close()
        weights.append(run.trainer.policy.trained())
    rows = [timeless(tmp_path / name) for name in ("plain", "zeros")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


LEARNS = (
    "algorithm.name=orz",
    "critic.optimizer.learning_rate=1e-2",
    "critic.minibatches=2",
    "checkpoint.every_steps=2",
    "steps=5",
)


@pytest.mark.parametrize(
    "more",
    [
        ('critic.loss={name="clipped", clip=0.01}', "update.share_equal_rows=true"),
        (
            "algorithm.name=ppo",
            "critic.lam=0.95",
            "critic.bootstrap=true",
            "critic.adapter.rank=2",
            "critic.freeze_policy_steps=1",
        ),
    ],
)
def test_a_resumed_run_with_a_critic_equals_the_unbroken_one(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    save_policy(tiny(), tmp_path / "model")
    more = (*LEARNS, f"model.path={tmp_path / 'model'}", *more)
    again = assert_resumes_to_the_bit(prepared, tmp_path, *more, steps=5)
    assert min(learner.version for learner in again.trainer.learners.values()) > 3
    row = timeless(tmp_path / "whole")[-1]
    assert ("value_clip_share" in row) == any("clipped" in setting for setting in more)


@pytest.mark.parametrize("threshold", ["", ", explained_variance=0.0"])
def test_the_critic_is_pretrained_on_the_policy_as_it_starts_and_once(
    threshold: str, tmp_path: Path
) -> None:
    """At a threshold it stops early; a resumed run takes it from the checkpoint."""
    most = 80 if threshold else 20
    pretraining = f"critic.pretraining={{batches={most}, learning_rate=3e-3{threshold}}}"
    progress = Quiet()
    run = prepared(tmp_path, *LEARNS, STILL, pretraining, progress=progress)
    said = [line for line in progress.said if "critic, batch" in line]
    assert said[-1].endswith("over the last 5 batches, 0 s left")
    assert (f"batch {most}/{most}" in said[-1]) == (not threshold)
    assert run.trainer.policy.version == run.trainer.learners["critic"].version == 0
    start = tiny().model.state_dict()
    assert all(torch.equal(w, start[n]) for n, w in run.trainer.policy.trained().items())
    run.trainer.advance()
    row = timeless(tmp_path)[0]
    run.close()
    progress = Quiet()
    again = prepared(tmp_path, *LEARNS, STILL, pretraining, resume=True, progress=progress)
    assert not [line for line in progress.said if "critic, batch" in line]
    again.trainer.advance()
    assert timeless(tmp_path)[0] == row
    batch = sequences(again.trainer.source.take(3, step=9))
    values = again.trainer.learners["critic"].evaluate(batch, {"values"})["values"][batch.mask]
    assert 0.5 * row["returns"] < float(values.mean()) < 2 * row["returns"], "it began at 0"
    again.close()


def test_pretraining_begins_at_the_mean_return_and_keeps_a_trained_head(tmp_path: Path) -> None:
    """With a rate of next to nothing, what pretraining leaves is where it began."""
    still = "critic.pretraining={batches=1, learning_rate=1e-12}"
    run = prepared(tmp_path / "new", *LEARNS, STILL, still)
    run.trainer.advance()
    row = timeless(tmp_path / "new")[0]
    head = {n: w for n, w in run.trainer.learners["critic"].trained().items() if "score" in n}
    assert float(head["score.weight"].abs().max()) < 1e-6
    assert 0.5 * row["returns"] < float(head["score.bias"]) < 2 * row["returns"]
    run.trainer.finish()
    run.close()
    with torch.no_grad():
        saved = load_scorer(tmp_path / "new" / "critic")
        saved.model.score.weight += 1.0
        saved.model.score.bias -= 5.0
    save_policy(saved, tmp_path / "trained")
    model = f"critic.model={tmp_path / 'trained'}"
    again = prepared(tmp_path / "second", *LEARNS, STILL, still, model)
    kept = again.trainer.learners["critic"].trained()["score.bias"]
    assert torch.allclose(kept, saved.model.score.bias)
    again.close()


def test_the_critic_is_saved_as_a_token_classifier_and_can_start_another_run(
    tmp_path: Path,
) -> None:
    run = prepared(tmp_path / "first", *LEARNS)
    run.trainer.run()
    run.trainer.finish()
    run.close()
    saved = load_scorer(tmp_path / "first" / "critic").model.state_dict()
    trained = run.trainer.learners["critic"].trained()
    assert all(torch.equal(saved[name], weight) for name, weight in trained.items())
    more = (f"critic.model={tmp_path / 'first' / 'critic'}", STILL)
    second = prepared(tmp_path / "second", *LEARNS, *more)
    own = second.trainer.learners["critic"].trained()
    assert all(torch.equal(own[name], weight) for name, weight in trained.items())
    second.close()


def test_last_tokens_have_an_explained_variance_of_their_own() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    returns = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    values = torch.tensor([[0.0, 0.0, 9.0, 1.0], [0.0, 9.0, 9.0, 9.0]])
    batch = Batch(
        prompts=(torch.zeros(1, dtype=torch.long),),
        group=torch.zeros(2, dtype=torch.long),
        tokens=torch.zeros(2, 4, dtype=torch.long),
        length=torch.tensor([4, 1]),
        mask=mask,
        advantage=torch.zeros(2, 4),
        weight=torch.zeros(2, 4),
        columns={"values": values, "returns": returns},
    )
    found = critic_metrics(batch)
    assert found["explained_variance_last"] == 1.0
    assert found["explained_variance"] == pytest.approx(-1 / 3)
    assert found["returns"] == 0.75


def test_errors_of_several_steps_are_pooled_over_the_last_ones() -> None:
    """Steps whose own returns are all equal count as well, and so does an offset."""
    mask = torch.tensor([[True, True, False], [True, False, True]])
    pooled = PooledErrors()
    for step in range(POOLED_STEPS + 1):
        returns = torch.full((2, 3), float(step % 2))
        values = torch.full((2, 3), 0.5) if step else torch.full((2, 3), 99.0)
        values[0, 1] = values[1, 2] = 0.25 + returns[0, 0] / 2
        pooled.add(values, returns, mask)
    assert pooled.metrics() == {"pooled_r2": 0.375, "pooled_r2_last": 0.75}
    equal = PooledErrors()
    equal.add(torch.zeros(2, 3), torch.ones(2, 3) + torch.tensor([0, 2**-23, 0]), mask)
    assert all(value != value for value in equal.metrics().values())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('critic.loss={name="huber"}', "critic.loss.name = 'huber': not registered"),
        ('critic.loss={name="clipped", clip=0.0}', "critic.loss.clip = 0"),
        ('critic.loss={name="squared", clip=1.0}', "critic.loss.clip = 1.0: squared has no"),
        ("critic.lam=1.5", "critic.lam = 1.5"),
        ("algorithm.advantage.gamma=1.5", "algorithm.advantage.gamma = 1.5"),
        ("algorithm.advantage.lam=-0.1", "algorithm.advantage.lam = -0.1"),
        ("critic.minibatches=13", "critic.minibatches = 13: must be at most"),
        ("critic.pretraining.minibatches=13", "critic.pretraining.minibatches = 13: must be at"),
        ("critic.freeze_policy_steps=4", "critic.freeze_policy_steps = 4: must be less than steps"),
    ],
)
def test_settings_of_the_critic_that_cannot_work_are_refused(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(tmp_path / "run", "algorithm.name=ppo", setting)
    words = [word for one in given for word in ("--set", one)]
    assert main(["train", "word-problems", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and not (tmp_path / "run").exists()


def test_a_critic_tells_answers_of_one_batch_apart_at_their_last_token() -> None:
    """Where the prefix says all, the targets stand at the states that are read."""
    policy = tiny()
    groups, size = 4, 4
    rows = torch.randint(20, 40, (groups * size, 6), generator=torch.Generator().manual_seed(1))
    batch = Batch(
        prompts=tuple(torch.tensor([5, 6, 7 + i]) for i in range(groups)),
        group=torch.arange(groups).repeat_interleave(size),
        tokens=rows,
        length=torch.full((groups * size,), 6),
        mask=torch.ones_like(rows, dtype=torch.bool),
        advantage=torch.zeros(rows.shape),
        weight=torch.full(rows.shape, 1 / rows.numel()),
    )
    # The return is decided by the token before the last: the last state that is read has seen it.
    returns = (rows[:, 4:5] % 2).float().expand(rows.shape)
    batch = with_column(batch, "returns", returns)
    critic = scorer_of(policy, kind="token")
    learner = TorchLearner(
        critic,
        optimizer=OptimizerSettings(learning_rate=1e-2),
        head=Score(critic.model, reads=("before",)),
        share_equal_rows=True,
    )
    objective = ValueObjective(loss=VALUE_LOSSES.bind(spec("squared")))
    for _ in range(60):
        learner.update(batch, objective)
    values = learner.evaluate(batch, {"values"})["values"]
    found = critic_metrics(with_column(batch, "values", values))
    assert found["explained_variance_last"] > 0.9
    first = values[:, 0].reshape(groups, size)
    assert torch.allclose(first, first[:, :1].expand_as(first), atol=1e-5), "sees no answer yet"


def test_the_plan_of_a_run_counts_its_critic(tmp_path: Path) -> None:
    """As many weights and moments as the policy, but for the head; an adapter has few moments."""
    given = settings(tmp_path, "algorithm.name=orz")
    plan = memory_plan(load("word-problems", given))
    own = plan.held["weights"] + plan.held["moments"]
    assert plan.held["critic"] == pytest.approx(own, rel=0.001)
    small = memory_plan(load("word-problems", [*given, "critic.adapter.rank=2"]))
    assert small.held["critic"] < 0.5 * plan.held["critic"]
    without = memory_plan(load("word-problems", settings(tmp_path)))
    assert "critic" not in without.held


def test_critics_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    tokenizer = tiny()
    tokenizer.tokenizer.add_tokens(["<more>"])
    tokenizer.model.resize_token_embeddings(len(tokenizer.tokenizer))
    save_policy(tokenizer, tmp_path / "other")
    where = f"critic.model={tmp_path / 'other'}"
    with pytest.raises(UsageError, match="critic.model = .*: its tokenizer has .* tokens, the"):
        prepared(tmp_path / "run", "algorithm.name=ppo", where)
    policy = tiny()
    policy.model.config.num_labels = 3
    several = AutoModelForTokenClassification.from_config(policy.model.config)
    save_policy(replace(policy, model=several), tmp_path / "three")
    for name, said in (("three", "its head has 3 labels"), ("none", "is not a folder")):
        where = f"critic.model={tmp_path / name}"
        with pytest.raises(UsageError, match=f"^critic.model = .*{name}.*: {said}"):
            prepared(tmp_path / "run", "algorithm.name=ppo", where)
    assert not (tmp_path / "run" / "config.json").exists()
