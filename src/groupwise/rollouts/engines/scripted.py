"""An engine with scripted answers, for tests of groupwise and of code that builds on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from groupwise.rollouts.limits import PAUSES
from groupwise.rollouts.rows import EMPTY
from groupwise.types import (
    Completion,
    Group,
    Limits,
    Metrics,
    Prompt,
    Request,
    Requests,
    Sampling,
    WeightsRef,
)


class ScriptedEngine:
    """An engine whose completions come from a function instead of a model.

    Args:
        answer: from a prompt and a sample's index to the text of the completion.
        encode: from a text to token ids; one token per UTF-8 byte by default.

    Example:
        >>> from groupwise.types import Prompt, Request, Sampling, WeightsRef
        >>> engine = ScriptedEngine(lambda prompt, sample: f"{prompt.text}{sample}")
        >>> request = Request(prompt=Prompt(id="a", text="x"), tokens=[1], group=2)
        >>> [c.text for c in next(engine.generate([request], Sampling())).completions]
        ['x0', 'x1']
    """

    def __init__(
        self,
        answer: Callable[[Prompt, int], str],
        *,
        encode: Callable[[str], Sequence[int]] = lambda text: list(text.encode()),
    ) -> None:
        self.answer, self.encode, self.version = answer, encode, 0

    @property
    def exact_continuation(self) -> bool:
        return True

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield the groups in the order asked for; texts longer than the budget are cut, with
        finish "length"."""
        for request in requests:
            if request is None:
                time.sleep(PAUSES[0])
                continue
            begun = request.begun or (EMPTY,) * len(request.wanted)
            yield Group(
                prompt=request.prompt,
                prompt_tokens=request.tokens,
                completions=tuple(
                    self._complete(request, sample, sampling, there)
                    for sample, there in zip(request.wanted, begun, strict=True)
                ),
                stream=request.stream,
                samples=request.wanted,
            )

    def _complete(
        self, request: Request, sample: int, sampling: Sampling, begun: Completion
    ) -> Completion:
        """The rest of the answer after the begun tokens, not counting injected ones."""
        text = self.answer(request.prompt, sample)
        most = sampling.max_tokens if request.budget is None else request.budget
        ids = list(self.encode(text))
        whole, new = len(ids) <= most, ids[begun.own_tokens : most]
        versions = begun.versions if begun.tokens else ((0, self.version),)
        if new and versions[-1][1] != self.version:
            versions = (*versions, (len(begun.tokens), self.version))
        return Completion(
            tokens=[*begun.tokens, *new],
            mask=[*begun.mask, *[True] * len(new)],
            logprobs=[*begun.logprobs, *[0.0] * len(new)],
            text=text,
            finish="stop" if whole else "length",
            versions=versions,
        )

    def publish(self, weights: WeightsRef) -> Metrics:
        """Stamp what follows with the new version."""
        self.version = weights.version
        return {}

    def close(self) -> None:
        """Nothing is held."""
