"""Faults while a run goes on: each is counted, named, survived or the end, and never a silence."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import RunError
from groupwise.report import write_run_report
from groupwise.rundir.files import read_lines
from groupwise.training.prepare import Prepared
from groupwise.training.run import _memory_named, train_config
from small_runs import Quiet, config, letters, prepared, timeless, tiny


def weights(run: Prepared) -> dict[str, Tensor]:
    return {n: w.detach().clone() for n, w in run.trainer.policy.publish().named.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(w, second[n]) for n, w in first.items())


def poison(run: Prepared, monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Make the loss of some updates not a number."""
    update, objective = run.trainer.policy.update, run.trainer.algorithm.objective

    broken = FunctionObjective(
        loss=lambda outputs, batch: objective(outputs, batch) * math.nan, needs=objective.needs
    )

    monkeypatch.setattr(
        run.trainer.policy,
        "update",
        lambda batch, given: update(batch, broken if when(run.trainer.policy.version) else given),
    )


# -- numbers that are none -------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_is_left_out_and_its_completions_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path)
    poison(run, monkeypatch, lambda version: version == 1)
    run.trainer.advance()
    before = weights(run)
    run.trainer.advance()
    assert same(weights(run), before), "a gradient that is no number must move nothing"
    run.trainer.advance()
    assert not same(weights(run), before)
    assert [row["skipped_updates"] for row in timeless(tmp_path)] == [0, 1, 0]
    found = json.loads((tmp_path / "suspects" / "step-000002.json").read_text())
    assert found and {"prompt", "text", "not_finite"} == set(found[0])


def test_a_run_without_a_finite_gradient_stops_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path, "steps=20", "guards.max_bad_steps=4")
    poison(run, monkeypatch, lambda version: version >= 2)
    with pytest.raises(RunError, match=r"4 consecutive steps .* \(guards.max_bad_steps = 4\)"):
        run.trainer.run()
    assert len(timeless(tmp_path)) == 6
    assert (tmp_path / "checkpoints" / "step-000006").exists()
    run.close()
    again = prepared(tmp_path, "steps=20", "guards.max_bad_steps=5", resume=True)
    poison(again, monkeypatch, lambda version: True)
    with pytest.raises(RunError, match="5 consecutive steps"):
        again.trainer.run()
    assert len(timeless(tmp_path)) == 7, "the steps before the resume count"


def test_logits_that_are_no_numbers_are_noticed_where_they_are_sampled_from(
    tmp_path: Path,
) -> None:
    run = prepared(tmp_path, "steps=20")
    run.trainer.advance()
    with torch.no_grad():
        next(iter(run.trainer.policy.publish().named.values())).fill_(math.nan)
    with pytest.raises(RunError, match="are NaN or infinite, so the weights have diverged"):
        run.trainer.run()
    [row] = read_lines(tmp_path / "alarms.jsonl")
    assert (row["step"], row["alarm"]) == (1, "ended")
    assert "lower optimizer.learning_rate" in row["text"]
    run.close()
    report = write_run_report(tmp_path).read_text(encoding="utf-8")
    assert "so the weights have diverged" in report
    assert len(timeless(tmp_path)) == 1
    assert (tmp_path / "checkpoints" / "step-000001").exists()


