"""The engine for models that do not support grouped attention: `generate` of `transformers`, with
keyed random streams.

It is slower (the prompt is computed for every completion and the batch waits for its longest row)
but makes no assumptions about the model. A logits processor draws the tokens, so the random streams
and log-probabilities are those of the group engine. A begun completion is continued as a longer
prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from groupwise.errors import ModelError
from groupwise.models import Backbone, Policy
from groupwise.models.backbone import rounding_limit
from groupwise.rollouts.limits import RequestQueue
from groupwise.rollouts.rows import Row, completions_of, rows_of
from groupwise.rollouts.sampling import draw, kept_ids
from groupwise.rollouts.streams import uniforms
from groupwise.rollouts.text import Ending
from groupwise.types import Group, Limits, Metrics, Request, Requests, Sampling, WeightsRef


@dataclass(kw_only=True)
class _Draft:
    """A row to generate, with what has been generated so far.

    Attributes:
        prompt: its tokens.
        uniform: a random number for every place.
    """

    row: Row
    prompt: list[int]
    uniform: Float64[Tensor, "places"]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


class GenerateEngine:
    """Rollouts through `model.generate`, several prompts at a time, padded on the left.

    Args:
        policy: model and tokenizer.
        max_rows: completions written at the same time.

    Raises:
        ModelError: the log-probabilities of generated tokens differ from those of a forward pass
            over the whole sequence.
    """

    exact_continuation = False

    def __init__(self, policy: Policy, *, max_rows: int = 128) -> None:
        check_generation(policy)
        self.policy, self.max_rows, self.version = policy, max_rows, 0

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield groups in the order asked for, a batch of them at a time."""
        queue = RequestQueue(requests, self.policy, sampling, limits, max_rows=self.max_rows)
        while (request := queue.peek(idle=True)) is not None:
            batch, rows = [], 0
            while request is not None:
                rows += len(request.wanted)
                if batch and rows > self.max_rows:
                    break
                batch.append(queue.pop())
                request = queue.peek()
            yield from self._batch(batch, sampling)

    def _batch(self, requests: list[Request], sampling: Sampling) -> list[Group]:
        """The groups of some requests. Rows with the same number of tokens left run together, so
        that no prompt shortens the answers to another."""
        drafts = [self._drafts(request, sampling) for request in requests]
        together: dict[int, list[_Draft]] = {}
        for draft in (draft for group in drafts for draft in group):
            if draft.row.ended is None:
                left = draft.row.places - len(draft.tokens)
                together.setdefault(left, []).append(draft)
        model = self.policy.model
        training = model.training
        model.eval()
        try:
            for left, rows in together.items():
                self._write(rows, sampling, left=left)
        finally:
            model.train(training)
        return [
            Group(
                prompt=request.prompt,
                prompt_tokens=request.tokens,
                completions=completions_of(
                    self.policy,
                    [draft.row for draft in group],
                    [draft.tokens for draft in group],
                    [draft.logprobs for draft in group],
                    stopped=[draft.stopped for draft in group],
                ),
                stream=request.stream,
                samples=request.wanted,
            )
            for request, group in zip(requests, drafts, strict=True)
        ]

    def _drafts(self, request: Request, sampling: Sampling) -> list[_Draft]:
        rows = rows_of(request, self.policy, sampling, version=self.version)
        random = uniforms(request, max(row.places for row in rows))
        return [
            _Draft(
                row=row,
                prompt=list(request.tokens),
                uniform=uniform,
                tokens=row.given,
                logprobs=list(row.begun.logprobs),
                stopped=row.ended == "stop",
            )
            for row, uniform in zip(rows, random, strict=True)
        ]

    @torch.inference_mode()
    def _write(self, drafts: list[_Draft], sampling: Sampling, *, left: int) -> None:
        """Add up to `left` tokens to each draft."""
        model, tokenizer = Backbone.of(self.policy.model).model, self.policy.tokenizer
        device = model.get_input_embeddings().weight.device
        rows = [[*draft.prompt, *draft.tokens] for draft in drafts]
        longest = max(len(row) for row in rows)
        pad = int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device
        )
        drawing = _Drawing(drafts, sampling, longest=longest, left=left, device=device)
        ending = _Stops(Ending(self.policy, sampling, device=device), drafts, longest=longest)
        settings = GenerationConfig(
            max_new_tokens=left,
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
        logp = torch.stack(drawing.logp, 1)
        for place, draft in enumerate(drafts):
            draft.stopped = bool(ending.stopped[place])
            count = int(ending.length[place]) if draft.stopped else out.shape[1] - longest
            draft.tokens = [*draft.tokens, *out[place, longest : longest + count].tolist()]
            draft.logprobs += logp[place, :count].tolist()
            draft.row.support += [kept[place] for kept in drawing.support[:count]]

    def publish(self, weights: WeightsRef) -> Metrics:
        """Stamp what follows with the new version; the tensors are shared with the learner."""
        self.version = weights.version
        return {}

    def close(self) -> None:
        """No resources are kept between calls."""


@torch.no_grad()
def check_generation(policy: Policy) -> None:
    """Check that the model generates from the distribution that the learner computes.

    Generates a few tokens from two prompts, padded on the left and with the cache of the model, and
    compares their log-probabilities with those of the whole sequences, padded on the right. They
    differ where a model is not causal, or takes padding for tokens.

    Raises:
        ModelError: they differ by more than rounding.
    """
    model = Backbone.of(policy.model).model
    lengths, left = (11, 5), 3  # tokens of the prompts, and tokens to generate
    longest, short = lengths
    base = model.config.get_text_config()
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(2 * longest, device=device).view(2, -1) % base.vocab_size
    mask = torch.ones_like(ids)
    mask[1, : longest - short] = 0
    settings = GenerationConfig(
        max_new_tokens=left,
        do_sample=False,
        pad_token_id=policy.tokenizer.pad_token_id,  # pyright: ignore[reportArgumentType]
        output_logits=True,
        return_dict_in_generate=True,
    )
    training = model.training
    model.eval()
    try:
        with _without_defaults(model):
            out = model.generate(ids, attention_mask=mask, generation_config=settings)
        whole, seen = out.sequences.clone(), torch.ones_like(out.sequences)
        whole[1] = whole[1].roll(short - longest)
        seen[1, short + left :] = 0
        read = model(whole, attention_mask=seen, use_cache=False).logits.float()
    finally:
        model.train(training)
    sampled = torch.stack(out.logits, 1).float().log_softmax(-1)
    scored = torch.stack([read[row, n - 1 : n - 1 + left] for row, n in enumerate(lengths)])
    gap = (sampled - scored.log_softmax(-1)).abs().max().item()
    limit = rounding_limit(model)
    if not gap <= limit:
        raise ModelError(
            f"model: the log-probabilities of generated tokens differ by {gap:.2g} from those of "
            f"the same tokens in a forward pass (limit {limit}), so a run would learn from another "
            "distribution than it samples; the model is not causal, or takes padding for tokens."
        )


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Context without the model's own generation settings: transformers takes unset arguments from
    them, and a repetition penalty there would change the sampled distribution.
    """
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


class _Drawing(LogitsProcessor):
    """Draws each row's token from its own stream and masks all others."""

    def __init__(
        self,
        drafts: list[_Draft],
        sampling: Sampling,
        *,
        longest: int,
        left: int,
        device: torch.device,
    ) -> None:
        spans = [(draft.uniform, len(draft.tokens)) for draft in drafts]
        streams = [uniform[first : first + left] for uniform, first in spans]
        self.uniform = torch.stack(streams).to(device)
        self.sampling, self.longest = sampling, longest
        self.logp: list[Tensor] = []
        self.support: list[list[array[int]]] = []

    def __call__(
        self, input_ids: Tensor, scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        uniform = self.uniform[:, input_ids.shape[1] - self.longest]
        drawn = draw(scores, uniform, self.sampling)
        self.logp.append(drawn.logp.double())
        if drawn.support is not None:
            self.support.append(kept_ids(drawn.support))
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn.tokens[:, None], 0.0)


class _Stops(StoppingCriteria):
    """Ends rows at end tokens and stop strings, and records where."""

    def __init__(self, ending: Ending, drafts: list[_Draft], *, longest: int) -> None:
        self.ending, self.longest = ending, longest
        # The first token, counted with the prompt on the left, of which a stop may consist.
        self.since = {
            place: longest - len(draft.tokens) + draft.row.since
            for place, draft in enumerate(drafts)
        }
        self.stopped = torch.zeros(len(drafts), dtype=torch.bool)
        self.length = torch.zeros(len(drafts), dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        device, time = input_ids.device, input_ids.shape[1]
        self.stopped, self.length = self.stopped.to(device), self.length.to(device)
        self.length = torch.where(self.stopped, self.length, time - self.longest)
        rows = torch.arange(len(input_ids), device=device)
        last = torch.full_like(rows, time - 1)
        self.stopped |= self.ending(input_ids[:, -1], input_ids, rows, last, self.since)
        return self.stopped
