"""Sampling ahead of the update: batches are sampled from weights that are k steps old.

With k = `ahead`, batch s + k starts before the update of step s and is sampled from the weights of
that moment; the first k + 1 batches are sampled from the initial weights. After the first k steps,
every batch is therefore exactly k steps old, whatever the engine and its speed: a resumed run, one
process and a cluster draw the same tokens.

If the engine shares its process with the learner, batches are sampled in turn before the update
(`ahead` then neither costs nor saves time). An engine with its own processes samples in the
background while the learner updates.

Source:
    One-step off-policy training: 2410.18252, k = 1.
    Elsewhere: the order in which batches are sampled depends on the clock (verl, AReaL, prime-rl);
    their runs are not reproducible.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from groupwise.errors import RunError
from groupwise.rollouts.background import Background, SamplingClosed
from groupwise.rollouts.source import RolloutSource
from groupwise.rollouts.stored import restored, stored
from groupwise.types import Heartbeat, Request, ScoredGroups, Watch, unwatched

POLL_S = 0.5
"""Longest pause, in seconds, between checks on the sampling thread."""


@dataclass(eq=False, kw_only=True)
class _Begun:
    """A batch that has been started: the weights that sample it exist, so its prompts may be drawn.

    Attributes:
        count: groups of the batch.
        version: of the weights.
        scored: None until it is complete.
        after: state of the inner source once it was complete.
    """

    step: int
    count: int
    version: int
    scored: ScoredGroups | None = None
    after: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Runner(Protocol):
    """Runs the sampling concurrently with the update."""

    def start(self, work: Callable[[], None]) -> None:
        """Run a function concurrently with the caller."""
        ...

    def wait(self, until: Callable[[], bool]) -> bool:
        """Wait until a condition holds, for a limited time; returns whether it holds."""
        ...

    def notify(self) -> None:
        """Tell both sides that conditions may have changed."""
        ...

    def join(self) -> None:
        """Wait until the function has returned."""
        ...


class Thread:
    """Runs the sampling in a thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """As `Runner.start`."""
        self.thread = threading.Thread(target=work, name="sampling", daemon=True)
        self.thread.start()

    def wait(self, until: Callable[[], bool]) -> bool:
        """As `Runner.wait`."""
        with self.changed:
            return self.changed.wait_for(until, timeout=POLL_S)

    def notify(self) -> None:
        """As `Runner.notify`."""
        with self.changed:
            self.changed.notify_all()

    def join(self) -> None:
        """As `Runner.join`, but for 10 seconds at most: a thread that waits for judges is
        abandoned.
        """
        if self.thread is not None:
            self.thread.join(timeout=10)


