"""Runs of a model that is made in a second, for tests of the loop and of what may befall it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config, load
from groupwise.models import Policy, save_policy
from groupwise.rundir.files import read_lines
from groupwise.training.prepare import Prepared, prepare
from groupwise.training.stages.base_model import small_policy
from pool_rewards import letters

CLOCK = ("seconds", "tokens_per_second", "memory_mb", "tool_wait_seconds")
"""Beginnings of the names of metrics that no two runs share."""


class Quiet:
    """Progress that keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, run: str, step: int, metrics: Any) -> None:
        """Steps are not shown."""

    def log(self, text: str) -> None:
        """Keep a line."""
        self.said.append(text)

    def close(self) -> None:
        """Nothing is open."""


def tiny(seed: int = 0) -> Policy:
    """A model of 16 thousand random parameters with the small tokenizer."""
    return small_policy(hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=64, seed=seed)


def sharp(policy: Policy) -> Policy:
    """The policy with larger weights: far from uniform, so that there is something to learn."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(3.0)
    return policy


def distilling(folder: Path, *more: str) -> list[str]:
    """Settings of a run in a folder that distils a sharp teacher into a student of noise."""
    for name, policy in (("teacher", sharp(tiny(seed=1))), ("student", tiny(seed=2))):
        save_policy(policy, folder / name)
    return [
        f"output={folder / 'out'}",
        f"model.path={folder / 'student'}",
        f"distillation.teacher={folder / 'teacher'}",
        "prompts_per_step=2",
        "group_size=2",
        "sampling.max_tokens=6",
        "evaluation.prompts=2",
        "evaluation.samples=2",
        "guards.silent_rewards=say",
        "data.limit=10",
        *more,
    ]


def noisy(*, ends: Sequence[int]) -> Policy:
    """A model of noise with heads 16 wide, which compiled kernels compute as a whole; with several
    tokens that end a completion, so that completions end and repeat themselves often."""
    policy = small_policy(hidden=32, layers=2, heads=2, key_value_heads=1, feed_forward=64)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return replace(policy, end_tokens=frozenset({*policy.end_tokens, *ends}))


def settings(output: Path, *more: str) -> list[str]:
    """A recipe's settings for a run of a second; later ones replace earlier ones."""
    return [
        f"output={output}",
        "steps=4",
        "prompts_per_step=3",
        "group_size=4",
        "data.limit=20",
        "sampling.max_tokens=8",
        "evaluation.prompts=2",
        "evaluation.samples=2",
        "optimizer.learning_rate=3e-3",
        "optimizer.warmup_steps=0",
        "threads=1",
        *more,
    ]


def config(output: Path, *more: str) -> Config:
    return load("word-problems", settings(output, *more))


def prepared(
    output: Path,
    *more: str,
    functions: Sequence[Callable[..., Any]] = (letters,),
    policy: Policy | None = None,
    **given: Any,
) -> Prepared:
    """A run that is ready to go and is never evaluated; of a tiny model unless a path is set."""
    if policy is None and not any(setting.startswith("model.path") for setting in more):
        policy = tiny()
    return prepare(
        config(output, *more),
        progress=given.pop("progress", Quiet()),
        policy=policy,
        functions=functions,
        eval_prompts=given.pop("eval_prompts", []),
        **given,
    )


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run without those that depend on the clock."""
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCK)}
        for row in read_lines(folder / "metrics.jsonl")
    ]


def assert_resumes_to_the_bit(
    make: Callable[..., Prepared], folder: Path, *more: str, steps: int
) -> Prepared:
    """A run that ends after its third step and is resumed from its second has the metrics and the
    learners of the unbroken one in `folder / "whole"`; returns the resumed run."""
    runs = []
    for name, stop in (("whole", steps), ("parts", 3)):
        run = make(folder / name, *more)
        for _ in range(stop):
            run.trainer.advance()
            if run.trainer.done == 2:
                run.trainer.save(wait=True)
        run.close()
        runs.append(run)
    again = make(folder / "parts", *more, resume=True)
    assert again.trainer.done == 2
    again.trainer.run()
    again.close()
    for name, learner in runs[0].trainer.learners.items():
        parts = again.trainer.learners[name]
        assert learner.version == parts.version
        assert all(torch.equal(w, parts.trained()[n]) for n, w in learner.trained().items())
    assert timeless(folder / "whole") == timeless(folder / "parts")
    return again
