"""A run whose weights change while completions are being written."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.errors import RunError, UsageError
from groupwise.report.metrics import metric
from groupwise.training.prepare import Prepared
from groupwise.types import Group, StepResult
from small_runs import config, letters, prepared, timeless
from spans import largest_gap

STREAMING = ("streaming.max_staleness=2", "algorithm.correction={name='tis'}")
SLOW = (
    "sampling.max_tokens=24",
    "sampling.stop=['1', '3']",
    "engine.max_rows=24",
    "steps=6",
    "optimizer.learning_rate=1e-2",
)
"""Completions of many lengths, of which a later batch's are written beside the present one's."""


def started(folder: Path, *more: str, **given: Any) -> Prepared:
    return prepared(folder, *STREAMING, *SLOW, *more, **given)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_log_probabilities_are_those_of_the_version_that_drew_each_token(
    tmp_path: Path, kernels: str
) -> None:
    run = started(tmp_path, f"model.kernels={kernels}")
    weights, worst, several = [copy.deepcopy(run.policy.model).eval()], 0.0, 0
    for step in range(6):
        result: StepResult = run.trainer.advance()
        for group in result.scored.groups:
            for one in group.completions:
                several += len(one.versions) > 1
                assert step - one.versions[0][1] <= 2
        worst = max(worst, largest_gap(weights, result.scored.groups))
        weights.append(copy.deepcopy(run.policy.model).eval())
    run.close()
    assert several > 10 and worst <= 1e-4
    assert max(row.get("token_age_max", 0.0) for row in timeless(tmp_path)) > 0


def test_a_run_in_one_process_can_be_repeated(tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        run = started(tmp_path / name)
        run.trainer.run()
        run.close()
        found.append((run.trainer.policy.trained(), timeless(tmp_path / name)))
    (a, rows), (b, again) = found
    assert rows == again and [name for name in a if not torch.equal(a[name], b[name])] == []
    ages = [row.get("token_age_max", 0.0) for row in rows]
    assert max(ages) <= 2 and max(row["unfinished"] for row in rows) > 0
    assert [name for row in rows for name in row if metric(name) is None and name != "step"] == []
    for row in rows:
        if row.get("old_share"):
            assert 0 < min(v for name, v in row.items() if name.startswith("ess_at_age.")) <= 1
            assert any(name.startswith("kl_at_age.") for name in row)


def test_a_killed_run_learns_again_from_the_same_batches(tmp_path: Path) -> None:
    """The steps since the checkpoint have the metrics of the first attempt, to the bit."""
    run = started(tmp_path)
    for _ in range(2):
        run.trainer.advance()
    run.trainer.save(wait=True)
    for _ in range(3):
        run.trainer.advance()
    first = timeless(tmp_path)
    run.close()  # Without a checkpoint.
    again = started(tmp_path, resume=True)
    assert again.trainer.done == 2
    again.trainer.run()
    again.trainer.finish()
    again.close()
    rows = timeless(tmp_path)
    assert len(rows) == 6 and rows[:5] == first
    assert max(row.get("token_age_max", 0.0) for row in rows) <= 2
    assert not (tmp_path / "journal").exists()


def test_a_run_that_begins_anew_reads_no_journal(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.trainer.advance()
    run.close()
    (journal,) = (tmp_path / "journal").iterdir()
    again = started(tmp_path, "seed=1", resume=True)
    assert again.trainer.done == 0
    again.trainer.advance()
    again.close()
    assert timeless(tmp_path)[0]["step"] == 1 and journal.exists()


def test_complete_groups_of_a_checkpoint_are_not_sampled_again(tmp_path: Path) -> None:
    run = started(tmp_path)
    known: dict[Any, Group] = {}
    while not known:
        run.trainer.advance()
        source: Any = run.trainer.source
        known = {each.request.stream: each.group for each in source._undecided if each.group}
    run.trainer.save(wait=True)
    run.close()
    again = started(tmp_path, resume=True)
    groups = {g.stream: g for _ in range(2) for g in again.trainer.advance().scored.groups}
    again.close()
    for stream, group in known.items():
        assert groups[stream].completions == group.completions


def test_a_judge_that_hangs_does_not_hold_up_the_checkpoint(tmp_path: Path) -> None:
    """Groups that wait for their verdicts are judged by the run that is resumed."""
    hangs: list[bool] = []

    def judge(text: str) -> float:
        if hangs:
            time.sleep(40)
        return letters(text)

    run = started(tmp_path, "watchdog.limit_minutes=0.05", functions=[judge])
    source: Any = run.trainer.source
    while not any(each.group for each in source._undecided):
        run.trainer.advance()
    done, start = run.trainer.done, time.monotonic()
    hangs.append(True)
    with pytest.raises(RunError, match="the batch of step"):
        run.trainer.run()
    assert time.monotonic() - start < 30
    run.close()
    hangs.clear()
    again = started(tmp_path, functions=[judge], resume=True)
    assert again.trainer.done == done
    again.trainer.run()
    again.close()


@pytest.mark.parametrize("minutes, files", [("null", 0), ("5", 2)])
def test_a_run_without_checkpoints_journals_no_batches(
    tmp_path: Path, minutes: str, files: int
) -> None:
    """Nothing would ever delete them."""
    run = started(tmp_path, f"checkpoint.every_minutes={minutes}")
    for _ in range(2):
        run.trainer.advance()
    run.close()
    assert len(list(tmp_path.glob("journal/*"))) == files


@pytest.mark.parametrize(
    "setting, said",
    [
        ("algorithm.correction={}", "streaming: tokens are up to 2 steps older"),
        ("ahead=1", "ahead = 1: assigns one version of the weights to a completion"),
        ("partial_rollouts.tokens_per_step=4", "partial_rollouts: assigns one version"),
        ("engine.name=vllm", "engine.name = 'vllm': loads new weights only between rollouts"),
        ("guards.spike=3.0", "guards.spike = 3: a rollback would continue"),
        ("environment.name=calculator", "environment: cannot be combined with streaming"),
        (
            "schedules=[{setting='sampling.max_tokens', points=[[1, 4], [4, 8]]}]",
            "schedules: sampling.max_tokens changes with the step, but with streaming",
        ),
    ],
)
def test_what_streaming_cannot_be_combined_with_is_said(
    tmp_path: Path, setting: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        config(tmp_path, *STREAMING, setting)