@pytest.mark.parametrize("place", ["the first evaluation", "an update", "a checkpoint"])
def test_whatever_ends_a_run_is_in_its_report(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path, "steps=3", "evaluation.at_start=true", eval_prompts=None)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for 8 GiB") if place == "an update" else RunError("disk full")

    if place == "the first evaluation":
        run.trainer.evaluation.evaluate = fail
    elif place == "an update":
        monkeypatch.setattr(run.trainer.policy, "update", fail)
    else:
        monkeypatch.setattr(run.trainer.checkpoints, "write", fail)
    with pytest.raises((RunError, MemoryError)):
        run.trainer.run()
    run.close()
    [row] = [row for row in read_lines(tmp_path / "alarms.jsonl") if row["alarm"] == "ended"]
    said = "MemoryError: no room for 8 GiB" if place == "an update" else "disk full"
    assert row["text"] == said
    assert said in write_run_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_second_interrupt_says_how_to_go_on(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Quiet()
    run = prepared(tmp_path, "steps=3", progress=progress)
    for step in range(steps):
        run.trainer.advance()
        if step == 0:
            run.trainer.save(wait=True)

    def interrupted(*_: Any) -> Any:
        run.trainer.policy.version += 1  # A half update is not saved.
        raise KeyboardInterrupt

    monkeypatch.setattr(run.trainer.policy, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    run.close()
    how = ["before the first checkpoint; start again", "and saved; continue", "at step 1"][steps]
    assert how in progress.said[-1] and f"--resume {tmp_path}" in progress.said[-1]


def test_a_signal_that_comes_too_late_for_one_step_ends_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path, "steps=4", "checkpoint.every_steps=0")
    assert run.trainer.checkpoints is not None

    def due(done: int, asked: Any) -> bool:
        if done == 1:
            signal.raise_signal(signal.SIGTERM)
        return False

    monkeypatch.setattr(run.trainer.checkpoints, "due", due)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    assert run.trainer.done == run.trainer.checkpoints.saved == 2
    run.close()


@pytest.mark.parametrize("fault", ["raises", "nan", "inf", "none"])
def test_rewards_that_fail_at_random_cost_their_samples_only(fault: str, tmp_path: Path) -> None:
    chance, calls = random.Random(0), []

    def reward(text: str) -> float | None:
        lost = chance.random() < 0.3
        calls.append(lost)
        if lost and fault == "raises":
            raise RuntimeError("out of luck")
        return {"nan": math.nan, "inf": math.inf, "none": None}[fault] if lost else letters(text)

    run = prepared(tmp_path, "steps=5", "logging.rollouts_every=1", functions=[reward])
    run.trainer.run()
    judged = [row["valid_share"] for row in timeless(tmp_path)]
    expected = [1 - sum(calls[i : i + 12]) / 12 for i in range(0, 60, 12)]
    assert len(calls) == 60 and judged == pytest.approx(expected)
    for row in read_lines(tmp_path / "rollouts" / "step-000005.jsonl"):
        for completion in row["completions"]:
            assert (completion["reward"] is None) is (completion["status"] != "ok")
            if completion["status"] != "ok":
                assert completion["advantage"] == 0


def test_a_spike_goes_back_to_the_last_checkpoint_and_leaves_its_batches_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Quiet()
    run = prepared(
        tmp_path,
        "steps=16",
        "guards.spike=3.0",
        "optimizer.learning_rate=0.0",
        "checkpoint.every_steps=6",
        progress=progress,
    )
    objective, update = run.trainer.algorithm.objective, run.trainer.policy.update

    loud = FunctionObjective(
        loss=lambda outputs, batch: objective(outputs, batch) * 1000, needs=objective.needs
    )

    steps: list[int] = []

    def spiked(batch: Any, given: Any) -> Any:
        steps.append(run.trainer.done)
        return update(batch, loud if run.trainer.done == 13 else given)

    monkeypatch.setattr(run.trainer.policy, "update", spiked)
    run.trainer.run()
    assert (
        "softrank, step 14: gradient spike; rolled back to the weights of step 12" in progress.said
    )
    assert steps == list(range(16)), "no batch comes twice"
    # 16 updates, of which those after the checkpoint at 12 (steps 13 and 14) no longer count.
    assert run.trainer.policy.version == 14


# -- verdicts that depend on the clock -------------------------------------------------------------


def test_verdicts_of_the_first_time_are_used_again(tmp_path: Path) -> None:
    """A judge that says something else every time: the resumed run repeats what it said."""
    calls: list[str] = []

    def judge(text: str) -> float | None:
        calls.append(text)
        # Now and then no verdict, and never on a whole group, which would be drawn again.
        return None if len(calls) % 5 == 0 else int.from_bytes(os.urandom(2)) / 65536

    more = ("steps=8", "checkpoint.every_steps=3", "logging.rollouts_every=1")
    first = prepared(tmp_path, *more, functions=[judge])
    for _ in range(5):
        first.trainer.advance()
        if first.trainer.done == 3:
            first.trainer.save(wait=True)
    first.close()
    before, asked = timeless(tmp_path), len(calls)
    second = prepared(tmp_path, *more, functions=[judge], resume=True)
    second.trainer.run()
    second.close()
    after = timeless(tmp_path)
    assert after[:5] == before and len(after) == 8
    assert len(calls) - asked == 3 * 12, "steps 4 and 5 need not be judged again"
    assert not list((tmp_path / "journal").glob("step-00000[0-5].jsonl"))


def test_a_torn_journal_is_judged_again(tmp_path: Path) -> None:
    first = prepared(tmp_path, "steps=4")
    first.trainer.advance()
    first.close()
    file = tmp_path / "journal" / "step-000000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][:40] + '\n{"group": 3}\n\x00')
    before = timeless(tmp_path)
    second = prepared(tmp_path, "steps=4", resume=True)
    second.trainer.run()
    assert timeless(tmp_path)[:1] == before


# -- the disk --------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_ends_the_run_and_keeps_what_is_there(tmp_path: Path) -> None:
    more = ("steps=9", "checkpoint.every_steps=2")
    run = prepared(tmp_path, *more)
    for _ in range(2):
        run.trainer.advance()
    run.trainer.save(wait=True)
    with largest_file(20_000), pytest.raises(RunError, match=r"checkpoint .* free some space"):
        run.trainer.run()
    run.close()
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-000002"}, "nothing half-written is left"
    again = prepared(tmp_path, *more, resume=True)
    again.trainer.run()
    again.trainer.finish()
    again.close()
    whole = prepared(tmp_path / "whole", *more)
    whole.trainer.run()
    assert same(weights(whole), weights(again))


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    with largest_file(10), pytest.raises(RunError, match=r"cannot be written \(File too large\)"):
        run.trainer.run()


def test_a_final_model_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    run.trainer.advance()
    run.trainer.finish()
    before = (tmp_path / "final" / "model.safetensors").read_bytes()
    run.trainer.advance()
    with largest_file(20_000), pytest.raises(RunError, match="final: could not be written"):
        run.trainer.finish()
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("damage", ["weights.safetensors", "state.pt", "manifest.json"])
def test_a_torn_checkpoint_is_named_and_the_one_before_it_used(damage: str, tmp_path: Path) -> None:
    more = ("steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=3")
    whole = prepared(tmp_path, *more)
    whole.trainer.run()
    whole.close()
    expected, rows = weights(whole), timeless(tmp_path)
    file = tmp_path / "checkpoints" / "step-000006" / damage
    file.write_bytes(file.read_bytes()[:100])
    progress = Quiet()
    again = prepared(tmp_path, *more, resume=True, progress=progress)
    assert again.trainer.done == 4
    again.trainer.run()
    again.close()
    assert any("skipped" in s and "step-000006" in s for s in progress.said)
    assert same(expected, weights(again)) and timeless(tmp_path) == rows


# -- waits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["reward", "engine", "update"])
def test_what_hangs_is_named_and_ended_with_a_checkpoint(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path, "steps=50", "watchdog.limit_minutes=0.05")
    run.trainer.watch.__self__.grace_s = 20.0  # type: ignore[attr-defined]
    for _ in range(2):
        run.trainer.advance()

    def hang(*_: Any, **__: Any) -> Any:
        time.sleep(60)

    target = {
        "reward": (run.scorer, "gather"),
        "engine": (run.engine, "generate"),
        "update": (run.trainer.policy, "update"),
    }[place]
    monkeypatch.setattr(*target, hang)
    named = {"reward": "rewards of", "engine": "rollouts of", "update": "the update"}[place]
    start = time.monotonic()
    with pytest.raises(RunError, match=rf"for {named}.*stacks of all threads"):
        run.trainer.run()
    assert time.monotonic() - start < 30
    run.close()
    assert "in hang" in (tmp_path / "stacks.txt").read_text()
    assert (tmp_path / "checkpoints" / "step-000002").exists()


def test_a_worker_that_hangs_or_dies_costs_its_samples_only(tmp_path: Path) -> None:
    """Every completion of even length takes for ever, every third kills its worker."""
    import pool_rewards

    run = prepared(
        tmp_path,
        "steps=2",
        "reward_pool.workers=2",
        "reward_pool.timeout_s=0.3",
        functions=[pool_rewards.treacherous],
    )
    run.trainer.run()
    run.close()
    rows = timeless(tmp_path)
    assert len(rows) == 2 and all(0 < row["valid_share"] < 1 for row in rows)
    journal = (tmp_path / "journal").glob("*.jsonl")
    assert not list(journal) or "timeout" in "".join(p.read_text() for p in journal)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_running_out_of_memory_is_one_line_that_says_what_to_lower(tmp_path: Path) -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import torch
torch.set_num_threads(1)
from groupwise.cli import main
from small_runs import settings
import groupwise.training.run as run
from small_runs import tiny
from groupwise.training.stages.sft import save
save(tiny(), {str(tmp_path / "model")!r})
plain = run.prepare
def prepare(*a, **k):
    found = plain(*a, **k)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    # Enough for the small objects of Python: without room for them it raises other errors.
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, resource.RLIM_INFINITY))
    return found
