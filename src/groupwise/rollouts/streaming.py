"""Sampling without a break: weights change while completions are being written.

A group is admitted while at most `max_staleness` + 1 batches are open, the one that the learner
waits for included, and batches are filled in the order of admission. The group at place q of the
open ones is therefore learned from at most ⌊q / P⌋ steps later, so no token of it is older than
`max_staleness` steps, however long it takes to write. A filter's rejects give their places back.
The age of every token is checked again when a batch is put together.

Tokens carry the version that drew them (`Completion.versions`). Keys and values that earlier
versions have computed stay in the cache, so the log-probabilities are those of the mixture that was
really sampled from, which is what a correction needs.

Where engine and learner share a process, sampling goes on where the last batch was complete, with
the new weights; the same run can then be repeated. An engine with processes of its own samples in
the background, and what it samples depends on the clock: the batches since the last checkpoint are
journalled, and a resumed run learns from the same ones.

Source:
    PipelineRL (2509.19128), in-flight weight updates.
    Elsewhere: AReaL and prime-rl fill batches in the order in which groups are completed, which
    favours short answers; verl and SkyRL bound what is admitted, and check nothing afterwards.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import RunError
from groupwise.rollouts.ahead import Runner
from groupwise.rollouts.background import SamplingClosed
from groupwise.rollouts.batch_journal import BatchJournal
from groupwise.rollouts.source import RolloutSource, evidence, joined, rows_of, sound, success
from groupwise.rollouts.stored import restored, restored_group, stored, stored_group
from groupwise.types import (
    Engine,
    Group,
    Heartbeat,
    Limits,
    Request,
    ScoredGroups,
    Scores,
    Stream,
    Watch,
    unwatched,
)


@dataclass(eq=False, kw_only=True)
class _Open:
    """A group that was admitted and is in no batch yet.

    Attributes:
        row: of its prompt in the data.
        group: None until it is written.
        ticket: of the scorer, once it is being judged.
        scores, keep: None until the filter has decided.
        again: it is written a second time, because its tokens had become too old.
    """

    row: int
    request: Request
    group: Group | None = None
    ticket: Any = None
    scores: Scores | None = None
    keep: Tensor | None = None
    again: bool = False


@dataclass(kw_only=True)
class _Decided:
    """What the filter has decided since the last batch."""

    groups: int = 0
    dropped: int = 0
    valid: int = 0
    truncated: bool = True
    errors: Counter[str]


class StreamingSource:
    """A `Source` whose completions are written while the weights change.

    Args:
        source: draws prompts, judges and filters.
        engine: takes over weights between two tokens.
        max_staleness: S, most steps between the weights that draw a token and its update.
        steps: of the run; nothing is admitted for batches beyond the last step.
        version: of the newest published weights.
        limits: of the requests, for an engine that needs to know them in advance.
        journal: of the batches; None cannot repeat them.
        runner: of the sampling beside the update; None samples in turn.
        watch: watches the wait for a batch.
    """

    def __init__(
        self,
        source: RolloutSource,
        *,
        engine: Engine,
        max_staleness: int,
        steps: int,
        version: Callable[[], int],
        limits: Limits | None = None,
        journal: BatchJournal | None = None,
        runner: Runner | None = None,
        watch: Watch = unwatched,
    ) -> None:
        self.source, self.engine, self.limits = source, engine, limits
        self.max_staleness, self.steps, self.version = max_staleness, steps, version
        self.journal, self.runner, self.watch = journal, runner, watch
        self.closed, self.received, self.stale = False, 0, 0
        self._lock = threading.Lock()
        self._undecided: deque[_Open] = deque()
        self._kept: deque[_Open] = deque()
        self._waiting: deque[_Open] = deque()
        self._running: dict[Stream, _Open] = {}
        self._decided = _Decided(errors=Counter())
        self._admitted: int | None = None
        self._count, self._now, self._next = 1, 0, 0
        self._step_of: dict[int, int] = {}
        self._replays: bool | None = False
        self._judged = False
        self._groups: Iterator[Group] | None = None
        self._started = False
        self._error: BaseException | None = None

    def take(self, count: int, *, step: int) -> ScoredGroups:
        """The next `count` groups in the order of admission that the filter keeps something of.

        Raises:
            RunError: not a single group was worth keeping, sampling failed, or the engine wrote
                tokens with older weights than it had.
        """
        start = time.perf_counter()
        with self._lock:
            self._count, self._now, self._next = count, step, step
            self._step_of[self.version()] = step
            if self._admitted is None:
                self._admitted = step * count
        if (replayed := self._replayed(step)) is not None:
            return replayed
        with self.watch(f"the batch of step {step + 1}") as heartbeat:
            self._submit_restored()
            seen = self._signs()
            while not self._complete() or (found := self._batch(step)) is None:
                self._go_on(heartbeat)
                if (now := self._signs()) != seen:
                    seen = now
                    heartbeat()
        scored = replace(found, seconds={"rollout": time.perf_counter() - start})
        if self.journal is not None:
            batch = stored(scored, self.source)
            self.journal.write(step, {"scored": batch, **self._snapshot(groups=False)()})
        return scored

    # -- batches -------------------------------------------------------------------------------

    def _complete(self) -> bool:
        """Whether a batch is there, or no more rounds are to be drawn for it."""
        if any(each.again for each in list(self._undecided)):
            return False  # They were admitted before what is kept.
        rounds = self._decided.groups >= self.source.max_draws * self._count
        return len(self._kept) >= self._count or rounds

    def _batch(self, step: int) -> ScoredGroups | None:
        """The first groups that were kept; None where some of them are too old and have to be
        written again."""
        with self._lock:
            decided, batch = self._decided, list(self._kept)[: self._count]
            if not batch:
                said = self.source.nothing(
                    decided.groups, decided.valid, decided.errors, truncated=decided.truncated
                )
                raise RunError(said)
            if old := [each for each in batch if self._age(each, step) > self.max_staleness]:
                self._write_again(old, step)
                return None
            self._next = step + 1  # First, so that nothing is admitted in between.
            for _ in batch:
                self._kept.popleft()
            self._decided = _Decided(errors=Counter())
            self._step_of = {v: s for v, s in self._step_of.items() if s >= step - 64}
            unfinished = sum(each.group is None for each in self._undecided)
        groups, scores, keeps = zip(*((b.group, b.scores, b.keep) for b in batch), strict=True)
        return ScoredGroups(
            groups=groups,
            scores=replace(joined(scores), errors=tuple(decided.errors.elements())),
            keep=torch.cat(keeps),
            drawn=len(batch) + decided.dropped,
            unfinished=unfinished,
        )

    def _age(self, each: _Open, step: int) -> float:
        """Steps since the weights of the oldest token; infinite for weights of another run."""
        assert each.group is not None
        versions = {v for c in each.group.completions for _, v in c.versions if c.tokens}
        return max((step - self._step_of.get(v, -(1 << 30)) for v in versions), default=0)

    def _write_again(self, old: list[_Open], step: int) -> None:
        """Have groups written by the weights of now, before any other; what was written is waste.

        Raises:
            RunError: that has been done before.
        """
        for each in old:
            if each.again:
                raise RunError(
                    f"prompt {each.request.prompt.id}: was written by weights that are "
                    f"{self._age(each, step):g} steps old, twice; max_staleness = "
                    f"{self.max_staleness}: the engine does not load new weights."
                )
            self._kept.remove(each)
            self.stale += 1
            each.group = each.ticket = each.scores = each.keep = None
            each.again = True
        self._undecided.extendleft(reversed(old))
        self._waiting.extend(old)

    def _settle(self, *, block: bool) -> bool:
        """Let the filter decide on the first groups that are judged, in the order of admission;
        whether there was one.

        Args:
            block: wait for the verdicts on those that are written.
        """
        with self._lock:
            ready = takewhile(
                lambda each: each.ticket is not None and (block or each.ticket.done()),
                self._undecided,
            )
            first = list(ready)
            # A scorer decides by its first groups whether it can judge at all.
            enough = self._judged or len(self._kept) + len(first) >= self._count
            if not first or not (block or enough):
                return False
        groups = [each.group for each in first if each.group is not None]
        scores = self.source.scorer.gather([each.ticket for each in first])
        found = evidence(groups, scores)
        keep = self.source.keep(found)
        with self._lock:
            self._judged = True
            self.source.order.observe(success(groups, scores))
            for row, each in enumerate(first):
                if each not in self._undecided:  # A state was restored meanwhile.
                    continue
                self._undecided.remove(each)  # Others may be written again before it.
                # Errors are counted once, not with every group.
                each.scores = replace(rows_of(scores, [row]), errors=())
                each.keep = keep[[row]]
                if bool(keep[row].any()):
                    insort(self._kept, each, key=lambda kept: kept.request.stream)
                else:
                    self._decided.dropped += 1
            self._decided.groups += len(first)
            self._decided.valid += int(scores.valid.sum())
            self._decided.errors.update(scores.errors)
            self._decided.truncated &= bool(found["truncated"].all())
        return True

    # -- sampling ------------------------------------------------------------------------------

    def _signs(self) -> tuple[int, int, int]:
        """What changes as groups are written and judged, and as workers get ready."""
        with self._lock:
            tickets = [each.ticket for each in self._undecided if each.ticket is not None]
        judged = sum(ticket.done() for ticket in tickets)
        return self.received, judged, getattr(self.source.scorer, "signs", 0)

    def _go_on(self, heartbeat: Heartbeat) -> None:
        """Sample in turn, or wait for what is sampled in the background.

        In turn, verdicts are waited for when a batch depends on them, so what is admitted does not
        depend on the clock.
        """
        if self.runner is None:
            tickets = [each.ticket for each in takewhile(lambda e: e.ticket, self._undecided)]
            busy = self._running or self._waiting or self._room() > 0
            if tickets and (len(self._kept) + len(tickets) >= self._count or not busy):
                self.source.await_verdicts(tickets, heartbeat)
                self._settle(block=True)
            else:
                self._receive(next(self._answers()))
            return
        if not self._started:
            self._started = True
            self.runner.start(self._work)
        self.runner.notify()
        self.runner.wait(lambda: self._complete() or self._error is not None)
        if self._error is not None:
            raise self._error

    def _answers(self) -> Iterator[Group]:
        if self._groups is None:
            self._groups = self.engine.generate(self._requests(), self.source.sampling, self.limits)
        return self._groups

    def _work(self) -> None:
        """Sample until the source is closed."""
        try:
            for group in self._answers():
                self._receive(group)
                self._settle(block=False)
                if self.runner is not None:
                    self.runner.notify()
        except SamplingClosed:
            self._error = RunError("the run ended while a batch was still being sampled.")
        except BaseException as error:
            self._error = error
        if self.runner is not None:
            self.runner.notify()

    def _receive(self, group: Group) -> None:
        """Have a group judged that the engine has written."""
        each = self._running.pop(group.stream, None)
        if each is None:
            return
        ticket = self.source.submit(group := sound(group))
        with self._lock:
            each.group, each.ticket = group, ticket
            self.received += 1

    def _requests(self) -> Iterator[Request | None]:
        """The next requests for the engine; None while no group may be admitted."""
        while True:
            if self.closed:
                raise SamplingClosed
            if self.runner is not None and self._settle(block=False):
                self.runner.notify()
            with self._lock:
                each = self._next_open()
                if each is not None:
                    self._running[each.request.stream] = each
            yield None if each is None else each.request

    def _next_open(self) -> _Open | None:
        """A group to be written again, or one that is admitted now."""
        if self._waiting:
            return self._waiting.popleft()
        if self._room() <= 0:
            return None
        assert self._admitted is not None
        step, place = divmod(self._admitted, self._count)
        (asked,) = self.source.drawn([Stream(self.source.seed, step, 0, place)])
        self._admitted += 1
        each = _Open(row=asked.row, request=asked.request)
        self._undecided.append(each)
        return each

    def _room(self) -> int:
        """How many groups may be admitted."""
        batches = min(self._now + self.max_staleness + 1, max(self.steps, self._now + 1))
        return (batches - self._next) * self._count - len(self._undecided) - len(self._kept)

    def queue(self) -> dict[str, int]:
        """Numbers of groups that are being sampled, being scored, and waiting for their batch."""
        with self._lock:
            groups, ready = [each.group for each in self._undecided], len(self._kept)
        judging = sum(group is not None for group in groups)
        return {"writing": len(groups) - judging, "judging": judging, "ready": ready}

    # -- state ---------------------------------------------------------------------------------

    def _snapshot(self, *, groups: bool) -> Snapshot:
        with self._lock:
            every = [*self._kept, *self._undecided]
            return Snapshot(
                owner=self,
                source=self.source.state(),
                admitted=self._admitted,
                step_of=dict(self._step_of),
                open=tuple(
                    (e.row, e.request.stream, e.group, e.scores, e.keep)
                    if groups
                    else (e.row, e.request.stream, None, None, None)
                    for e in every
                ),
            )

    def state(self) -> dict[str, Any]:
        """What `restore` needs. Groups that are being written belong to it by name only; a resumed
        run writes them from their beginning, with the weights that it has then."""
        return {"streaming": self._snapshot(groups=True)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with the journalled batches first.

        Raises:
            UsageError: the prompts or the seed are not those of the state.
        """
        saved = state.get("streaming")
        self._take_over(saved() if isinstance(saved, Snapshot) else saved, state)
        self._replays = True

    def _take_over(self, saved: Mapping[str, Any] | None, state: Mapping[str, Any]) -> None:
        self._stop_in_turn()
        with self._lock:
            self.source.restore(state if saved is None else saved["source"])
            for those in (self._undecided, self._kept, self._waiting, self._running):
                those.clear()
            self._decided = _Decided(errors=Counter())
            self._admitted = None if saved is None else saved["admitted"]
            self._step_of = {} if saved is None else dict(saved["step_of"])
            for plain in () if saved is None else saved["open"]:
                self._reopen(plain)

    def _reopen(self, plain: Mapping[str, Any]) -> None:
        row, scored = plain["row"], plain["scored"]
        asked = self.source.asked(row, self.source.tokens[row], Stream(*plain["stream"]))
        each = _Open(row=row, request=asked.request)
        if scored is not None:
            back = restored(scored, self.source)
            (each.group,), each.scores, each.keep = back.groups, back.scores, back.keep
            self._kept.append(each)
            return
        self._undecided.append(each)
        if plain["group"] is None:
            self._waiting.append(each)
        else:
            each.group = restored_group(plain["group"], self.source)

    def _submit_restored(self) -> None:
        """Have restored groups judged; not earlier, as a checkpoint is saved after a judge hung."""
        with self._lock:
            found = [(e, e.group) for e in self._undecided if e.group and e.ticket is None]
        for each, group in found:
            each.ticket = self.source.submit(group)

    def _replayed(self, step: int) -> ScoredGroups | None:
        """The journalled batch of a step of a resumed run, after which sampling goes on as it did;
        None once there is none."""
        if self.journal is None or self._replays is None:
            return None
        found = self.journal.read(step) if self._replays else None
        if found is None:
            self.journal.drop(step)  # Written by another run, or after a missing batch.
            self._replays = None
            return None
        known = self._step_of
        self._take_over(found, {})
        self._step_of |= known
        return restored(found["scored"], self.source)

    def close(self) -> None:
        """End the sampling; what is not in a batch is dropped."""
        self.closed = True
        if self.runner is not None and self._started:
            self.runner.notify()
            self.runner.join()
        self._stop_in_turn()

    def _stop_in_turn(self) -> None:
        if self.runner is None and isinstance(self._groups, Generator):
            self._groups.close()
            self._groups = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The groups that were open at some moment; called, it gives them as plain values."""

    owner: StreamingSource
    source: Mapping[str, Any]
    admitted: int | None
    step_of: Mapping[int, int]
    open: tuple[tuple[int, Stream, Group | None, Scores | None, Tensor | None], ...]

    def __call__(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "source": self.source,
            "admitted": self.admitted,
            "step_of": dict(self.step_of),
            "open": [self._plain(*each) for each in self.open],
        }

    def _plain(
        self,
        row: int,
        stream: Stream,
        group: Group | None,
        scores: Scores | None,
        keep: Tensor | None,
    ) -> dict[str, Any]:
        plain: dict[str, Any] = {"row": row, "stream": list(stream), "group": None, "scored": None}
        if group is not None and scores is not None and keep is not None:
            one = ScoredGroups(groups=(group,), scores=scores, keep=keep, drawn=1)
            plain["scored"] = stored(one, self.owner.source)
        elif group is not None:
            plain["group"] = stored_group(group, row)
        return plain
