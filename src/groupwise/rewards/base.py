"""What a reward is: the registry, the vocabulary of data, and the score of one group.

A registered reward takes data first and settings after the star:

    @verifier
    @REWARDS.register
    def exact_answer(text, answer, *, style: str = "answer_tag") -> float | None: ...

The data it asks for decides how it is called. A reward that asks for names of `SAMPLE_DATA` only is
called once per completion and returns a float, or None: this completion cannot be judged. One that
asks for any name of `GROUP_DATA` is called once per group and returns one such value per
completion, in order; an exception in place of a value is the failure of that completion. It sees
only the completions that every earlier part could judge, so that a sample without a verdict never
enters the statistics of its group.

This module and everything that registers into it imports no torch: worker processes load it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from groupwise.registry import Registry

if TYPE_CHECKING:
    from groupwise.types import Status

F = TypeVar("F", bound=Callable[..., Any])

SAMPLE_DATA = (
    "text",  # what the policy wrote, special tokens kept, end-of-sequence token dropped
    "whole",  # the same with what an environment injected
    "tool_values",  # what the environment counted by name, such as "calls"; empty without one
    "tokens",  # its token ids
    "answer",  # the reference answer; text for registered rewards, else of the type asked for
    "prompt",  # the prompt as a string
    "columns",  # every other column of the data row
    "finish",  # "stop", "length" or "error"
    "length",  # number of tokens that the policy wrote, end-of-sequence token included
    "max_tokens",  # the budget of the sampler, or None
    "correct",  # raw correctness by the verifier among the earlier parts, from 0 to 1
)
GROUP_DATA = (
    "group",  # the `Group`, restricted to the completions that can still be judged
    "texts",
    "lengths",
    "corrects",
)

REWARDS = Registry("reward", data=SAMPLE_DATA + GROUP_DATA)
"""Every reward by name. A module that registers here is imported by `groupwise.rewards`."""


class Unjudgeable(Exception):
    """Raised by a reward that cannot judge a completion, in place of returning None: the message,
    which says why, is kept with the completion."""


class Trait(str, Enum):
    """What the runner must know of a reward beyond its signature."""

    VERIFIER = "verifier"
    IN_PROCESS = "in_process"
    OWN_WORKER = "own_worker"
    IN_THREAD = "in_thread"


def verifier(function: F) -> F:
    """Mark a reward whose value, cut to 0 … 1, is the raw correctness of the completion."""
    return _mark(function, Trait.VERIFIER)


def in_process(function: F) -> F:
    """Mark a reward that must run in the trainer's process, such as one with an open connection."""
    return _mark(function, Trait.IN_PROCESS)


def in_thread(function: F) -> F:
    """Mark a reward that waits for a server: it runs in a thread of the trainer's process, for
    several groups at once. It cannot be interrupted, so it must enforce a time limit itself; a
    call that takes more than ten minutes is abandoned with the status `timeout`."""
    return _mark(function, Trait.IN_THREAD)


def own_worker(prepare: Callable[..., object], *, imports: Sequence[str] = ()) -> Callable[[F], F]:
    """Mark a reward that loads a model: it runs in a separate worker process.

    A call that exceeds `reward_pool.timeout_s` has the status `timeout`; its worker is killed, and
    the next call waits for a new one.

    Args:
        prepare: called in a new worker before the first call, with the reward's settings that it
            has parameters for. A `UsageError` is raised before anything starts.
        imports: modules that are imported once, in the process that workers are forked from. They
            must start no thread and touch no GPU.
    """

    def mark(function: F) -> F:
        function.prepare = prepare  # type: ignore[attr-defined]
        function.imports = tuple(imports)  # type: ignore[attr-defined]
        return _mark(function, Trait.OWN_WORKER)

    return mark


def reads_rows(check: Callable[..., object]) -> Callable[[F], F]:
    """State how a reward reads a data row, so that a run can be refused when it starts.

    Args:
        check: called with the columns of a row and those settings of the reward that it has
            parameters for; raises `UsageError` or `Unjudgeable` where the row is unfit.
    """

    def mark(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark


def looks_for(*tags: str) -> Callable[[F], F]:
    """State the tags that a reward reads, so that a run can check that decoding keeps them."""

    def mark(function: F) -> F:
        function.tags = tags  # type: ignore[attr-defined]
        return function

    return mark


def traits(function: Callable[..., Any]) -> frozenset[Trait]:
    """What a reward was marked as, or what a partial wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return frozenset(getattr(function, "__reward_traits__", ()))


def _mark(function: F, trait: Trait) -> F:
    function.__reward_traits__ = traits(function) | {trait}  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """The scores of one group: one value per completion everywhere. `stack` makes `Scores` of them.

    Attributes:
        total: the reward that trains; NaN where the status is not `ok`.
        correct: raw correctness from 0 to 1; NaN where no part defines it or it was not judged.
        parts: every part by name before weighting; NaN where it did not apply or was not reached.
        status: what became of judging each completion.
        errors: a message for every completion that is not `ok`, None for the others.
        seconds: time spent per part, over the whole group.
    """

    total: Sequence[float]
    correct: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    status: Sequence[Status]
    errors: Sequence[str | None]
    seconds: Mapping[str, float] = field(default_factory=dict)


def as_correct(value: float | None) -> float:
    """Raw correctness of a verifier's value: cut to 0 … 1, NaN where there is none.

    Example:
        >>> as_correct(2.0), as_correct(-1.5), as_correct(0.25)
        (1.0, 0.0, 0.25)
    """
    return math.nan if value is None else min(max(float(value), 0.0), 1.0)