run.prepare = prepare
given = settings({str(tmp_path / "run")!r}, "model.path={tmp_path / "model"}",
                 "prompts_per_step=64", "group_size=64", "sampling.max_tokens=900",
                 "engine.max_rows=4096", "data.limit=64", "evaluation.at_start=false")
raise SystemExit(main(["train", "word-problems", *(w for s in given for w in ("--set", s))]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert line.startswith("error: out of memory (") and "engine.max_rows" in line
    assert "Checkpoints" not in line, "memory ended in the first step"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("saved", [False, True])
def test_running_out_of_memory_promises_only_checkpoints_that_exist(
    saved: bool, tmp_path: Path
) -> None:
    if saved:
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(RunError, match="out of memory") as ended:  # noqa: SIM117
        with _memory_named(config(tmp_path), planned=False):
            raise MemoryError
    promised = str(ended.value).endswith("Checkpoints are intact: continue with --resume.")
    assert promised == saved


# -- settings on resume ----------------------------------------------------------------------------


def test_changed_settings_are_listed_and_refused_where_they_change_the_mathematics(
    tmp_path: Path,
) -> None:
    from groupwise.errors import UsageError

    first = prepared(tmp_path, "steps=2")
    first.trainer.run()
    first.close()
    changed = ("steps=3", "group_size=6", "optimizer.learning_rate=1e-4", "threads=2")
    with pytest.raises(UsageError) as refusal:
        prepared(tmp_path, *changed, resume=True)
    said = str(refusal.value)
    assert "2 settings that affect results" in said and "--allow-changes" in said
    assert "group_size: 4 → 6" in said and "optimizer.learning_rate: 0.003 → 0.0001" in said
    assert "steps" not in said.partition(":")[2].replace("settings", "").replace("at step", "")
    progress = Quiet()
    again = prepared(tmp_path, *changed, resume=True, allow_changes=True, progress=progress)
    torch.set_num_threads(1)
    again.trainer.run()
    again.close()
    assert "changed threads: 1 → 2" in progress.said and len(timeless(tmp_path)) == 3


def test_a_schedule_that_depends_on_the_steps_makes_them_mathematics(tmp_path: Path) -> None:
    from groupwise.training.resume import changes, plain_settings

    cosine = plain_settings(config(tmp_path, "optimizer.schedule=cosine"))
    longer = {**cosine, "steps": 9}
    assert [c.mathematical for c in changes(cosine, longer)] == [True]


def test_the_thread_count_of_the_checkpoint_is_used_again(tmp_path: Path) -> None:
    first = prepared(tmp_path, "threads=2", "steps=1")
    first.trainer.run()
    first.close()
    torch.set_num_threads(1)
    try:
        prepared(tmp_path, "threads=", "steps=2", resume=True).close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_no_secret_of_the_environment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-very-secret-123")
    monkeypatch.setattr(sys, "argv", ["groupwise", "--set", "x=sk-very-secret-123"])
    policy = tiny()
    train_config(
        config(tmp_path, "steps=1", "data.system=sk-very-secret-123"),
        policy=policy,
        functions=[letters],
        eval_prompts=[],
        progress=Quiet(),
    )
    for path in tmp_path.rglob("config.json"):
        assert "sk-very-secret-123" not in path.read_text(), path
    assert "<JUDGE_API_KEY>" in (tmp_path / "config.json").read_text()
    for path in tmp_path.rglob("manifest.json"):
        assert "sk-very-secret-123" not in path.read_text(), path
