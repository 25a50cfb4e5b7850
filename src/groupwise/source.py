"""Prompts in, scored groups out: the source of a run that samples from its own policy.

It owns what may have to go round again. Under dynamic sampling a group without signal is dropped
and another prompt drawn, until the batch is full or the stated number of rounds is used up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from groupwise.errors import RunError
from groupwise.prompts.order import PromptOrder
from groupwise.rewards import Scorer
from groupwise.types import Engine, Group, Prompt, Request, Sampling, ScoredGroups, Scores

Filter = Callable[[Mapping[str, Any]], Bool[Tensor, "prompt group"]]


class RolloutSource:
    """Samples completions, has them judged while others are still being written, and fills the
    batch.

    Args:
        prompts, tokens: the data and how the model sees it.
        engine, scorer: who writes and who judges.
        keep: the filter of the algorithm; a group of which it keeps nothing is drawn again.
        group: completions per prompt.
        sampling: how they are drawn.
        seed: of the order of prompts and of every random stream.
        max_draws: rounds of drawing before a batch goes on unfilled.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[Sequence[int]],
        *,
        engine: Engine,
        scorer: Scorer,
        keep: Filter,
        group: int,
        sampling: Sampling,
        seed: int,
        max_draws: int = 10,
    ) -> None:
        self.prompts, self.tokens = prompts, tokens
        self.engine, self.scorer, self.keep = engine, scorer, keep
        self.group, self.sampling, self.seed, self.max_draws = group, sampling, seed, max_draws
        self.order = PromptOrder(len(prompts), seed=seed)

    def take(self, count: int, *, step: int) -> ScoredGroups:
        """`count` groups that the filter keeps something of; fewer only when `max_draws` rounds did
        not give them.

        Raises:
            RunError: not a single group was worth keeping.
        """
        groups: list[Group] = []
        scores: list[Scores] = []
        keeps: list[Tensor] = []
        drawn, seconds = 0, {"rollout": 0.0, "reward": 0.0}
        for draw in range(self.max_draws):
            missing = count - len(groups)
            made, judged = self._sample(missing, stream=(self.seed, step, draw), seconds=seconds)
            drawn += missing
            keep = self.keep(_evidence(made, judged))
            chosen = keep.any(1).nonzero().squeeze(-1).tolist()
            groups += [made[index] for index in chosen]
            scores.append(_rows(judged, chosen))
            keeps.append(keep[chosen])
            if len(groups) == count:
                break
        if not groups:
            raise RunError(
                f"algorithm.filter: kept none of {drawn} groups in {self.max_draws} rounds; the "
                f"rewards of each prompt's "
                "answers are all equal, so there is nothing to learn from. Look at `groupwise "
                "report`, or choose easier or "
                "harder prompts, or algorithm.filter.name = 'all'."
            )
        return ScoredGroups(
            groups=tuple(groups),
            scores=_joined(scores),
            keep=torch.cat(keeps),
            drawn=drawn,
            seconds=seconds,
        )

    def _sample(
        self, count: int, *, stream: tuple[int, int, int], seconds: dict[str, float]
    ) -> tuple[list[Group], Scores]:
        """Complete and judge the next `count` prompts; groups come back in the order of the
        prompts."""
        start = time.perf_counter()
        drawn = self.order.next(count)
        requests = [
            Request(
                prompt=self.prompts[i],
                tokens=self.tokens[i],
                group=self.group,
                stream=(*stream, place),
            )
            for place, i in enumerate(drawn)
        ]
        groups: list[Group | None] = [None] * count
        tickets: list[Any] = [None] * count
        for group in self.engine.generate(requests, self.sampling):
            place = group.stream[-1]
            groups[place], tickets[place] = group, self.scorer.submit(group)
        written = time.perf_counter()
        scores = self.scorer.gather(tickets)
        seconds["rollout"] += written - start
        seconds["reward"] += time.perf_counter() - written
        return [group for group in groups if group is not None], scores

    def state(self) -> dict[str, Any]:
        return {"order": self.order.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.order.restore(state["order"])


def _evidence(groups: Sequence[Group], scores: Scores) -> dict[str, Any]:
    """What a filter may look at."""
    truncated = torch.tensor(
        [[c.finish == "length" for c in group.completions] for group in groups]
    )
    return {
        "rewards": scores.total,
        "correct": scores.correct,
        "valid": scores.valid,
        "truncated": truncated,
    }


def _rows(scores: Scores, rows: list[int]) -> Scores:
    return Scores(
        total=scores.total[rows],
        correct=scores.correct[rows],
        parts={name: values[rows] for name, values in scores.parts.items()},
        status=tuple(scores.status[row] for row in rows),
        valid=scores.valid[rows],
        errors=scores.errors,
    )


def _joined(scores: Sequence[Scores]) -> Scores:
    return Scores(
        total=torch.cat([s.total for s in scores]),
        correct=torch.cat([s.correct for s in scores]),
        parts={name: torch.cat([s.parts[name] for s in scores]) for name in scores[0].parts},
        status=tuple(row for s in scores for row in s.status),
        valid=torch.cat([s.valid for s in scores]),
        errors=tuple(error for s in scores for error in s.errors),
    )
