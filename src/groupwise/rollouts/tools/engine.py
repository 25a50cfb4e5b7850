"""Tools on any engine: a completion that stops to ask goes on once its reply is there.

The model's turn ends at one of the environment's stop strings. The environment is asked in a
thread, its reply is encoded by itself and put behind the tokens that are there, and the completion
comes back to the engine as a begun one; in an engine that `converse`s, it keeps its place instead.
Tokens of the policy are never decoded and encoded again, and no completion waits for the tools of
another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from groupwise.environments import END_OF_TURN, Choosing, Ending, Environment, Reply, resume
from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.rollouts.engines.live import Answer, Conversing
from groupwise.rollouts.limits import limits_of
from groupwise.rollouts.rows import EMPTY
from groupwise.rollouts.text import decode_all
from groupwise.rollouts.tools.calls import Calls, ToolCalls
from groupwise.rollouts.tools.injection import Injector, extended
from groupwise.rollouts.tools.journal import Asked, ReplyJournal
from groupwise.rollouts.tools.turns import turn_end, turn_frame
from groupwise.rollouts.tools.waits import Waits
from groupwise.settings import EnvironmentSettings
from groupwise.types import (
    Completion,
    Engine,
    Finish,
    Group,
    Limits,
    Metrics,
    Prompt,
    Request,
    Requests,
    Sampling,
    Status,
    Stream,
    WeightsRef,
)

Key = tuple[Stream, str]
"""Names a request: its stream, and the prompt's id."""


class ToolEngine:
    """Rollouts in which an environment replies, on an engine that can continue completions.

    Args:
        engine: writes; any one that keeps the contract of `groupwise.testing`.
        environment: replies.
        policy: of the engine.
        settings: budgets and time limits of calls.
        max_rows: completions that the engine writes at the same time.
        journal: remembers replies for a run that is resumed; None asks anew.
        calls: runs calls; None runs them in threads, as the settings say.
        ended: called with request, sample and the environment's state (None before a first call)
            of every completion that has ended.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        *,
        policy: Policy,
        settings: EnvironmentSettings,
        max_rows: int = 128,
        journal: ReplyJournal | None = None,
        calls: Calls | None = None,
        ended: Callable[[Request, int, Any], None] | None = None,
    ) -> None:
        stops = environment.stops
        if not stops or not all(stops):
            raise UsageError(
                f"environment.name = {settings.name!r}: defines no stop strings (stops)."
            )
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise UsageError(
                f"environment.name = {settings.name!r}: stops = {stops!r}: must be a tuple of "
                "strings."
            )
        self.engine, self.environment, self.policy = engine, environment, policy
        self.settings, self.max_rows, self.journal = settings, max_rows, journal
        around = turn_frame(policy.tokenizer) if settings.layout == "turns" else ("", "")
        self.injector = Injector(policy, max_tokens=settings.max_result_tokens, around=around)
        self.stops = tuple(stop for stop in stops if stop != END_OF_TURN)
        self.turn_end, self.turn_injector = self._turns()
        threads = ToolCalls(workers=settings.workers, timeout_s=settings.timeout_s)
        self.calls: Calls = threads if calls is None else calls
        self.ended = ended
        self.waits = Waits(environment)

    def _turns(self) -> tuple[int | None, Injector]:
        """The token that ends a turn to which the environment replies, and what encodes replies to
        such turns."""
        if END_OF_TURN not in self.environment.stops:
            return None, self.injector
        if self.settings.layout != "turns":
            raise UsageError(
                f"environment.layout = {self.settings.layout!r}: {self.settings.name} replies to "
                "turns that the model ends; set environment.layout = 'turns'."
            )
        token, around = turn_end(self.policy)
        most = self.settings.max_result_tokens
        return token, Injector(self.policy, max_tokens=most, around=around)

    def replies_to_turns(self, prompt: Prompt) -> bool:
        """Whether the environment of a prompt replies to turns that the model ends."""
        environment = self.environment
        chooses = isinstance(environment, Choosing)
        return END_OF_TURN in (environment.stops_of(prompt) if chooses else environment.stops)

    @property
    def exact_continuation(self) -> bool:
        """As of the engine that writes."""
        return self.engine.exact_continuation

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield each request's group when its last completion has finished, replies included."""
        if limits is None:
            requests = [request for request in requests if request is not None]
            if not requests:
                return
            limits = self._limits(requests, sampling)
            requests = self.waits.ordered(requests)
        rollout = _Rollout(self, requests, sampling)
        handing_over = sampling.model_copy(update={"stop": (*sampling.stop, *self.stops)})
        try:
            for group in rollout.groups(handing_over, limits):
                yield from rollout.take(group)
        finally:
            self.calls.forget()
            rollout.give_up()

    def _limits(self, requests: list[Request], sampling: Sampling) -> Limits:
        """Limits of requests that are all known, with room for replies, and with slots for
        completions that go on while others of their group are still being written."""
        found = limits_of(requests, self.policy, sampling, max_rows=self.max_rows)
        room = self.policy.context - min(len(request.tokens) for request in requests)
        return replace(
            found,
            suffix=min(found.suffix + self.settings.max_injected_tokens, room),
            slots=2 * found.slots,
        )

    def publish(self, weights: WeightsRef) -> Metrics:
        """Hand new weights to the engine that writes."""
        return self.engine.publish(weights)

    def close(self) -> None:
        """Close the engine; calls that are still running are left to themselves."""
        self.calls.forget()
        self.engine.close()


