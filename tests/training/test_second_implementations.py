"""The loop needs no more of an engine, a learner and a source than their protocols say: it trains
a two-armed bandit with one of each that shares no code with the package's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bandits import Bandit, Pulls, Table, bandit
from groupwise.errors import RunError
from groupwise.models import Policy
from groupwise.rollouts.engines.registry import ENGINES
from groupwise.rollouts.engines.scripted import ScriptedEngine
from groupwise.rundir.files import read_lines
from groupwise.settings import EngineSettings
from groupwise.training.callbacks import Callback
from groupwise.training.checkpoint import files as checkpoint
from groupwise.training.evaluation import Evaluation
from groupwise.training.trainer import Trainer
from groupwise.types import Engine, Learner, Metrics, Source
from small_runs import prepared


def test_the_second_implementations_satisfy_the_protocols() -> None:
    engine = Table()
    assert isinstance(engine, Engine)
    assert isinstance(Bandit(), Learner)
    assert isinstance(Pulls(engine), Source)


def test_a_recipe_finds_a_new_engine_by_its_line_in_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripted(policy: Policy, settings: EngineSettings, length: int | None) -> Engine:
        return ScriptedEngine(lambda _, sample: "a" * sample, encode=policy.tokenizer.encode)

    monkeypatch.setitem(ENGINES, "scripted", scripted)
    run = prepared(tmp_path / "run", "engine.name=scripted", "steps=2")
    run.trainer.run()
    run.close()
    assert isinstance(run.engine, ScriptedEngine) and run.engine.version == 2


@pytest.mark.parametrize("algorithm", ["softrank", "grpo", "dapo"])
def test_the_trainer_learns_with_second_implementations(algorithm: str, tmp_path: Path) -> None:
    trainer = bandit(tmp_path, steps=12, algorithm=algorithm)
    trainer.run()
    rows = list(read_lines(tmp_path / "metrics.jsonl"))
    assert len(rows) == 12 and rows[-1]["reward"] > rows[0]["reward"] + 0.1
    assert all(row["published"] == 1.0 for row in rows)
    assert trainer.engine.version == trainer.policy.version == 12  # type: ignore[attr-defined]


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    whole = bandit(tmp_path / "whole", steps=6)
    whole.run()
    first = bandit(tmp_path / "first", steps=4)
    first.run()
    saved, _ = checkpoint.newest(tmp_path / "first" / "checkpoints")
    assert saved is not None and set(saved.weights) == {"policy"}
    second = bandit(tmp_path / "second", steps=6)
    second.restore(saved)
    assert second.done == 4
    second.run()
    weights = [run.policy.trained()["logits"] for run in (whole, second)]
    assert torch.equal(*weights)


class Critics(Trainer):
    """Trains a second learner in every step, and the policy from the third step on."""

    def update(self, batches: Any) -> Any:
        objective = self.algorithm.objective
        updates = {"critic": tuple(self.learners["critic"].update(b, objective) for b in batches)}
        return updates if self.done < 2 else super().update(batches) | updates


def test_a_step_may_leave_the_policy_unchanged(tmp_path: Path) -> None:
    trainer = bandit(tmp_path, steps=4, kind=Critics, others={"critic": Bandit(rate=0.1)})
    trainer.run()
    rows = list(read_lines(tmp_path / "metrics.jsonl"))
    assert ["grad_norm" in row for row in rows] == [False, False, True, True]
    assert all(row["critic.learning_rate"] == 0.1 for row in rows)
    versions = {name: learner.version for name, learner in trainer.learners.items()}
    assert versions == {"policy": 2, "critic": 4}
    assert trainer.engine.version == 2  # type: ignore[attr-defined]


def test_checkpoints_hold_every_learner_by_name(tmp_path: Path) -> None:
    trainer = bandit(tmp_path, steps=3, kind=Critics, others={"critic": Bandit(rate=0.1)})
    trainer.run()
    saved, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert saved is not None
    for name, learner in trainer.learners.items():
        assert torch.equal(saved.weights[name]["logits"], learner.trained()["logits"])
        assert saved.state["learners"][name] == {"steps": learner.version}
    with pytest.raises(
        RunError, match="contains the learners critic, policy, but this run has policy"
    ):
        bandit(tmp_path / "other", steps=3).restore(saved)


class Half(Critics):
    """Fails between the updates of its two learners."""

    def update(self, batches: Any) -> Any:
        updates = super().update(batches)
        if self.done == 3:
            raise RunError("between two learners")
        return updates


def test_a_step_that_updated_one_of_two_learners_is_not_saved(tmp_path: Path) -> None:
    trainer = bandit(tmp_path, steps=9, kind=Half, others={"critic": Bandit(rate=0.1)})
    with pytest.raises(RunError, match="between two learners"):
        trainer.run()
    assert checkpoint.steps(tmp_path / "checkpoints") == [2]


class Idle(Trainer):
    """Updates nothing in its third step."""

    def update(self, batches: Any) -> Any:
        return {} if self.done == 2 else super().update(batches)


class Fails(Callback):
    """Fails once a step is done."""

    def __init__(self, *, at: int) -> None:
        self.at = at

    def on_step(self, step: int, result: Any) -> None:
        if step == self.at:
            raise RunError("after the step")


def test_a_finished_step_that_updated_nothing_does_not_draw_its_prompts_again(
    tmp_path: Path,
) -> None:
    whole = bandit(tmp_path / "whole", steps=5, kind=Idle)
    whole.run()
    first = bandit(tmp_path / "first", steps=5, kind=Idle, callbacks=[Fails(at=3)])
    with pytest.raises(RunError, match="after the step"):
        first.run()
    saved, _ = checkpoint.newest(tmp_path / "first" / "checkpoints")
    assert saved is not None and saved.step == 3
    second = bandit(tmp_path / "second", steps=5, kind=Idle)
    second.restore(saved)
    second.run()
    weights = [run.policy.trained()["logits"] for run in (whole, second)]
    assert torch.equal(*weights)


class Notes(Callback):
    """Notes what it is called with, and stops the run at a step."""

    def __init__(self, *, last: int) -> None:
        self.last, self.calls = last, []

    def on_step_begin(self, step: int) -> None:
        self.calls.append(("begin", step))

    def on_step(self, step: int, result: Any) -> None:
        self.calls.append(("end", step))
        assert result.scored.scores.total.shape == (4, 8)

    def should_stop(self, metrics: Metrics) -> bool:
        return len(self.calls) == 2 * self.last


def test_callbacks_are_called_with_every_step_and_may_end_the_run(tmp_path: Path) -> None:
    notes, evaluated = Notes(last=3), []

    def evaluate(step: int) -> Mapping[str, Any]:
        evaluated.append(step)
        return {"split": "held_out", "score": 0.5}

    trainer = bandit(tmp_path, steps=9, callbacks=[notes], evaluation=Evaluation(evaluate=evaluate))
    trainer.run()
    assert notes.calls == [(at, step) for step in (1, 2, 3) for at in ("begin", "end")]
    assert evaluated == [3], "the last step is evaluated"
    assert checkpoint.steps(tmp_path / "checkpoints")[-1] == 3
    assert (tmp_path / "best" / "bandit.pt").exists()
