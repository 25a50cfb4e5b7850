"""Known sequences, scored on both sides: does the sampler compute with the learner's weights?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.models import Policy
from groupwise.rollouts.engines.vllm.base import UNTRUNCATED, CompletionRequest, Sampler
from groupwise.types import Group

COUNT = 4
LENGTH = 128
"""So many sequences, each cut to so many tokens."""
FIRST, PRIME = 32, 7919
"""The first sequences have so many tokens, which lie so far apart in the vocabulary."""
NEXT_TEMPERATURE = 2.0
"""Of the tokens drawn after each sequence: away from 1, so that log-probabilities which leave the
temperature out are found; a server allows no more."""


class Canary:
    """What both sides are compared on: at first tokens from all over the vocabulary, then the
    newest completions.

    Args:
        policy: the learner's side.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        size = len(policy.tokenizer)
        self.sequences = [
            [((row * FIRST + place + 1) * PRIME) % size for place in range(FIRST)]
            for row in range(COUNT)
        ]

    def remember(self, group: Group) -> None:
        """Compare on the first completion of this group from now on, instead of an older one."""
        written = [*group.prompt_tokens, *group.completions[0].tokens]
        tokens = [int(token) for token in written][:LENGTH]
        if len(tokens) > 1:
            self.sequences = [tokens, *self.sequences[: COUNT - 1]]

    def gap(self, sampler: Sampler) -> float:
        """The mean difference of the log-probabilities of the same tokens, in nats.

        The larger one of two: over the tokens of the sequences, which the sampler computes anew,
        and over one more token that it draws after each of them, for which it uses what its prefix
        cache holds. Infinite where a side gives no number.
        """
        # One more token must fit.
        sequences = [tokens[: sampler.context - 1] for tokens in self.sequences]
        asks = [
            CompletionRequest(
                tokens=tokens,
                params={**UNTRUNCATED, **one, "n": 1, "max_tokens": 1, "logprobs": 0, "seed": 0},
            )
            for tokens in sequences
            for one in (
                {"temperature": 1.0, "prompt_logprobs": 0},
                {"temperature": NEXT_TEMPERATURE},
            )
        ]
        answers = dict(sampler.answer(asks))
        scored, drawn = [], []
        for row, (tokens, logits) in enumerate(
            zip(sequences, self._logits(sequences), strict=True)
        ):
            ours = _at(logits[:-1].log_softmax(-1), tokens[1:])
            scored += _differences(ours, answers[2 * row].prompt_logprobs)
            following = answers[2 * row + 1].written[0]
            ours = _at((logits[-1:] / NEXT_TEMPERATURE).log_softmax(-1), following.tokens[:1])
            drawn += _differences(ours, following.logprobs[:1])
        return max(fmean(scored), fmean(drawn))

    @torch.no_grad()
    def _logits(self, sequences: Sequence[list[int]]) -> Iterator[Float[Tensor, "time vocab"]]:
        """The learner's logits after every token, one sequence after the other."""
        model: Any = self.policy.model
        device = model.get_input_embeddings().weight.device
        training = model.training
        model.eval()
        try:
            for tokens in sequences:
                ids = torch.tensor([tokens], device=device)
                yield model(ids, use_cache=False).logits[0].float()
        finally:
            model.train(training)


def _at(logp: Float[Tensor, "time vocab"], tokens: Sequence[int]) -> list[float]:
    return logp.gather(1, torch.tensor(tokens, device=logp.device)[:, None]).squeeze(1).tolist()


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """|ours − theirs| for each token; infinite where one is missing or no number."""
    if len(ours) != len(theirs):
        return [math.inf]
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]
