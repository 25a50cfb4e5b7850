"""Pairs and rankings of a model's own answers by the rewards of a recipe."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from groupwise.errors import UsageError
from groupwise.evaluation.measure import generate_and_score
from groupwise.prompts.rows import read_rows
from groupwise.prompts.templates import Rendered
from groupwise.rewards import Scorer
from groupwise.rundir.files import replace_text
from groupwise.training.monitor.progress import Progress, duration
from groupwise.types import Completion, Engine, Group, Sampling

T = TypeVar("T")

PAIRS = "pairs.jsonl"
"""File of pairs in the run directory."""

RANKINGS = "rankings.jsonl"
"""File of rankings in the run directory."""

CHUNK = 32
"""Number of prompts between two lines of progress."""


@dataclass(frozen=True, kw_only=True)
class OwnAnswers:
    """Samples a model's own answers to prompts, scores them and writes them to the run directory.
    Answers that were cut off, repeat another one or could not be judged are left out.

    Attributes:
        engine, scorer: make the answers and their rewards.
        ready: the prompts.
        folder: the run directory.
        sampling, group, seed: of the answers.
        recall: take them from the run directory where they are, as a resumed run does.
        progress: shows how far they are.
    """

    engine: Engine
    scorer: Scorer
    ready: Rendered
    folder: Path
    sampling: Sampling
    group: int
    seed: int
    recall: bool
    progress: Progress

    def pairs(self, how: Literal["best_worst", "all"]) -> list[dict[str, Any]]:
        """Pairs of answers, written to `pairs.jsonl` in TRL's format.

        Raises:
            UsageError: no two answers to any prompt differ in their reward.
        """
        if (kept := self._kept(PAIRS)) is not None:
            return kept
        rows = [
            _pair_row(made, better, worse)
            for made, ranked in self._ranked()
            for better, worse in pairs_of_ranked([(pair, pair[1]) for pair in ranked], how)
        ]
        return self._written(rows, PAIRS, "preference")

    def rankings(self) -> list[dict[str, Any]]:
        """The answers to every prompt as a ranking, written to `rankings.jsonl`; errors as in
        `pairs`."""
        if (kept := self._kept(RANKINGS)) is not None:
            return kept
        rows = [_ranking_row(made, ranked) for made, ranked in self._ranked()]
        return self._written(rows, RANKINGS, "reward_model")

    def _kept(self, name: str) -> list[dict[str, Any]] | None:
        path = self.folder / name
        kept = self.recall and path.is_file()
        return [dict(row) for row in read_rows(str(path))] if kept else None

    def _written(self, rows: list[dict[str, Any]], name: str, section: str) -> list[dict[str, Any]]:
        if not rows:
            raise UsageError(
                f"{section}.data: is not set, and no two of {self.group} answers to any prompt "
                f"differ in their reward; raise group_size or {section}.prompts, or give data."
            )
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        replace_text(self.folder / name, text)
        return rows

    def _ranked(self) -> Iterator[tuple[Group, list[tuple[str, float]]]]:
        """The groups with answers that differ in reward, and their answers, best first."""
        start, count, used = time.monotonic(), len(self.ready.prompts), 0
        for first in range(0, count, CHUNK):
            part = slice(first, first + CHUNK)
            groups, scores = generate_and_score(
                self.engine,
                self.scorer,
                self.ready.prompts[part],
                self.ready.tokens[part],
                self.sampling,
                group=self.group,
                seed=self.seed,
            )
            for made, rewards in zip(groups, scores.total.tolist(), strict=True):
                if ranked := ranked_answers(made.completions, rewards):
                    used += 1
                    yield made, [(made.completions[place].text, reward) for place, reward in ranked]
            done = min(first + CHUNK, count)
            if 10 * done // count == 10 * first // count:
                continue
            left = (time.monotonic() - start) / done * (count - done)
            self.progress.log(
                f"own answers: {done}/{count} prompts, {used} with answers that differ in reward, "
                f"left {duration(left)}"
            )


def ranked_answers(
    completions: Sequence[Completion], rewards: Sequence[float]
) -> list[tuple[int, float]]:
    """Places and rewards of the answers of a group, best first; none where all rewards are equal.

    Answers that were cut off, repeat another one or could not be judged (NaN) are left out.
    """
    places: dict[str, int] = {}
    for place, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        if completion.finish == "stop" and not math.isnan(reward):
            places.setdefault(completion.text, place)
    if len({rewards[place] for place in places.values()}) < 2:
        return []
    return sorted(((p, rewards[p]) for p in places.values()), key=lambda item: -item[1])


def pairs_of_ranked(
    ranked: Sequence[tuple[T, float]], how: Literal["best_worst", "all"]
) -> list[tuple[T, T]]:
    """The pairs (better, worse) of answers with their rewards, best first.

    Example:
        >>> pairs_of_ranked([("a", 1.0), ("b", 0.5), ("c", 0.5)], "all")
        [('a', 'b'), ('a', 'c')]
    """
    if not ranked:
        return []
    if how == "best_worst":
        return [(ranked[0][0], ranked[-1][0])]
    return [(a, b) for a, high in ranked for b, low in ranked if high > low]


def _given(group: Group) -> str | list[Mapping[str, str]]:
    return [dict(m) for m in group.prompt.messages] or str(group.prompt.text)


def _turn(group: Group, text: str) -> Any:
    return [{"role": "assistant", "content": text}] if group.prompt.messages else text


def _pair_row(group: Group, better: tuple[str, float], worse: tuple[str, float]) -> dict[str, Any]:
    return {
        "prompt": _given(group),
        "chosen": _turn(group, better[0]),
        "rejected": _turn(group, worse[0]),
        "score_chosen": better[1],
        "score_rejected": worse[1],
    }


def _ranking_row(group: Group, ranked: Sequence[tuple[str, float]]) -> dict[str, Any]:
    return {
        "prompt": _given(group),
        "completions": [_turn(group, text) for text, _ in ranked],
        "scores": [score for _, score in ranked],
    }
