"""Checks of requests for every engine, limits on their size, and the queue they are taken from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.rollouts.sampling import truncates
from groupwise.types import Completion, Limits, Request, Requests, Sampling

PAUSES = (0.001, 0.05)
"""The first and the longest pause, in seconds, before an idle engine asks again for a request."""


def check(request: Request, policy: Policy, sampling: Sampling) -> None:
    """Refuse a request that no engine can answer.

    Raises:
        UsageError: no completions requested, an empty prompt, a prompt that fills the context, a
            negative budget, or begun completions that do not match the samples or the sampling.
    """
    if request.group < 1:
        raise UsageError(f"group_size = {request.group}: must be at least 1.")
    where = f"prompt {request.prompt.id}"
    if not len(request.tokens):
        raise UsageError(f"{where}: has no tokens; a prompt must not be empty.")
    if len(request.tokens) >= policy.context:
        raise UsageError(
            f"{where}: has {len(request.tokens)} tokens, and the model's context is "
            f"{policy.context}; set data.max_prompt_tokens so that longer prompts are left out."
        )
    if request.begun and len(request.begun) != len(request.wanted):
        raise UsageError(
            f"{where}: {len(request.begun)} completions are begun and {len(request.wanted)} are "
            "wanted; give one for each, without tokens where nothing is begun."
        )
    if len(set(request.wanted)) < len(request.wanted) or min(request.wanted) < 0:
        raise UsageError(f"{where}: samples = {request.samples}: must be different indices.")
    if request.budget is not None and request.budget < 0:
        raise UsageError(f"{where}: budget = {request.budget}: must not be negative.")
    for begun in request.begun:
        _check_begun(begun, sampling, where=where)


def _check_begun(begun: Completion, sampling: Sampling, *, where: str) -> None:
    """Refuse a begun completion whose parts do not belong to the same tokens."""
    count, support = len(begun.tokens), begun.support
    for name, values in (("mask", begun.mask), ("logprobs", begun.logprobs), ("support", support)):
        if values is not None and len(values) != count:
            raise UsageError(
                f"{where}: {name} of a begun completion has {len(values)} entries for {count} "
                "tokens; give one for each token, injected ones included."
            )
    if truncates(sampling) and support is None and any(begun.mask):
        raise UsageError(
            f"{where}: a begun completion was drawn from the whole vocabulary, but would be "
            "continued by truncated sampling; use the same top_k, top_p and min_p for all of it."
        )


def budget(
    request: Request, policy: Policy, sampling: Sampling, begun: Completion | None = None
) -> int:
    """Tokens that a completion may have, injected ones included: what was asked for, or what the
    context leaves."""
    injected = 0 if begun is None else len(begun.tokens) - begun.own_tokens
    return places(request, policy, sampling, injected=injected)


def places(request: Request, policy: Policy, sampling: Sampling, *, injected: int) -> int:
    """Tokens that a completion with `injected` injected tokens may have."""
    own = sampling.max_tokens if request.budget is None else request.budget
    return min(own + injected, policy.context - len(request.tokens))


def within_turn(most: int, sampling: Sampling, *, since: int) -> int:
    """Tokens that a completion may have before its next reply, out of `most` altogether.

    Args:
        since: where its turn began.
    """
    return min(most, since + sampling.max_turn_tokens) if sampling.max_turn_tokens else most


def slots_for(*, max_rows: int, group: int, prompts: int) -> int:
    """Prompts to hold at the same time: twice those that full groups need, because prompts whose
    last completions are long keep few rows, and others may enter. A group of one has no last
    completion that others wait for."""
    needed = max(max_rows, group) // group
    return min(prompts, needed if group == 1 else 2 * needed)


def limits_of(
    requests: Sequence[Request], policy: Policy, sampling: Sampling, *, max_rows: int
) -> Limits:
    """The limits of requests that are all known."""
    group = max(len(request.wanted) for request in requests)
    return Limits(
        prompt=max(len(request.tokens) for request in requests),
        group=group,
        suffix=max(
            # What is begun may be longer already, and is then at its end.
            max(budget(request, policy, sampling, begun), len(begun.tokens) if begun else 0)
            for request in requests
            for begun in request.begun or (None,)
        ),
        slots=slots_for(max_rows=max_rows, group=group, prompts=len(requests)),
    )


class RequestQueue:
    """Takes requests from an iterable, one ahead of those that are used.

    Args:
        requests: None among them means that there is none at the moment.
        policy: of the engine.
        sampling: how they will be drawn.
        limits: of every request; None reads all of them first.
        max_rows: completions written at the same time.

    Raises:
        UsageError: a request that no engine can answer, or one beyond the limits.
    """

    def __init__(
        self,
        requests: Requests,
        policy: Policy,
        sampling: Sampling,
        limits: Limits | None,
        *,
        max_rows: int,
    ) -> None:
        self.policy, self.sampling = policy, sampling
        if limits is None:
            known = [request for request in requests if request is not None]
            for request in known:
                check(request, policy, sampling)
            if known:
                limits = limits_of(known, policy, sampling, max_rows=max_rows)
            requests = known
        self.limits = limits
        self._source: Iterator[Request | None] = iter(requests)
        self._next: Request | None = None
        self._over = False

    @property
    def over(self) -> bool:
        """Whether there will be no other request."""
        return self._over and self._next is None

    def peek(self, *, idle: bool = False) -> Request | None:
        """The next request; None where there is none, or none at the moment.

        Args:
            idle: wait until there is one or the iterable has ended.
        """
        pause, longest = PAUSES
        while self._next is None and not self._over:
            try:
                self._next = next(self._source)
            except StopIteration:
                self._over = True
                break
            if self._next is not None:
                self._check(self._next)
            elif not idle:
                break
            else:
                time.sleep(pause)
                pause = min(2 * pause, longest)
        return self._next

    def pop(self) -> Request:
        """Use the request that `peek` found."""
        request, self._next = self._next, None
        assert request is not None
        return request

    def _check(self, request: Request) -> None:
        check(request, self.policy, self.sampling)
        assert self.limits is not None
        found = limits_of([request], self.policy, self.sampling, max_rows=1)
        for name in ("prompt", "group", "suffix"):
            size, limit = getattr(found, name), getattr(self.limits, name)
            if size > limit:
                raise UsageError(
                    f"prompt {request.prompt.id}: {name} = {size}: is beyond the stated limit of "
                    f"{limit}."
                )
