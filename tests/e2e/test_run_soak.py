"""What a long run costs besides its steps: memory, file handles, and time for checkpoints."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from groupwise.config import load
from groupwise.models import make_policy
from groupwise.rollouts import ScriptedEngine
from groupwise.training.prepare import Prepared, prepare
from groupwise.types import Prompt
from small_runs import Quiet, prepared
from tiny_models import SHAPE, letter_tokenizer


def scripted(folder: Path, *more: str) -> Prepared:
    """A run whose answers are written by a function, and whose model has a single layer of width 8,
    so that a step costs as little as it can."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPE, **small, **one_head}))
    policy = make_policy(model, letter_tokenizer())
    prompts = [Prompt(id=str(n), text=chr(40 + n)) for n in range(30)]
    run = prepared(
        folder,
        "prompts_per_step=1",
        "group_size=2",
        "alerts.patience=1000000",
        "guards.max_bad_steps=1000000",
        *more,
        policy=policy,
        prompts=prompts,
        functions=[lambda text: float(text.count("a"))],
    )
    engine = ScriptedEngine(
        lambda prompt, sample: "ab" if sample else "bb", encode=lambda text: [64, 65][: len(text)]
    )
    run.trainer.engine = run.trainer.source.engine = engine
    return run


def held() -> tuple[float, int]:
    """Memory in MB and open files of this process."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss / 2**20, process.num_fds()


def soak(folder: Path, *, steps: int) -> tuple[float, int]:
    """By how much memory and handles grow from a tenth of a run to its middle and from there to its
    end, the smaller of the two: a leak grows in both, what is allocated once in only one."""
    every = max(1, steps // 20)
    run = scripted(folder, f"steps={steps}", f"checkpoint.every_steps={every}")
    marks: list[tuple[float, int]] = []
    advance = run.trainer.advance

    def counted() -> Any:
        if run.trainer.done in (steps // 10, steps // 2, steps - 1):
            run.trainer.checkpoints.wait()  # type: ignore[union-attr]
            marks.append(held())
        return advance()

    run.trainer.advance = counted  # type: ignore[method-assign]
    run.trainer.run()
    run.close()
    grown = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(marks)]
    assert len(grown) == 2
    assert len(list((folder / "journal").glob("*"))) <= 2 * every
    assert len(list((folder / "checkpoints").glob("*"))) <= 2
    return min(memory for memory, _ in grown), min(handles for _, handles in grown)


def test_three_hundred_steps_hold_no_more_than_thirty(tmp_path: Path) -> None:
    memory, handles = soak(tmp_path, steps=300)
    assert memory < 6 and handles <= 0


@pytest.mark.verify
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_steps_hold_no_more_than_ten_thousand(tmp_path: Path) -> None:
    memory, handles = soak(tmp_path, steps=100_000)
    assert memory < 20 and handles <= 0


def test_closing_a_run_gives_everything_back(tmp_path: Path) -> None:
    before = 0, 0
    for number in range(6):
        run = scripted(tmp_path / str(number), "steps=2")
        run.trainer.run()
        run.close()
        if number == 0:  # What libraries start when they are first used stays with the process.
            before = psutil.Process().num_threads(), psutil.Process().num_fds()
    soon = time.monotonic() + 10  # A thread that has been waited for is not at once gone.
    while psutil.Process().num_threads() > before[0] and time.monotonic() < soon:
        time.sleep(0.05)
    assert psutil.Process().num_threads() <= before[0]
    assert psutil.Process().num_fds() <= before[1]


@pytest.mark.verify
def test_a_checkpoint_every_five_steps_costs_at_most_three_percent(tmp_path: Path) -> None:
    """On the bundled model and its own recipe: seconds inside `save` and the wait for the one
    before, over the seconds of the run."""
    given = [f"output={tmp_path}", "steps=40", "checkpoint.every_steps=5", "threads=1"]
    run = prepare(load("word-problems", given), progress=Quiet(), eval_prompts=[])
    save, spent = run.trainer.save, []

    def timed(**how: Any) -> None:
        start = time.perf_counter()
        save(**how)
        spent.append(time.perf_counter() - start)

    run.trainer.save = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    run.trainer.run()
    total = time.perf_counter() - start
    run.close()
    assert len(spent) == 8
    assert sum(spent) / total < 0.03, f"{sum(spent):.3f} s of {total:.1f} s"
    print(f"{sum(spent):.3f} s of {total:.1f} s")
