"""What ends a run at an awkward place: the resumed run is still the unbroken one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from groupwise.errors import RewardError, RunError, UsageError
from groupwise.rundir.files import read_lines
from groupwise.training.prepare import Prepared
from small_runs import Quiet, letters, prepared, timeless

EVALUATED = (
    *("steps=6", "evaluation.every_steps=2", "evaluation.keep_best=true"),
    *("checkpoint.every_steps=4", "evaluation.at_start=false"),
)


def failing(call: Callable[..., Any], error: BaseException, *, at: int) -> Callable[..., Any]:
    """A function that raises the n-th time it is called, before it does anything."""
    calls: list[None] = []

    def called(*given: Any, **settings: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise error
        return call(*given, **settings)

    return called


def end(folder: Path, *more: str) -> dict[str, Any]:
    """Resume to the end; everything that does not depend on the clock."""
    run = prepared(folder, *more, eval_prompts=None, resume=True)
    run.trainer.run()
    run.close()
    return left(run)


def left(run: Prepared) -> dict[str, Any]:
    folder = run.trainer.folder  # type: ignore[union-attr]
    return {
        "metrics": timeless(folder),
        "evaluations": (folder / "evaluations.jsonl").read_text(),
        "best": (folder / "best" / "model.safetensors").read_bytes(),
        "best_step": run.trainer.evaluation.best_step,
        "weights": {n: w.tolist() for n, w in run.trainer.policy.publish().named.items()},
    }


@pytest.mark.parametrize("place", ["measuring", "keeping the best", "its line"])
@pytest.mark.parametrize("at", [2, 3])
def test_an_evaluation_that_failed_is_made_up_for(
    place: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the second evaluation, and at the third, which follows the last step."""
    whole = end(tmp_path / "whole", *EVALUATED)
    run = prepared(tmp_path / "broken", *EVALUATED, eval_prompts=None)
    full = RunError("disk full")
    if place == "measuring":
        run.trainer.evaluation.evaluate = failing(run.trainer.evaluation.evaluate, full, at=at)  # type: ignore[arg-type]
    elif place == "its line":
        monkeypatch.setattr(
            run.trainer.monitor.run_log,
            "evaluation",
            failing(run.trainer.monitor.run_log.evaluation, full, at=at),
        )  # type: ignore[union-attr] # noqa: E501
    else:
        run.trainer.evaluation.best = -1.0
        measure = run.trainer.evaluation.evaluate
        run.trainer.evaluation.evaluate = lambda step: {**measure(step), "score": step}  # type: ignore[misc]
        save = failing(run.trainer.policy.save, OSError(28, "No space left on device"), at=at)
        monkeypatch.setattr(run.trainer.policy, "save", save)
    with pytest.raises(RunError):
        run.trainer.run()
    run.close()
    assert run.trainer.done == 2 * at
    found = end(tmp_path / "broken", *EVALUATED)
    steps = [row["step"] for row in read_lines(tmp_path / "broken" / "evaluations.jsonl")]
    assert steps == [2, 4, 6]
    if place != "keeping the best":
        assert found == whole