class _Ended(NamedTuple):
    """How a completion has ended."""

    finish: Finish
    failure: tuple[Status, str] | None = None


@dataclass(kw_only=True)
class _Row:
    """A completion and what its environment knows of it.

    Attributes:
        state: of the environment; None before the first call.
        recalled: what was asked in earlier steps, or in calls whose replies were journalled, which
            the state does not know of.
        length, injected: tokens so far, and those of them that the policy did not write.
        completion: as it will be continued, by an engine in which it cannot wait.
        ended_turn: the policy ended its turn to ask.
        final: how it has ended, where a reply ended it.
        over: it has ended, and what its state held is free.
    """

    request: Request
    sample: int
    length: int = 0
    injected: int = 0
    completion: Completion = EMPTY
    state: Any = None
    recalled: list[str] = field(default_factory=list)
    calls: int = 0
    values: dict[str, float] = field(default_factory=lambda: {"calls": 0.0})
    ended_turn: bool = False
    final: _Ended | None = None
    over: bool = False


@dataclass(kw_only=True)
class _Open:
    """A request whose group is not complete."""

    request: Request
    rows: dict[int, _Row]
    done: dict[int, Completion] = field(default_factory=dict)


class _Rollout:
    """The state of one `generate` call."""

    def __init__(self, tools: ToolEngine, requests: Requests, sampling: Sampling) -> None:
        self.tools, self.sampling, self.policy = tools, sampling, tools.policy
        self.given = requests
        self.open: dict[Key, _Open] = {}
        self.ready: deque[_Row] = deque()
        self.answered: list[Answer] = []
        self.waits = isinstance(tools.engine, Conversing)

    def groups(self, sampling: Sampling, limits: Limits | None) -> Iterator[Group]:
        """What the engine writes: whole groups, where completions can wait in it, else pieces."""
        engine = self.tools.engine
        if isinstance(engine, Conversing):
            return engine.converse(self.new_requests(), sampling, limits, self)
        return engine.generate(self.requests(), sampling, limits)

    def new_requests(self) -> Iterator[Request | None]:
        """The requests as they come."""
        for request in self.given:
            if request is not None:
                self._admit(request)
            yield request

    def requests(self) -> Iterator[Request | None]:
        """What the engine is asked to write: continuations first, then new requests; None while
        every completion that is left waits for a reply."""
        source, over = iter(self.given), False
        while True:
            self._receive()
            if self.ready:
                yield self._continuation()
            elif not over:
                try:
                    request = next(source)
                except StopIteration:
                    over = True
                    continue
                if request is not None:
                    self._admit(request)
                yield request
            elif self.open:
                yield None
            else:
                return

    def _admit(self, request: Request) -> None:
        key = (request.stream, request.prompt.id)
        if key in self.open:
            raise UsageError(
                f"prompt {request.prompt.id}: is asked twice under one stream at the same time."
            )
        begun = request.begun or (EMPTY,) * len(request.wanted)
        self.open[key] = _Open(
            request=request,
            rows={
                sample: self._row(request, sample, there)
                for sample, there in zip(request.wanted, begun, strict=True)
            },
        )

    def _row(self, request: Request, sample: int, begun: Completion) -> _Row:
        """A completion as it goes on; its environment is told what was asked before. One whose last
        call was not answered has ended with it."""
        values = {"calls": 0.0, **begun.values}
        marked = groupby(zip(begun.tokens, begun.mask, strict=True), lambda pair: pair[1])
        own = [self._without_end([token for token, _ in run]) for mine, run in marked if mine]
        calls, answered = int(values["calls"]), len(own) - bool(begun.mask and begun.mask[-1])
        return _Row(
            request=request,
            sample=sample,
            completion=begun,
            length=len(begun.tokens),
            injected=len(begun.tokens) - begun.own_tokens,
            recalled=decode_all(self.policy.tokenizer, own[:answered]) if calls else [],
            calls=calls,
            values=values,
            final=_Ended(begun.finish, begun.failure) if calls > answered else None,
        )

    def _continuation(self) -> Request:
        """The first row that can go on, with those of the same prompt that can as well."""
        first = self.ready[0]
        together = [row for row in self.ready if row.request is first.request]
        if first.final is not None:
            together = [first]
        together = [row for row in together if (row.final is None) == (first.final is None)]
        taken = set(map(id, together))
        self.ready = deque(row for row in self.ready if id(row) not in taken)
        request = first.request
        return replace(
            request,
            samples=tuple(row.sample for row in together),
            begun=tuple(row.completion for row in together),
            # One that has ended gets no further token: the engine hands it back as it is.
            budget=request.budget if first.final is None else first.completion.own_tokens,
        )

    def take(self, group: Group) -> Iterator[Group]:
        """Note what the engine has written; the request's group where it is complete."""
        opened = self.open[group.stream, group.prompt.id]
        for sample, completion in zip(group.samples, group.completions, strict=True):
            row = opened.rows[sample]
            if row.final is not None:
                finish, failure = row.final
                completion = replace(completion, finish=finish, failure=failure)
            elif not self.waits and self._asks(row, completion):
                continue
            opened.done[sample] = replace(completion, values=dict(row.values))
            if self.tools.ended is not None:
                self.tools.ended(opened.request, sample, row.state)
            self._free(row)
        if len(opened.done) == len(opened.rows):
            del self.open[group.stream, group.prompt.id]
            wanted = opened.request.wanted
            yield Group(
                prompt=opened.request.prompt,
                prompt_tokens=opened.request.tokens,
                completions=tuple(opened.done[sample] for sample in wanted),
                stream=opened.request.stream,
                samples=wanted,
            )

    def give_up(self) -> None:
        """Free what the states of unfinished completions hold."""
        for opened in self.open.values():
            for row in opened.rows.values():
                self._free(row)

    def _free(self, row: _Row) -> None:
        """Free what the state of a completion holds, which has ended."""
        row.over = True
        environment = self.tools.environment
        if row.state is not None and isinstance(environment, Ending):
            environment.end(row.state)

    def hands_over(self, request: Request, sample: int, tokens: list[int], length: int) -> bool:
        """Whether a completion that has stopped makes a call; the environment then gets it."""
        said = self._said(request, tokens)
        if said is not None:
            row = self.open[request.stream, request.prompt.id].rows[sample]
            row.length, row.ended_turn = length, tokens[-1] == self.tools.turn_end
            self._ask(row, said)
        return said is not None

    def answers(self) -> list[Answer]:
        """The replies that have come, as tokens."""
        self._receive()
        found, self.answered = self.answered, []
        return found

    def _asks(self, row: _Row, completion: Completion) -> bool:
        """Ask the environment if a completion that cannot wait in its engine asks."""
        if completion.finish != "stop":
            return False
        row.completion, mask = completion, completion.mask
        start = max((place + 1 for place, own in enumerate(mask) if not own), default=0)
        own = list(completion.tokens[start:])
        return self.hands_over(row.request, row.sample, own, len(completion.tokens))

    def _said(self, request: Request, tokens: list[int]) -> str | None:
        """What the policy wrote since the last reply, if it ends at a stop string of the
        environment, or with a turn to which the environment replies; else None."""
        tools = self.tools
        ended_turn = (
            bool(tokens) and tokens[-1] == tools.turn_end and tools.replies_to_turns(request.prompt)
        )
        if not tokens or (tokens[-1] in self.policy.end_tokens and not ended_turn):
            return None
        text = decode_all(self.policy.tokenizer, [self._without_end(tokens)])[0]
        if any(stop in text for stop in self.sampling.stop):
            return None
        return text if ended_turn or any(stop in text for stop in tools.stops) else None

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Tokens of the policy without the one that ends its turn."""
        return tokens[:-1] if tokens and tokens[-1] == self.tools.turn_end else tokens

    def _ask(self, row: _Row, text: str) -> None:
        """Ask the environment, or recall what it replied before the run was interrupted."""
        row.calls += 1
        tools = self.tools
        asked = Asked(row.request, row.sample, row.calls, text)
        if tools.journal is not None and (known := tools.journal.recall(asked)) is not None:
            row.recalled.append(text)
            self._reply(row, *known)
            return

        def call() -> Reply:
            if row.state is None:
                request = row.request
                row.state = tools.environment.begin(request.prompt, stream=request.stream)
                if row.over:  # the rollout was given up in the meantime
                    self._free(row)
            if row.recalled:
                earlier, row.recalled = row.recalled, []
                resume(tools.environment, row.state, earlier)
            return tools.environment.reply(row.state, text)

        tools.calls.submit((self, asked), call)

    def _receive(self) -> None:
        """Note the replies that have come."""
        for (rollout, asked), reply, seconds, queued in self.tools.calls.collect():
            if rollout is not self:
                continue
            if reply.status is Status.OK:
                reply = self.tools.injector.read(reply)  # no megabytes in the journal
            if self.tools.journal is not None:
                self.tools.journal.keep(asked, reply, seconds, queued)
            self.tools.waits.note(asked.request.prompt, seconds)
            row = self.open[asked.request.stream, asked.request.prompt.id].rows[asked.sample]
            self._reply(row, reply, seconds, queued)

    def _reply(self, row: _Row, reply: Reply, seconds: float, queued: float) -> None:
        """Put a reply behind the completion; what it ends is marked so."""
        own = {"calls": 1.0, "tool_seconds": seconds, "wait_seconds": seconds + queued}
        for name, value in {**reply.values, **own}.items():
            row.values[name] = row.values.get(name, 0.0) + value
        if reply.status is not Status.OK:
            self._go_on(row, [], _Ended("error", (reply.status, reply.text)))
            return
        injector = self.tools.turn_injector if row.ended_turn else self.tools.injector
        tokens = injector.encode(reply)
        length = len(row.request.tokens) + row.length + len(tokens)
        most = self.tools.settings.max_injected_tokens
        if row.injected + len(tokens) > most or length >= self.policy.context:
            self._go_on(row, [], _Ended("length"))
        elif not tokens and not reply.done:
            said = "environment: replied with an empty text, after which nothing can follow"
            self._go_on(row, [], _Ended("error", (Status.ERROR, said)))
        else:
            self._go_on(row, tokens, _Ended("stop") if reply.done else None)

    def _go_on(self, row: _Row, tokens: list[int], final: _Ended | None) -> None:
        """Let a completion go on, or end, behind injected tokens."""
        row.final = final
        row.injected += len(tokens)
        if self.waits:
            self.answered.append(Answer(row.request, row.sample, tokens, final is not None))
        else:
            row.completion = extended(row.completion, tokens)
            self.ready.append(row)
