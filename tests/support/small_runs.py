"""Runs of a model that is made in a second, for tests of the loop and of what may befall it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from groupwise.config import Config, load
from groupwise.models import Policy
from groupwise.rundir.files import read_lines
from groupwise.training.prepare import Prepared, prepare
from groupwise.training.stages.base_model import small_policy

CLOCK = ("seconds", "tokens_per_second", "memory_mb")
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


def letters(text: str) -> float:
    """A reward that a model made of noise earns now and then: the share of digits and blanks."""
    return sum(c.isdigit() or c.isspace() for c in text) / 12


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
