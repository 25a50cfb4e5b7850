"""The loop of training on data, with a learner and a task that share no code with the package's."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.errors import RunError
from groupwise.prompts.order import PromptOrder
from groupwise.rundir.files import RunLog, read_lines
from groupwise.settings import CheckpointSettings
from groupwise.training.checkpoint import files as checkpoint
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.evaluation import Evaluation
from groupwise.training.monitor.progress import NoProgress
from groupwise.training.offline.trainer import OfflineSettings, OfflineTrainer
from groupwise.types import Batch, Metrics, Objective, Update
from small_runs import Quiet


class Sums:
    """A learner that adds up the items it is given, each weighted by the step."""

    def __init__(self) -> None:
        self.total, self.version = torch.zeros(1, dtype=torch.float64), 0

    def update(self, batch: Batch, objective: Objective) -> Update:
        self.version += 1
        self.total += self.version * float(batch.advantage.sum())
        nothing = torch.zeros_like(batch.advantage)
        return Update(
            version=self.version,
            logp=nothing,
            entropy=nothing,
            computed=torch.ones(len(nothing), dtype=torch.bool),
            loss=0.0,
            grad_norm=1.0,
            learning_rate=1.0,
        )

    def trained(self) -> Mapping[str, Tensor]:
        return {"total": self.total}

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        self.total.copy_(weights["total"])

    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]


class Items:
    """A task whose batches are the numbers of their items; fails once, at a batch."""

    def __init__(self, *, fails_at: int = 0) -> None:
        self.fails_at, self.made = fails_at, 0

    def batch(self, items: Sequence[int]) -> tuple[Batch, Objective]:
        self.made += 1
        if self.made == self.fails_at:
            raise RunError("no memory left")
        numbers, ones = torch.tensor(items)[:, None], torch.ones(len(items), 1)
        batch = Batch(
            prompts=(torch.zeros(1, dtype=torch.long),),
            group=torch.zeros(len(items), dtype=torch.long),
            tokens=numbers,
            length=torch.ones(len(items), dtype=torch.long),
            mask=ones.bool(),
            advantage=numbers.float(),
            weight=ones,
        )
        return batch, None  # type: ignore[return-value]

    def metrics(self, batch: Batch, objective: Objective, update: Update) -> Metrics:
        return {}

    def evaluate(self) -> Sequence[Mapping[str, Any]]:
        return []

    def save(self, folder: str) -> None: ...


def trainer(folder: Path, task: Items) -> OfflineTrainer:
    run_log = RunLog(folder, settings={})
    return OfflineTrainer(
        settings=OfflineSettings(steps=6, items=3),
        task=task,
        learner=Sums(),  # type: ignore[arg-type]
        order=PromptOrder(50, seed=0),
        data="",
        run_log=run_log,
        progress=NoProgress(),
        checkpoints=CheckpointManager(
            run_log, settings=CheckpointSettings(every_steps=2), about={"threads": 1}
        ),
        evaluation=Evaluation(),
    )


def test_a_batch_that_failed_is_drawn_again_by_a_resumed_run(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", Items())
    whole.run()
    first = trainer(tmp_path / "first", Items(fails_at=4))
    with pytest.raises(RunError, match="no memory left"):
        first.run()
    saved, _ = checkpoint.newest(tmp_path / "first" / "checkpoints")
    assert saved is not None and saved.step == 3
    second = trainer(tmp_path / "second", Items())
    second.restore(saved)
    second.run()
    assert torch.equal(second.learner.trained()["total"], whole.learner.trained()["total"])


def test_a_signal_that_comes_too_late_for_one_step_ends_the_next(tmp_path: Path) -> None:
    run = trainer(tmp_path, Items())

    def due(done: int, asked: Any) -> bool:
        if done == 1:
            signal.raise_signal(signal.SIGTERM)
        return False

    run.checkpoints.due = due  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.done == run.checkpoints.saved == 2


def test_what_ends_a_run_is_stored_and_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    broken = trainer(tmp_path / "broken", Items(fails_at=4))
    with pytest.raises(RunError, match="no memory left"):
        broken.run()
    [row] = read_lines(tmp_path / "broken" / "alarms.jsonl")
    assert (row["step"], row["alarm"], row["text"]) == (3, "ended", "no memory left")

    again = trainer(tmp_path / "again", Items())
    again.progress = quiet = Quiet()

    def interrupted(*_: Any) -> Any:
        again.learner.version += 1  # The update is half done.
        raise KeyboardInterrupt

    again.learner.update = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        again.run()
    assert (
        f"before the first checkpoint; start again with --resume {tmp_path / 'again'}"
        in quiet.said[-1]
    )