def test_no_checkpoint_is_ahead_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of a step cannot be written, the checkpoint after it could be."""
    more = ("steps=4", "checkpoint.every_steps=2")
    run = prepared(tmp_path, *more)
    monkeypatch.setattr(
        run.trainer.monitor.run_log,
        "step",
        failing(run.trainer.monitor.run_log.step, RunError("full"), at=3),
    )  # type: ignore[union-attr] # noqa: E501
    with pytest.raises(RunError, match="full"):
        run.trainer.run()
    run.close()
    again = prepared(tmp_path, *more, resume=True)
    assert again.trainer.done == 2
    again.trainer.run()
    again.close()
    assert [row["step"] for row in timeless(tmp_path)] == [1, 2, 3, 4]


def test_an_update_that_was_interrupted_half_way_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C after the weights have moved and before the step is counted."""
    more = ("steps=4", "checkpoint.every_steps=0")
    whole = prepared(tmp_path / "whole", *more)
    whole.trainer.run()
    run = prepared(tmp_path / "run", *more)
    run.trainer.advance()
    run.trainer.save(wait=True)
    adam = run.trainer.policy.optimizer.adam
    plain = adam.step

    def interrupted() -> None:
        plain()
        raise KeyboardInterrupt

    run.trainer.advance()
    monkeypatch.setattr(adam, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.run()
    run.close()
    again = prepared(tmp_path / "run", *more, resume=True)
    again.trainer.run()
    again.close()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    for name, weight in whole.trainer.policy.publish().named.items():
        assert torch.equal(weight, again.trainer.policy.publish().named[name]), name


def test_verdicts_of_other_rewards_are_not_used_again(tmp_path: Path) -> None:
    """A run ends before its first checkpoint; it continues with another reward or restarts."""

    def half(text: str) -> float:
        return letters(text) / 2

    recipe = ('rewards=[{name="token_repetition", ngram=1}]', "sampling.max_tokens=24")
    first = prepared(tmp_path / "settings", *recipe, functions=())
    first.trainer.advance()
    first.close()
    weighted = (recipe[0].replace("}", ", weight=0.5}"), recipe[1])
    second = prepared(tmp_path / "settings", *weighted, functions=(), resume=True)
    second.trainer.advance()
    second.close()
    fresh = prepared(tmp_path / "fresh", *weighted, functions=())
    fresh.trainer.advance()
    fresh.close()
    assert timeless(tmp_path / "settings") == timeless(tmp_path / "fresh")

    killed = prepared(tmp_path / "code")
    killed.trainer.source.take(3, step=0)
    killed.close()
    anew = prepared(tmp_path / "code", functions=[half])
    anew.trainer.advance()
    anew.close()
    other = prepared(tmp_path / "other", functions=[half])
    other.trainer.advance()
    other.close()
    assert timeless(tmp_path / "code") == timeless(tmp_path / "other")


def test_what_a_power_cut_left_of_later_lines_does_not_matter(tmp_path: Path) -> None:
    """Blocks reach a disk in any order: zeros in the middle of what no checkpoint vouches for."""
    more = ("steps=6", "checkpoint.every_steps=2", "logging.rollouts_every=1")
    whole = prepared(tmp_path / "whole", *more)
    whole.trainer.run()
    whole.close()
    run = prepared(tmp_path / "run", *more)
    for _ in range(5):
        run.trainer.advance()
        if run.trainer.done == 2:
            run.trainer.save(wait=True)
    run.close()
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[3] = bytes(len(lines[3]))
    lines[4] = lines[4][:50]
    file.write_bytes(b"\n".join(lines))
    (tmp_path / "run" / "rollouts" / "step-notes.jsonl").write_text("mine")
    again = prepared(tmp_path / "run", *more, resume=True)
    again.trainer.run()
    again.close()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0][:50], *lines[1:]]))
    with pytest.raises(RunError, match=r"metrics.jsonl, line 1: is not JSON"):
        prepared(tmp_path / "run", *more, resume=True)


def test_a_damaged_checkpoint_does_not_crowd_out_whole_ones(tmp_path: Path) -> None:
    """Step 4 is damaged, the run goes on from step 2 and saves step 3: that one is the last."""
    more = ("steps=6", "checkpoint.keep_last=1", "checkpoint.keep_every=2")
    run = prepared(tmp_path, *more)
    for _ in range(4):
        run.trainer.advance()
        if run.trainer.done in (2, 4):
            run.trainer.save(wait=True)
    run.close()
    (tmp_path / "checkpoints" / "step-000004" / "state.pt").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-000002-mine").mkdir()
    again = prepared(tmp_path, *more, "checkpoint.keep_every=0", resume=True)
    assert again.trainer.done == 2
    again.trainer.advance()
    again.trainer.save(wait=True)
    again.trainer.advance()
    again.trainer.checkpoints.wait()  # type: ignore[union-attr]
    again.close()
    assert (tmp_path / "journal" / "step-000003.jsonl").exists(), "no checkpoint holds this step"
    progress = Quiet()
    last = prepared(tmp_path, *more, "checkpoint.keep_every=0", resume=True, progress=progress)
    assert last.trainer.done == 3
    last.close()


