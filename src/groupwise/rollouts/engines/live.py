"""The completions that a group engine is writing, and those that wait for a reply."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.rollouts.limits import PAUSES
from groupwise.rollouts.rows import Row
from groupwise.types import Group, Limits, Request, Requests, Sampling

Entry = tuple[int, int, int, int, int, int]
"""A row's number, slot, sample, time, token and budget."""


class Answer(NamedTuple):
    """What follows a completion that asked its environment.

    Attributes:
        request, sample: name the completion.
        tokens: to be injected.
        over: whether it ends behind them.
    """

    request: Request
    sample: int
    tokens: list[int]
    over: bool


@runtime_checkable
class Turns(Protocol):
    """Answers completions that stopped to ask."""

    def hands_over(self, request: Request, sample: int, tokens: list[int], length: int) -> bool:
        """Whether a completion that met a stop string must wait for an answer.

        Args:
            tokens: that the policy wrote since the last answer.
            length: tokens of the whole completion.
        """
        ...

    def answers(self) -> list[Answer]:
        """The answers that have arrived since the last call."""
        ...


@runtime_checkable
class Conversing(Protocol):
    """An engine in which completions can wait for an answer."""

    def converse(
        self,
        requests: Requests,
        sampling: Sampling,
        limits: Limits | None = None,
        turns: Turns | None = None,
    ) -> Iterator[Group]: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Slot:
    """A prompt in the cache, its completions, and the tick of the clock at which it entered."""

    request: Request
    rows: list[Row]
    start: int


class Parked(NamedTuple):
    """A completion that waits for its answer. It has no row number because slots move.

    Attributes:
        sample: its place among the rows of the slot.
        time, token: place and id of its last token, which has yet to pass through the model.
    """

    slot: Slot
    sample: int
    time: int
    token: int


class Parking:
    """The completions that wait.

    Args:
        turns: answers them.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._waiting: dict[tuple[int, int], Parked] = {}
        self._answers: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, slot: Slot) -> bool:
        return any(parked.slot is slot for parked in self._waiting.values())

    def offer(self, parked: Parked, tokens: list[int]) -> None:
        """Let a completion wait if its `tokens` since the last answer ask for one."""
        request = parked.slot.request
        name = request.wanted[parked.sample]
        with torch.inference_mode(False):  # The call may run in this thread.
            waits = self.turns.hands_over(request, name, tokens, parked.time + 1)
        if waits:
            self._waiting[id(request), name] = parked

    def answered(self, *, room: int) -> list[tuple[Parked, Answer]]:
        """The completions that can go on, in the order of their answers.

        Args:
            room: how many there may be at most.
        """
        self._answers += self.turns.answers()
        found = [self._answers.popleft() for _ in range(min(room, len(self._answers)))]
        return [(self._waiting.pop((id(one.request), one.sample)), one) for one in found]

    def wait(self) -> None:
        """Wait until a completion can continue."""
        pause, longest = PAUSES
        while not self._answers:
            self._answers += self.turns.answers()
            time.sleep(0 if self._answers else pause)
            pause = min(2 * pause, longest)


@dataclass(frozen=True, kw_only=True)
class Live:
    """The completions that are still being written, one entry each.

    Attributes:
        rows: slot · G + sample.
        slot, sample: the two parts of it.
        time: where the key of `token` goes in the suffix.
        token: drawn last.
        budget: tokens that the completion may have.
    """

    rows: Int[Tensor, "rows"]
    slot: Int[Tensor, "rows"]
    sample: Int[Tensor, "rows"]
    time: Int[Tensor, "rows"]
    token: Int[Tensor, "rows"]
    budget: Int[Tensor, "rows"]

    def keep(self, index: Tensor) -> Live:
        """Some of the entries, by mask or by index."""
        return Live.columns(self.table[:, index])

    def join(self, other: Live) -> Live:
        return Live.columns(torch.cat((self.table, other.table), 1))

    def ordered(self) -> Live:
        """The entries in the order of rows."""
        return self.keep(self.rows.argsort())

    @property
    def table(self) -> Int[Tensor, "6 rows"]:
        """All columns, so that one operation takes entries from every one of them."""
        return torch.stack((self.rows, self.slot, self.sample, self.time, self.token, self.budget))

    @classmethod
    def columns(cls, table: Int[Tensor, "6 rows"]) -> Live:
        """The entries of a table."""
        rows, slot, sample, time, token, budget = table.unbind()
        return cls(rows=rows, slot=slot, sample=sample, time=time, token=token, budget=budget)

    @classmethod
    def of(cls, entries: list[Entry], device: torch.device) -> Live:
        """The live rows of these entries."""
        table = torch.tensor(entries, dtype=torch.long).view(-1, 6).T.contiguous()
        return cls.columns(table.to(device))
