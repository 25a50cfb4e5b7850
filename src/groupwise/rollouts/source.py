"""Prompts in, scored groups out: the source of a run that samples from its own policy.

It owns everything that may have to be repeated. Under dynamic sampling, a group without signal is
dropped and another prompt drawn, until the batch is full or `max_draws` rounds are used up.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from groupwise.errors import RunError, UsageError
from groupwise.prompts.order import PromptOrder
from groupwise.prompts.orders import Order
from groupwise.prompts.sources import content_hash
from groupwise.rewards import Scorer
from groupwise.rewards.journal import RewardJournal
from groupwise.rewards.scoring.pipeline import NOT_FINITE
from groupwise.rollouts.partial import PartialRollouts, RowRequest
from groupwise.rollouts.spans import Spans
from groupwise.rollouts.tools import ReplyJournal
from groupwise.types import (
    Engine,
    Group,
    Heartbeat,
    Prompt,
    Request,
    Sampling,
    ScoredGroups,
    Scores,
    Stream,
    Watch,
    unwatched,
)

POLL_S = 1.0
"""Seconds between checks that workers make progress."""
Filter = Callable[[Mapping[str, Any]], Bool[Tensor, "prompt group"]]


class RolloutSource:
    """Samples completions, has them judged while others are still being written, and fills the
    batch.

    Args:
        prompts, tokens: the data and how the model sees it.
        engine, scorer: sample and judge the completions.
        keep: the filter of the algorithm; a group of which it keeps nothing is drawn again.
        group: completions per prompt.
        sampling: how they are drawn.
        seed: seeds every random stream and the order of prompts.
        order: in which prompts are drawn; None shuffles them.
        max_draws: rounds of drawing before a batch goes on unfilled.
        journal: stores verdicts for a resumed run; None judges everything again.
        replies: the journal of the engine's environment, which is told the step.
        tokens_per_step: maximum tokens of a completion in one step; it continues in the next one.
            None finishes every completion in its step.
        watch: watches each wait for rollouts and for rewards.

    Attributes:
        rows: where the prompts drawn so far stand in the data, by id.
        spans: of judging, for the timeline of the run; None notes none.
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
        order: Order | None = None,
        max_draws: int = 10,
        journal: RewardJournal | None = None,
        replies: ReplyJournal | None = None,
        tokens_per_step: int | None = None,
        watch: Watch = unwatched,
    ) -> None:
        self.prompts, self.tokens = prompts, tokens
        self.engine, self.scorer, self.keep = engine, scorer, keep
        self.group, self.sampling, self.seed, self.max_draws = group, sampling, seed, max_draws
        self.journal, self.replies, self.watch = journal, replies, watch
        self.partial = PartialRollouts(tokens_per_step)
        self.order: Order = PromptOrder(len(prompts), seed=seed) if order is None else order
        self.rows: dict[str, int] = {}
        self.spans: Spans | None = None
        self._rows = content_hash(prompts)

    def take(self, count: int, *, step: int) -> ScoredGroups:
        """`count` groups of which the filter keeps something; fewer only if `max_draws` rounds did
        not yield enough.

        With `tokens_per_step`, a step starts `count` prompts and returns the groups that it
        completes, started now or earlier: `count` on average, and at least one.

        Raises:
            RunError: not a single group was worth keeping.
        """
        for journal in (self.journal, self.replies):
            if journal is not None:
                journal.begin(step)
        groups: list[Group] = []
        scores: list[Scores] = []
        keeps: list[Tensor] = []
        drawn, valid, errors = 0, 0, Counter[str]()
        truncated = True
        seconds = {"rollout": 0.0, "reward": 0.0}
        draw, new, going_on = 0, count, self.partial.resumed(self.sampling)
        while True:
            asked = [*going_on, *self._new(new, stream=Stream(self.seed, step, draw))]
            made, judged = self._sample(asked, seconds=seconds)
            chosen: list[int] = []
            if judged is not None:
                drawn, valid = drawn + len(made), valid + int(judged.valid.sum())
                errors.update(judged.errors)
                self.order.observe(success(made, judged))
                found = evidence(made, judged)
                truncated = truncated and bool(found["truncated"].all())
                keep = self.keep(found)
                chosen = keep.any(1).nonzero().squeeze(-1).tolist()
                groups += [made[index] for index in chosen]
                scores.append(rows_of(judged, chosen))
                keeps.append(keep[chosen])
            draw, dropped = draw + 1, len(made) - len(chosen)
            refills = draw < self.max_draws
            if dropped and refills:
                new, going_on = dropped, []
            elif groups or not len(self.partial):
                break
            else:  # Nothing is complete yet.
                new, going_on = count * refills, self.partial.resumed(self.sampling)
        if not groups:
            raise RunError(self.nothing(drawn, valid, errors, truncated=truncated))
        return ScoredGroups(
            groups=tuple(groups),
            scores=joined(scores),
            keep=torch.cat(keeps),
            drawn=drawn,
            unfinished=None if self.partial.tokens_per_step is None else len(self.partial),
            seconds=seconds,
        )

    def nothing(self, drawn: int, valid: int, errors: Counter[str], *, truncated: bool) -> str:
        """Why there is no batch."""
        if not valid:
            if errors.keys() == {NOT_FINITE}:
                return (
                    f"rollouts: the log-probabilities of all completions of {drawn} prompts are "
                    "NaN or infinite, so the weights have diverged. Resume from an earlier "
                    "checkpoint, or start again, with a lower optimizer.learning_rate."
                )
            reasons = "; ".join(message for message, _ in errors.most_common(3)) or "no reason"
            return (
                f"rewards: not one completion of {drawn} prompts could be judged ({reasons}), so "
                "there is nothing to learn from."
            )
        if truncated:
            return (
                f"algorithm.filter: kept none of {drawn} groups in {self.max_draws} rounds; every "
                f"completion ran out of tokens (sampling.max_tokens = {self.sampling.max_tokens}), "
                "so none ends by itself. Raise sampling.max_tokens, or start from a model that "
                "ends its answers (a section [warmup], or `groupwise sft`)."
            )
        return (
            f"algorithm.filter: kept none of {drawn} groups in {self.max_draws} rounds; the "
            "rewards of each prompt's answers are all equal, so there is nothing to learn from. "
            "Look at `groupwise report`, or choose easier or harder prompts, or "
            "algorithm.filter.name = 'all'."
        )

    def _new(self, count: int, *, stream: Stream) -> list[RowRequest]:
        """Requests for the next `count` prompts."""
        return self.drawn([stream._replace(place=place) for place in range(count)])

    def drawn(self, streams: Sequence[Stream]) -> list[RowRequest]:
        """Requests for the next prompts, one for each stream."""
        found = zip(self._fitting(len(streams)), streams, strict=True)
        return [self.asked(row, tokens, stream) for (row, tokens), stream in found]

    def asked(self, row: int, tokens: Sequence[int], stream: Stream) -> RowRequest:
        """The request for a prompt of the data."""
        prompt = self.prompts[row]
        self.rows[prompt.id] = row
        request = Request(
            prompt=prompt,
            tokens=tokens,
            group=self.group,
            stream=stream,
            budget=self.partial.budget(self.sampling),
        )
        return RowRequest(row, request)

    def upcoming(self, batches: Sequence[tuple[int, int]]) -> list[list[Request]]:
        """The first requests of the next batches, (count, step) each, if none draws again. Nothing
        is drawn."""
        before = self.order.state()
        try:
            drawn = [self._new(count, stream=Stream(self.seed, step)) for count, step in batches]
        finally:
            self.order.restore(before)
        return [[each.request for each in batch] for batch in drawn]

    def _sample(
        self, asked: Sequence[RowRequest], *, seconds: dict[str, float]
    ) -> tuple[list[Group], Scores | None]:
        """Sample completions and score the complete groups: these groups in the order of the
        requests, and their scores, or None if no group is complete."""
        start = time.perf_counter()
        places = {each.request.stream: place for place, each in enumerate(asked)}
        groups: dict[int, Group] = {}
        tickets: dict[int, Any] = {}
        recalled: dict[int, Scores] = {}
        with self.watch(f"rollouts of {len(asked)} prompts") as heartbeat:
            requests = [each.request for each in asked]
            for part in self.engine.generate(requests, self.sampling):
                heartbeat()
                place = places[part.stream]
                group = self.partial.take(asked[place], sound(part), self.sampling)
                if group is None:
                    continue
                groups[place] = group
                known = self.journal.recall(group) if self.journal else None
                if known is None:
                    tickets[place] = self.submit(group)
                else:
                    recalled[place] = known
        written = time.perf_counter()
        scores = None
        if groups:
            with self.watch(f"rewards of {len(tickets)} prompts") as heartbeat:
                self.await_verdicts(tickets.values(), heartbeat)
                scores = self._judged(groups, tickets, recalled)
        seconds["rollout"] += written - start
        seconds["reward"] += time.perf_counter() - written
        return [groups[place] for place in sorted(groups)], scores

    def submit(self, group: Group) -> Any:
        """The ticket of a group that the scorer is given."""
        told = None if self.spans is None else self.spans.judging()
        ticket = self.scorer.submit(group)
        if told is not None:
            ticket.add_done_callback(told)
        return ticket

    def await_verdicts(self, tickets: Iterable[Any], heartbeat: Heartbeat) -> None:
        """Wait for verdicts; each is progress, and so is a worker that loads its model."""
        waiting, seen = set(tickets), 0
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            signs = getattr(self.scorer, "signs", 0)
            if done or signs != seen:
                heartbeat()
            seen = signs

    def _fitting(self, count: int) -> list[tuple[int, Sequence[int]]]:
        """The rows and tokens of the next prompts; of a data set that is rendered as it is drawn,
        those too long are passed over.

        Raises:
            RunError: no prompt of a whole epoch fits.
        """
        found: list[tuple[int, Sequence[int]]] = []
        passed_over = 0
        while len(found) < count:
            for place in self.order.next(count - len(found)):
                tokens = self.tokens[place]
                if tokens:
                    found.append((place, tokens))
                else:
                    passed_over += 1
            if passed_over >= len(self.prompts) and not found:
                raise RunError(f"prompts: none of {passed_over} is short enough for the context.")
        return found

    def _judged(
        self,
        groups: Mapping[int, Group],
        tickets: Mapping[int, Any],
        recalled: Mapping[int, Scores],
    ) -> Scores:
        """The verdicts that were asked for now, noted in the journal, among those remembered."""
        asked = sorted(tickets)
        fresh = self.scorer.gather([tickets[place] for place in asked])
        if self.journal is not None:
            self.journal.keep([groups[place] for place in asked], fresh)
        if not recalled:
            return fresh
        rows = {place: rows_of(fresh, [row]) for row, place in enumerate(asked)}
        rows = {place: replace(one, errors=()) for place, one in rows.items()} | dict(recalled)
        every = joined([rows[place] for place in sorted(groups)])
        return replace(every, errors=(*fresh.errors, *every.errors))

    def state(self) -> dict[str, Any]:
        """What `restore` needs to continue with the same prompts and completions."""
        state = {"order": self.order.state(), "rows": self._rows}
        return {**state, "begun": self.partial.state()} if len(self.partial) else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            UsageError: the prompts or the seed are not those of the state.
        """
        for name in ("ahead", "streaming"):
            if name in state:
                raise UsageError(
                    f"{name}: the checkpoint holds groups that were sampled before their steps; "
                    f"resume with the setting {name!r} of the run's config.json."
                )
        self.order.restore(state["order"])
        if state.get("rows", self._rows) != self._rows:
            raise UsageError(
                "prompts: are not those of the run to resume, though there are as many; put the "
                "data back as it was, or start a new run with --set output=FOLDER."
            )
        self.partial.restore(state.get("begun", ()), self.prompts, self.tokens)


def sound(group: Group) -> Group:
    """The group with completions whose probabilities are not finite marked as failed: the model
    was broken when it wrote them, and nothing may be learned from them."""
    if all(math.isfinite(sum(c.logprobs)) for c in group.completions):
        return group
    completions = tuple(
        c
        if math.isfinite(sum(c.logprobs))
        else replace(c, finish="error", logprobs=[0.0] * len(c.tokens))
        for c in group.completions
    )
    return replace(group, completions=completions)


def success(groups: Sequence[Group], scores: Scores) -> dict[str, float]:
    """The share of right answers to each prompt, or of positive rewards where nothing decides."""
    found = {}
    for row, group in enumerate(groups):
        valid = scores.valid[row]
        correct = scores.correct[row][valid]
        known = (scores.total[row][valid] > 0).float() if correct.isnan().any() else correct
        found[group.prompt.id] = float(known.mean()) if len(known) else math.nan
    return found


def evidence(groups: Sequence[Group], scores: Scores) -> dict[str, Any]:
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


def rows_of(scores: Scores, rows: list[int]) -> Scores:
    """The scores of some of the groups."""
    return Scores(
        total=scores.total[rows],
        correct=scores.correct[rows],
        parts={name: values[rows] for name, values in scores.parts.items()},
        status=tuple(scores.status[row] for row in rows),
        valid=scores.valid[rows],
        errors=scores.errors,
        reasons=tuple(scores.reasons[row] for row in rows) if scores.reasons else (),
    )


def joined(scores: Sequence[Scores]) -> Scores:
    """The scores of several batches of groups as those of one."""
    return Scores(
        total=torch.cat([s.total for s in scores]),
        correct=torch.cat([s.correct for s in scores]),
        parts={name: torch.cat([s.parts[name] for s in scores]) for name in scores[0].parts},
        status=tuple(row for s in scores for row in s.status),
        valid=torch.cat([s.valid for s in scores]),
        errors=tuple(error for s in scores for error in s.errors),
        reasons=tuple(row for s in scores for row in s.reasons or _unknown(s)),
    )


def _unknown(scores: Scores) -> tuple[tuple[None, ...], ...]:
    """Reasons of scores that have none, such as those of an older journal."""
    return tuple((None,) * len(row) for row in scores.status)