def test_a_kill_before_old_checkpoints_are_deleted_leaves_none(tmp_path: Path) -> None:
    """The last checkpoint of a run was on disk, the one that it replaced was still there."""
    more = ("steps=4", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
    run = prepared(tmp_path, *more)
    run.trainer.run()
    run.close()
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-000004", folder / "step-000002")
    prepared(tmp_path, *more, resume=True).close()
    assert [path.name for path in folder.iterdir()] == ["step-000004"]


def test_other_data_of_the_same_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"

    def write(answer: int) -> None:
        rows = [{"prompt": f"{n}?", "answer": str(n + answer)} for n in range(9)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    more = ("steps=3", f"data.train={file}", "data.answer_column=answer")
    write(answer=0)
    run = prepared(tmp_path / "run", *more)
    run.trainer.advance()
    run.trainer.save(wait=True)
    run.close()
    write(answer=1)
    with pytest.raises(UsageError, match="not those of the run to resume"):
        prepared(tmp_path / "run", *more, resume=True)
    write(answer=0)
    prepared(tmp_path / "run", *more, resume=True).close()


def test_a_folder_that_holds_checkpoints_holds_a_run(tmp_path: Path) -> None:
    """Of a run that was killed after its warm-up and before its first step."""
    run = prepared(tmp_path, "guards.spike=9.0")
    run.close()
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(UsageError, match="already contains a run"):
        prepared(tmp_path)
    prepared(tmp_path, "guards.spike=9.0", resume=True).close()


def test_a_kill_while_the_best_model_is_replaced_leaves_one(tmp_path: Path) -> None:
    """Between its two renames the folder is not there; the next run puts it back."""
    end(tmp_path, *EVALUATED)
    best = tmp_path / "best"
    best.rename(tmp_path / ".best.old")
    (tmp_path / ".best.new").mkdir()
    prepared(tmp_path, *EVALUATED, resume=True).close()
    assert json.loads((best / "config.json").read_text())
    assert not list(tmp_path.glob(".best*"))


@pytest.mark.parametrize("at", [1, 2])
def test_rewards_that_say_nothing_are_noticed_across_a_resume(at: int, tmp_path: Path) -> None:
    """Three batches have to be seen, whoever saw the first ones."""

    def nothing(text: str) -> float:
        return 0.0

    more = ("steps=9", "algorithm.name=grpo")
    run = prepared(tmp_path, *more, functions=[nothing])
    for _ in range(at):
        run.trainer.advance()
    run.trainer.save(wait=True)
    run.close()
    again = prepared(tmp_path, *more, functions=[nothing], resume=True)
    with pytest.raises(RunError, match="first 3 batches is 0, .* guards.silent_rewards = 'say'"):
        again.trainer.run()
    again.close()
    assert len(timeless(tmp_path)) == 3


def test_when_no_worker_can_be_started_any_more_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts them is killed, as by a kernel that is short of memory, and no other
    can be started."""
    more = ("steps=4", "reward_pool.workers=2")
    whole = prepared(tmp_path / "whole", *more, functions=[letters])
    whole.trainer.run()
    whole.close()
    run = prepared(tmp_path / "run", *more, functions=[letters])
    run.trainer.advance()
    started = run.scorer._workers[None].server.process  # type: ignore[attr-defined]
    fork_server = psutil.Process(started.pid)
    gone = [fork_server, *fork_server.children(recursive=True)]
    fork_server.kill()
    started.wait()
    assert psutil.wait_procs(gone, timeout=30)[1] == []  # a worker may still answer until it dies
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", str(tmp_path / "nothing"))
        with pytest.raises(RewardError, match="no reward worker could be started"):
            run.trainer.run()
    run.close()
    again = prepared(tmp_path / "run", *more, functions=[letters], resume=True)
    assert again.trainer.done == 1
    again.trainer.run()
    again.close()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
