"""Scorers: what turns groups into `Scores`. In this process here; in worker processes in `pool`."""

from __future__ import annotations

import concurrent.futures
import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from groupwise.errors import RewardError
from groupwise.rewards.base import GroupScore
from groupwise.rewards.scoring.pipeline import (
    Call,
    CallResult,
    Composition,
    RewardComponent,
    driven,
    judge_group,
    run,
)
from groupwise.rewards.scoring.waiting import WAITING, Waiting
from groupwise.types import Group, Scores, Status

Ticket = concurrent.futures.Future[GroupScore]
"""A group being scored; handed to `gather` of the scorer that gave it."""


@runtime_checkable
class Scorer(Protocol):
    """Scores groups as they finish; order is kept by the tickets."""

    def submit(self, group: Group) -> Ticket: ...

    def gather(self, tickets: Sequence[Ticket]) -> Scores: ...

    def close(self) -> None: ...

    def __enter__(self) -> Scorer: ...

    def __exit__(self, *_: object) -> None: ...


class InlineScorer:
    """Scores groups in this process, in the thread that submits them.

    For cheap rewards that are trusted to return: nothing can be interrupted here. An exception is
    the status `error` of that completion. Async rewards run concurrently on one event loop, and
    rewards that wait for a server in threads.

    Args:
        composition: the reward.
        timeout_s: limit for awaiting one call of an async reward.
    """

    def __init__(self, composition: Composition, *, timeout_s: float = 60.0) -> None:
        self.composition = composition
        self._judged = False
        first = composition.combination.stops_at_first
        self._waiting = Waiting(timeout_s=timeout_s, first=first)

    def submit(self, group: Group) -> Ticket:
        """Score a group; only verdicts of async rewards and servers may arrive later."""
        ticket: Ticket = concurrent.futures.Future()
        steps = judge_group(self.composition, group)
        try:
            stage = next(steps)
            while stage[0][0].place not in WAITING:
                stage = steps.send(self._run(*stage))
        except StopIteration as end:
            ticket.set_result(end.value)
        except Exception as error:
            ticket.set_exception(error)
        else:
            return self._waiting.start(driven(steps, self._results, stage))
        return ticket

    def _run(self, parts: Sequence[RewardComponent], calls: list[Call]) -> list[CallResult]:
        return [run(parts, call, first=self._waiting.first) for call in calls]

    async def _results(
        self, parts: Sequence[RewardComponent], calls: list[Call]
    ) -> list[CallResult]:
        if parts[0].place in WAITING:
            return await self._waiting.results(parts[0], calls)
        return self._run(parts, calls)

    def gather(self, tickets: Sequence[Ticket]) -> Scores:
        """The scores of the groups in the order of the tickets.

        Raises:
            RewardError: a reward broke its contract, or nothing at all could be judged so far.
        """
        scores, self._judged = gathered(tickets, judged=self._judged)
        return scores

    def close(self) -> None:
        """Stop the event loop, if there is one; calls and requests that wait are cancelled."""
        self._waiting.close()

    def __enter__(self) -> InlineScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gathered(tickets: Sequence[Ticket], *, judged: bool) -> tuple[Scores, bool]:
    """Wait for tickets; also whether any completion has been judged so far.

    Raises:
        RewardError: in the first batch not one completion could be judged.
    """
    scores = stack([ticket.result() for ticket in tickets])
    if judged or not tickets:
        return scores, judged
    if not bool(scores.valid.any()):
        reasons = "; ".join(m for m, _ in Counter(scores.errors).most_common(3))
        count = scores.valid.numel()
        raise RewardError(f"reward: none of {count} completions could be judged: {reasons}")
    return scores, True


def stack(groups: Sequence[GroupScore]) -> Scores:
    """Scores of groups of one size as tensors of [prompt, group].

    Raises:
        RewardError: groups of different sizes.
    """
    sizes = {len(group.total) for group in groups}
    if len(sizes) > 1:
        raise RewardError(f"groups of different sizes cannot be stacked: {sorted(sizes)}")
    width = sizes.pop() if sizes else 0
    labels = list(groups[0].parts) if groups else []

    def table(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.float32).reshape(len(groups), width)

    status = tuple(tuple(group.status) for group in groups)
    return Scores(
        total=table([group.total for group in groups]),
        correct=table([group.correct for group in groups]),
        parts={label: table([group.parts[label] for group in groups]) for label in labels},
        status=status,
        valid=table([[s is Status.OK for s in row] for row in status]).bool(),
        errors=tuple(m for group in groups for m in group.errors if m is not None),
        reasons=tuple(tuple(group.errors) for group in groups),
    )


def reward_alert(history: Sequence[Scores], *, batches: int = 3) -> str | None:
    """Why a run should stop because of the rewards of its first batches; None to continue.

    Args:
        history: scores of the first batches, oldest first.
        batches: how many to wait for before "all zero" and "all equal" count.

    Returns:
        A sentence: most completions could not be judged, all rewards are 0, or all are the same.
    """
    seen = list(history[:batches])
    status = Counter(s for scores in seen for row in scores.status for s in row)
    judged, count = status[Status.OK], sum(status.values())
    if count and judged < count / 2:
        failed = ", ".join(f"{n} {s.value}" for s, n in status.most_common() if s is not Status.OK)
        errors = [message for scores in seen for message in scores.errors]
        often = f" Most often: {Counter(errors).most_common(1)[0][0]}" if errors else ""
        return f"only {judged} of {count} completions could be judged ({failed}).{often}"
    if len(seen) < batches:
        return None
    totals = torch.cat([scores.total[scores.valid] for scores in seen])
    low, high = float(totals.min()), float(totals.max())
    if not math.isclose(low, high, rel_tol=1e-6, abs_tol=1e-9):
        return None
    what = "is 0" if low == 0 else f"is {low:g}, the same for every completion"
    return (
        f"every reward of the first {batches} batches {what}, so there is nothing to learn from. "
        "`groupwise reward try` shows what each component scores for the reference answers."
    )
