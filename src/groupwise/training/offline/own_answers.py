"""Preference pairs of a model's own answers, made by the rewards of a recipe."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from groupwise.errors import UsageError
from groupwise.evaluation.measure import generate_and_score
from groupwise.prompts.templates import Rendered
from groupwise.rewards import Scorer
from groupwise.rundir.files import replace_text
from groupwise.training.monitor.progress import Progress, duration
from groupwise.types import Engine, Group, Sampling

PAIRS = "pairs.jsonl"
"""File of the run directory."""

CHUNK = 32
"""Prompts that are answered between two lines of progress."""


def own_pairs(
    engine: Engine,
    scorer: Scorer,
    ready: Rendered,
    folder: Path,
    *,
    sampling: Sampling,
    group: int,
    pairs: Literal["best_worst", "all"],
    seed: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Sample answers, score them, and write pairs of them to `pairs.jsonl` in TRL's format.

    Answers that were cut off, repeat another one or could not be judged make no pair.

    Raises:
        UsageError: no two answers to any prompt differ in their reward.
    """
    rows: list[dict[str, Any]] = []
    start, count = time.monotonic(), len(ready.prompts)
    for first in range(0, count, CHUNK):
        part = slice(first, first + CHUNK)
        groups, scores = generate_and_score(
            engine,
            scorer,
            ready.prompts[part],
            ready.tokens[part],
            sampling,
            group=group,
            seed=seed,
        )
        for made, rewards in zip(groups, scores.total.tolist(), strict=True):
            rows += _pairs(made, rewards, pairs)
        done = min(first + CHUNK, count)
        left = (time.monotonic() - start) / done * (count - done)
        progress.log(
            f"own answers: {done}/{count} prompts, {len(rows)} pairs, left {duration(left)}"
        )
    if not rows:
        raise UsageError(
            f"preference.data = None: no two of {group} answers to any of {count} prompts differ "
            "in their reward; raise group_size or preference.prompts, or give data."
        )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_text(folder / PAIRS, text)
    return rows


def _pairs(
    group: Group, rewards: Sequence[float], how: Literal["best_worst", "all"]
) -> list[dict[str, Any]]:
    """The pairs of one group, best first."""
    answers: dict[str, float] = {}
    for completion, reward in zip(group.completions, rewards, strict=True):
        if completion.finish == "stop" and not math.isnan(reward):
            answers.setdefault(completion.text, reward)
    ranked = sorted(answers.items(), key=lambda item: -item[1])
    chosen = [(a, b) for a in ranked for b in ranked if a[1] > b[1]]
    if how == "best_worst" and chosen:
        chosen = [(ranked[0], ranked[-1])]
    return [_row(group, better, worse) for better, worse in chosen]


def _row(group: Group, better: tuple[str, float], worse: tuple[str, float]) -> dict[str, Any]:
    def turn(text: str) -> Any:
        return [{"role": "assistant", "content": text}] if prompt.messages else text

    prompt = group.prompt
    given: str | list[Mapping[str, str]] = [dict(m) for m in prompt.messages] or str(prompt.text)
    return {
        "prompt": given,
        "chosen": turn(better[0]),
        "rejected": turn(worse[0]),
        "score_chosen": better[1],
        "score_rejected": worse[1],
    }