class AheadSource:
    """A `Source` that samples batches before they are needed.

    Args:
        source: draws prompts, samples and scores; with `background`, its engine.
        ahead: k, at least 1.
        steps: of the run; no batch beyond the last step is begun.
        version: of the weights that the engine has now.
        background: samples beside the update; None samples in turn.
        predicts: whether the prompts of a batch are known before the previous batch is complete: no
            filter redraws prompts, and the order of prompts does not depend on rewards.
        watch: watches the wait for a batch.
        runner: runs the background sampling; None runs it in a thread.

    Attributes:
        before: state of the inner source before the first batch that is begun.
        progress: groups and verdicts that the sampling in the background was given so far.
    """

    def __init__(
        self,
        source: RolloutSource,
        *,
        ahead: int,
        steps: int,
        version: Callable[[], int],
        background: Background | None = None,
        predicts: bool = False,
        watch: Watch = unwatched,
        runner: Runner | None = None,
    ) -> None:
        self.source, self.ahead, self.steps, self.version = source, ahead, steps, version
        self.background, self.predicts, self.watch = background, predicts, watch
        self.runner: Runner = runner or Thread()
        if background is not None:
            source.watch = self._noted  # The wait for a batch is watched here.
        self.progress = 0
        self.begun: deque[_Begun] = deque()
        self.before: Mapping[str, Any] = {}
        self.closed = False
        self._error: BaseException | None = None
        self._running = False

    def take(self, count: int, *, step: int) -> ScoredGroups:
        """The batch of a step; the batches up to `ahead` steps later are started before it is
        returned.

        Raises:
            RunError: not a single group was worth keeping, or sampling failed.
        """
        start = time.perf_counter()
        self._forget_unpublished()
        if not self.begun and not self._running:
            self.before = self.source.state()
        first = self.begun[-1].step + 1 if self.begun else step
        for later in range(first, max(step, min(step + self.ahead, self.steps - 1)) + 1):
            self.begun.append(_Begun(step=later, count=count, version=self.version()))
        if self.background is None:
            for batch in list(self.begun):
                self._fill(batch)
            return _scored(self.begun.popleft())
        self._wait_for(self.begun[0])
        batch = self.begun.popleft()
        scored, self.before = _scored(batch), batch.after
        # The step waited only for the part of the sampling that outlasted the update.
        return replace(scored, seconds={"rollout": time.perf_counter() - start})

    def _fill(self, batch: _Begun) -> None:
        """Sample and score a batch, once."""
        if batch.scored is None:
            scored = self.source.take(batch.count, step=batch.step)
            batch.after, batch.scored = self.source.state(), scored

    def _forget_unpublished(self) -> None:
        """After a rollback of the learners, drop the batches of weights that no longer exist."""
        if self.begun and self.begun[-1].version > self.version():
            self._wait_for(self.begun[-1])
            while self.begun and self.begun[-1].version > self.version():
                self.begun.pop()

    # -- in the background ---------------------------------------------------------------------

    def _wait_for(self, batch: _Begun) -> None:
        """Wait for a batch that is sampled in the background."""
        if self.background is not None and batch.scored is None and not self._running:
            self._running = True
            self.runner.start(self._work)
        self.runner.notify()
        try:
            with self.watch(f"the batch of step {batch.step + 1}") as heartbeat:
                self._sampled(batch, heartbeat)
        except BaseException as error:
            # The checkpoint written now must not wait for this batch again.
            self._error = self._error or RunError(f"sampling was given up: {error}")
            raise
        if batch.scored is None:
            assert self._error is not None
            raise self._error

    def _sampled(self, batch: _Begun, heartbeat: Heartbeat) -> None:
        """Wait until a batch is complete or sampling has failed."""
        seen = None
        while not self.runner.wait(lambda: batch.scored is not None or self._error is not None):
            received = 0 if self.background is None else self.background.received
            if (now := (received, self.progress)) != seen:
                seen = now
                heartbeat()

    @contextmanager
    def _noted(self, name: str) -> Iterator[Heartbeat]:
        """A watch that counts progress."""

        def heartbeat() -> None:
            self.progress += 1

        yield heartbeat

    def _work(self) -> None:
        """Fill the batches that were begun, in order, until the source is closed."""
        assert self.background is not None
        try:
            while True:
                while not self.runner.wait(lambda: self.closed or self._next() is not None):
                    pass
                batch = self._next()
                if batch is None:
                    raise SamplingClosed
                self.background.begin(batch.version, self._predicted(batch))
                self._fill(batch)
                self.runner.notify()
        except SamplingClosed:
            self._error = RunError("the run ended while a batch was still being sampled.")
            self.runner.notify()
        except BaseException as error:
            self._error = error
            self.runner.notify()

    def _next(self) -> _Begun | None:
        """The first batch that is not complete."""
        if self.closed:
            return None
        return next((batch for batch in list(self.begun) if batch.scored is None), None)

    def _predicted(self, batch: _Begun) -> Callable[[], list[Request]]:
        """Called once a batch has drawn its prompts: the requests of batches begun since the last
        call, provided that none of its groups is drawn again."""
        told = batch.step

        def requests() -> list[Request]:
            nonlocal told
            later = [each for each in list(self.begun) if each.step > batch.step]
            if not self.predicts or not later or later[-1].step == told:
                return []
            found = self.source.upcoming([(each.count, each.step) for each in later])
            new = [
                replace(request, version=each.version)
                for each, several in zip(later, found, strict=True)
                for request in several
                if each.step > told
            ]
            told = later[-1].step
            return new

        return requests

    # -- state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `restore` needs. It includes the batches that are begun; they are serialised only
        when the state is written, which waits for incomplete ones.
        """
        if not self.begun:
            return self.source.state()
        return {"ahead": Snapshot(source=self, before=self.before, begun=tuple(self.begun))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, which may come from a run with another `ahead`.

        Raises:
            UsageError: the prompts or the seed are not those of the state.
        """
        saved = state.get("ahead")
        self.begun.clear()
        if isinstance(saved, Snapshot):
            self.begun.extend(saved.begun)
            self.before = saved.before
            if self.background is None:
                self.source.restore(saved.begun[-1].after)
        elif saved is None:
            self.source.restore(state)
        else:
            self.source.restore(saved["source"])
            for each in saved["begun"]:
                self.begun.append(
                    _Begun(
                        step=each["step"],
                        count=each["count"],
                        version=each["version"],
                        scored=restored(each["scored"], self.source),
                        after=saved["source"],
                    )
                )

    def close(self) -> None:
        """End the sampling in the background; what it has not finished is dropped."""
        self.closed = True
        if self.background is not None:
            self.background.closed = True
        if self._running:
            self.runner.notify()
            self.runner.join()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The batches that were begun at one moment; call it to get them as plain values.

    Attributes:
        before: state of the inner source before the first of them.
    """

    source: AheadSource
    before: Mapping[str, Any]
    begun: tuple[_Begun, ...]

    def __call__(self) -> dict[str, Any]:
        """Plain values and tensors, once every batch is complete. After sampling has failed,
        incomplete batches are left out, and a resumed run samples them again with newer weights.

        Raises:
            RunError: sampling was closed before.
        """
        complete: list[_Begun] = []
        for batch in self.begun:
            try:
                self.source._wait_for(batch)
            except Exception:
                if self.source.closed:
                    raise
                break
            complete.append(batch)
        return {
            "source": complete[-1].after if complete else self.before,
            "begun": [
                {
                    "step": batch.step,
                    "count": batch.count,
                    "version": batch.version,
                    "scored": stored(_scored(batch), self.source.source),
                }
                for batch in complete
            ],
        }


def _scored(batch: _Begun) -> ScoredGroups:
    assert batch.scored is not None
    return batch.scored
