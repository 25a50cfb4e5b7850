"""Converts requests of a rollout to requests of vLLM, and its answers to groups."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from groupwise.errors import RunError
from groupwise.models import Policy
from groupwise.rollouts.engines.vllm.base import (
    UNTRUNCATED,
    Answer,
    CompletionOutput,
    CompletionRequest,
    EngineUnavailable,
)
from groupwise.rollouts.limits import RequestQueue
from groupwise.rollouts.rows import Row, completions_of, rows_of
from groupwise.rollouts.text import Ending
from groupwise.types import Group, Request, Sampling


@dataclass(kw_only=True, eq=False)
class _Open:
    """A request with its rows, and what vLLM has written of each; None where it has not."""

    request: Request
    rows: list[Row]
    written: list[CompletionOutput | None]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows of a request that are sent to vLLM in one `CompletionRequest`."""

    of: _Open
    rows: range
    ask: CompletionRequest


class OpenRequests:
    """The requests in progress. A question to vLLM that was not answered is sent again with the
    same seed.

    Args:
        policy: model and tokenizer.
        sampling: how all completions are drawn.
    """

    def __init__(self, policy: Policy, sampling: Sampling) -> None:
        self.policy, self.sampling = policy, sampling
        self.ending = Ending(policy, sampling, device=torch.device("cpu"))
        self._open: list[_Open] = []
        self._unasked: deque[_Part] = deque()
        self._asked: dict[int, _Part] = {}

    @property
    def open(self) -> int:
        """How many requests have no group yet."""
        return len(self._open)

    def asks(
        self, queue: RequestQueue, *, version: Callable[[], int]
    ) -> Iterator[CompletionRequest | None]:
        """Yield questions to vLLM, numbered from 0 for `take`, until the requests end; None if
        there is none at the moment.

        Args:
            queue: of requests.
            version: of the weights that answers are written with.
        """
        self._unasked = deque([*self._asked.values(), *self._unasked])
        self._asked, count = {}, 0
        while True:
            if not self._unasked:
                request = queue.peek(idle=not self._open)
                if request is not None:
                    self._add(queue.pop(), version())
                elif queue.over or not self._asked:
                    return
                else:
                    yield None
                    continue
            while self._unasked:
                self._asked[count] = part = self._unasked.popleft()
                count += 1
                yield part.ask

    def take(self, index: int, answer: Answer) -> None:
        """Note what vLLM has answered to question `index`."""
        part = self._asked.pop(index)
        written = answer.written * (len(part.rows) // len(answer.written))
        for row, one in zip(part.rows, written, strict=True):
            part.of.written[row] = one

    def finished(self) -> list[Group]:
        """The groups that are complete."""
        done = [
            each
            for each in self._open
            if all(
                row.ended or one is not None
                for row, one in zip(each.rows, each.written, strict=True)
            )
        ]
        self._open = [each for each in self._open if each not in done]
        return [self._group(each) for each in done]

    def _add(self, request: Request, version: int) -> None:
        rows = rows_of(request, self.policy, self.sampling, version=version)
        each = _Open(request=request, rows=rows, written=[None] * len(rows))
        self._open.append(each)
        first = request.wanted[0]
        if not request.begun and request.wanted == tuple(range(first, first + len(rows))):
            spans = [range(len(rows))]
        else:
            spans = [range(n, n + 1) for n, row in enumerate(rows) if row.ended is None]
        for span in spans:
            self._unasked.append(_Part(of=each, rows=span, ask=self._ask(request, rows, span)))

    def _ask(self, request: Request, rows: list[Row], span: range) -> CompletionRequest:
        row, sampling = rows[span[0]], self.sampling
        params: dict[str, Any] = {
            **UNTRUNCATED,
            # vLLM refuses several greedy samples of one prompt.
            "n": 1 if sampling.temperature == 0 else len(span),
            "seed": _seed(request, request.wanted[span[0]], len(row.given)),
            "max_tokens": row.places - len(row.given),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(self.policy.end_tokens),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logprobs": 0,
        }
        return CompletionRequest(tokens=[*request.tokens, *row.given], params=params)

    def _group(self, each: _Open) -> Group:
        tokens, logprobs, stopped = [], [], []
        for row, one in zip(each.rows, each.written, strict=True):
            ids, logp = row.given, list(row.begun.logprobs)
            ended = row.ended == "stop"
            if one is not None:
                end = self._end(row, one)
                ids, logp = [*ids, *one.tokens[:end]], [*logp, *one.logprobs[:end]]
                ended = end is not None
            tokens.append(ids)
            logprobs.append(logp)
            stopped.append(ended)
        return Group(
            prompt=each.request.prompt,
            prompt_tokens=each.request.tokens,
            completions=completions_of(self.policy, each.rows, tokens, logprobs, stopped=stopped),
            stream=each.request.stream,
            samples=each.request.wanted,
        )

    def _end(self, row: Row, written: CompletionOutput) -> int | None:
        """The number of new tokens up to the first end by groupwise's rules; None without an end.

        Raises:
            RunError: vLLM ended the completion at a token that does not end it.
            EngineUnavailable: it was aborted.
        """
        first = len(row.given)
        tokens = torch.tensor([*row.given, *written.tokens])
        places = torch.arange(first, len(tokens))
        since = {0: row.since}
        ended = self.ending(
            tokens[first:], tokens[None], torch.zeros_like(places), places, since
        ).nonzero()
        if len(ended):
            return int(ended[0]) + 1
        if written.finish == "stop":
            raise RunError(
                f"engine.name = 'vllm': ended a completion after token {written.tokens[-1:]}, "
                "which is not an end token of the model and does not complete a stop string; start "
                "the server with --generation-config vllm."
            )
        if written.finish != "length":
            raise EngineUnavailable(
                f"engine.name = 'vllm': aborted a completion ({written.finish})."
            )
        return None


def _seed(request: Request, sample: int, begun: int) -> int:
    """The seed of vLLM's own random numbers from a position of a sample on.

    For whole completions vLLM adds the index of each sample itself, so a group can be asked for in
    pieces. A continuation has a seed of its own.
    """
    name = [*map(str, request.stream), request.prompt.id]
    if begun:
        name += [str(sample), str(begun)]
    key = hashlib.blake2b("\x1f".join(name).encode(), digest_size=7).digest()
    return int.from_bytes(key, "little") + (0 if begun else sample)
