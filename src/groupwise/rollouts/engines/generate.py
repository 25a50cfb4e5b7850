"""The engine for models that cannot be attended group by group: `transformers`' own `generate`,
with our streams.

Slower (the prompt is computed G times and the batch waits for its longest row) but bound to no
assumption about the model. A logits processor does the drawing, so the random streams and
log-probabilities are the same as the group engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from groupwise.models import Backbone, Policy
from groupwise.rollouts.limits import budget, check
from groupwise.rollouts.sampling import draw
from groupwise.rollouts.streams import uniforms
from groupwise.rollouts.text import Ending, completions_of
from groupwise.types import Group, Metrics, Request, Sampling, WeightsRef


class GenerateEngine:
    """Rollouts through `model.generate`, several prompts at a time, padded on the left."""

    def __init__(self, policy: Policy, *, max_rows: int = 128) -> None:
        self.policy, self.max_rows, self.version = policy, max_rows, 0

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield groups in the order asked for, a batch of them at a time."""
        wanted = list(requests)
        for request in wanted:
            check(request, self.policy)
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            while wanted:
                batch = self._first(wanted, sampling)
                wanted = wanted[len(batch) :]
                yield from self._batch(batch, sampling)
        finally:
            self.policy.model.train(training)

    def _first(self, wanted: list[Request], sampling: Sampling) -> list[Request]:
        """The next requests of one batch: as many as fit, and all with the same budget, so that no
        prompt shortens the answers to another."""
        room, rows = budget(wanted[0], self.policy, sampling), 0
        for count, request in enumerate(wanted):
            rows += request.group
            if count and (rows > self.max_rows or budget(request, self.policy, sampling) != room):
                return wanted[:count]
        return wanted

    @torch.inference_mode()
    def _batch(self, requests: list[Request], sampling: Sampling) -> list[Group]:
        model, tokenizer = Backbone.of(self.policy.model).model, self.policy.tokenizer
        device = model.get_input_embeddings().weight.device
        rows = [list(request.tokens) for request in requests for _ in range(request.group)]
        longest = max(len(row) for row in rows)
        pad = int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
        )
        drawing = _Drawing(requests, sampling, prompt=longest, device=device)
        ending = _Stops(Ending(self.policy, sampling, device=device), prompt=longest)
        settings = GenerationConfig(
            max_new_tokens=budget(requests[0], self.policy, sampling),
            do_sample=False,
            eos_token_id=sorted(self.policy.end_tokens),
            pad_token_id=pad,
        )
        with _without_defaults(model):
            out = model.generate(
                ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([drawing]),
                stopping_criteria=StoppingCriteriaList([ending]),
            )
        return self._groups(requests, out[:, longest:], drawing, ending)

    def _groups(
        self,
        requests: list[Request],
        out: Int[Tensor, "rows time"],
        drawing: _Drawing,
        ending: _Stops,
    ) -> list[Group]:
        groups, row = [], 0
        logp = torch.stack(drawing.logp, 1)
        for request in requests:
            span = range(row, row + request.group)
            row = span.stop
            lengths = [int(ending.length[r]) if ending.stopped[r] else out.shape[1] for r in span]
            sets = [[step[r].nonzero().squeeze(-1) for step in drawing.kept] for r in span]
            completions = completions_of(
                self.policy,
                [out[r, :n].tolist() for r, n in zip(span, lengths, strict=True)],
                [logp[r, :n].tolist() for r, n in zip(span, lengths, strict=True)],
                stopped=[bool(ending.stopped[r]) for r in span],
                version=self.version,
                kept=[k[:n] or None for k, n in zip(sets, lengths, strict=True)],
            )
            groups.append(
                Group(
                    prompt=request.prompt,
                    prompt_tokens=request.tokens,
                    completions=completions,
                    stream=request.stream,
                )
            )
        return groups

    def publish(self, weights: WeightsRef) -> Metrics:
        """Stamp what follows with the new version; the tensors are shared with the learner."""
        self.version = weights.version
        return {}

    def close(self) -> None:
        """Nothing is held between calls."""


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Inside, the model has no settings of generation of its own: transformers fills up what is not
    given from them, and a repetition penalty there would change what is sampled from."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class _Drawing(LogitsProcessor):
    """Draws each row's token from its own stream and leaves it as the only possible one."""

    def __init__(
        self, requests: list[Request], sampling: Sampling, *, prompt: int, device: torch.device
    ) -> None:
        streams = [uniforms(request, sampling.max_tokens) for request in requests]
        self.uniform = torch.cat(streams).to(device)
        self.sampling, self.prompt = sampling, prompt
        self.logp: list[Tensor] = []
        self.kept: list[Tensor] = []

    def __call__(
        self, input_ids: Tensor, scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        drawn = draw(scores, self.uniform[:, input_ids.shape[1] - self.prompt], self.sampling)
        self.logp.append(drawn.logp.double())
        if drawn.kept is not None:
            self.kept.append(drawn.kept)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn.tokens[:, None], 0.0)


class _Stops(StoppingCriteria):
    """Ends rows at end tokens and stop strings, and remembers where."""

    def __init__(self, ending: Ending, *, prompt: int) -> None:
        self.ending, self.prompt = ending, prompt
        self.stopped = torch.zeros(0, dtype=torch.bool)
        self.length = torch.zeros(0, dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        tokens = input_ids[:, self.prompt :]
        if not len(self.stopped):
            self.stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            self.length = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        self.length = torch.where(self.stopped, self.length, tokens.shape[1])
        rows = torch.arange(len(tokens), device=tokens.device)
        last = torch.full_like(rows, tokens.shape[1] - 1)
        self.stopped |= self.ending(tokens[:, -1], tokens, rows, last)
        return self.stopped
