"""Completions that are cut at a token budget per step and continue in the next step.

A long completion then holds up no step. What it has so far waits here, with the log-probabilities
and policy versions of its tokens, and is continued with the weights of the next step. A group is
complete when all of its completions are.

Source:
    Kimi k1.5 (2501.12599), partial rollouts.
    Elsewhere: slime and verl sample more prompts than a batch needs, stop when the batch is full
    and continue what was stopped; where it is cut then depends on the clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from groupwise.types import Completion, Group, Prompt, Request, Sampling, Status, Stream


class RowRequest(NamedTuple):
    """A request to the engine: the row of its prompt in the data, and all completions of the group
    before it, if there are any."""

    row: int
    request: Request
    before: tuple[Completion, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Unfinished:
    """A group of which some samples were cut."""

    row: int
    group: Group
    cut: tuple[int, ...]


class PartialRollouts:
    """The groups that are waiting to be continued.

    Args:
        tokens_per_step: tokens that the policy may add to a completion in one step; None finishes
            every completion in the step that begins it.
    """

    def __init__(self, tokens_per_step: int | None = None) -> None:
        self.tokens_per_step = tokens_per_step
        self._waiting: list[_Unfinished] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def budget(self, sampling: Sampling, *, written: int = 0) -> int | None:
        """Tokens that completions with `written` ones may have after this step; None where nothing
        is cut."""
        if self.tokens_per_step is None:
            return None
        return min(sampling.max_tokens, written + self.tokens_per_step)

    def resumed(self, sampling: Sampling) -> list[RowRequest]:
        """Requests that continue all waiting groups, oldest first; empties the queue."""
        found, self._waiting = sorted(self._waiting, key=lambda one: one.group.stream), []
        return [self._continued(one, sampling) for one in found]

    def _continued(self, unfinished: _Unfinished, sampling: Sampling) -> RowRequest:
        group = unfinished.group
        begun = tuple(group.completions[sample] for sample in unfinished.cut)
        request = Request(
            prompt=group.prompt,
            tokens=group.prompt_tokens,
            group=len(group),
            stream=group.stream,
            samples=unfinished.cut,
            begun=begun,
            budget=self.budget(sampling, written=max(one.own_tokens for one in begun)),
        )
        return RowRequest(unfinished.row, request, group.completions)

    def take(self, asked: RowRequest, group: Group, sampling: Sampling) -> Group | None:
        """The whole group if the engine has finished it; otherwise the group is kept and None
        returned.

        Args:
            group: what the engine has written of the request.
        """
        if asked.before:
            written = dict(zip(group.samples, group.completions, strict=True))
            every = (written.get(n, one) for n, one in enumerate(asked.before))
            group = replace(
                group, completions=tuple(every), samples=tuple(range(len(asked.before)))
            )
        most = asked.request.budget
        cut = tuple(
            sample
            for sample in asked.request.wanted
            if most is not None and _is_cut(group.completions[sample], most, sampling)
        )
        if not cut:
            return group
        self._waiting.append(_Unfinished(row=asked.row, group=group, cut=cut))
        return None

    def state(self) -> list[dict[str, Any]]:
        """Plain values for `restore`."""
        return [
            {
                "row": one.row,
                "stream": list(one.group.stream),
                "cut": list(one.cut),
                "completions": [
                    plain_completion(completion) for completion in one.group.completions
                ],
            }
            for one in self._waiting
        ]

    def restore(
        self,
        state: Sequence[Mapping[str, Any]],
        prompts: Sequence[Prompt],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Restore the waiting groups.

        Args:
            prompts, tokens: the data of the run.
        """
        self._waiting = [
            _Unfinished(
                row=one["row"],
                group=Group(
                    prompt=prompts[one["row"]],
                    prompt_tokens=tokens[one["row"]],
                    completions=tuple(completion_of(plain) for plain in one["completions"]),
                    stream=Stream(*one["stream"]),
                    samples=tuple(range(len(one["completions"]))),
                ),
                cut=tuple(one["cut"]),
            )
            for one in state
        ]


def _is_cut(completion: Completion, budget: int, sampling: Sampling) -> bool:
    """Whether a completion ran out of the budget of its step, and may yet go on. One that also ran
    out of something else gets no token in the next step, and is complete then."""
    return (
        completion.finish == "length"
        and completion.own_tokens >= budget
        and budget < sampling.max_tokens
    )


def plain_completion(completion: Completion) -> dict[str, Any]:
    """A completion as values that checkpoints hold."""
    plain = {field.name: getattr(completion, field.name) for field in fields(completion)}
    plain["values"] = dict(completion.values)
    if completion.support is not None:
        plain["support"] = [torch.tensor(ids, dtype=torch.int32) for ids in completion.support]
    if completion.failure is not None:
        status, message = completion.failure
        plain["failure"] = (status.value, message)
    return plain


def completion_of(plain: Mapping[str, Any]) -> Completion:
    """The completion of which `plain_completion` made this."""
    failure = plain["failure"]
    known = None if failure is None else (Status(failure[0]), failure[1])
    support = plain["support"]
    if support is not None:
        support = tuple(array("i", map(int, ids)) for ids in support)
    return Completion(**{**plain, "failure": known, "support": support})
