"""Known sequences, scored by sampler and learner, to check that the sampler has the learner's
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.errors import RunError
from groupwise.models import Policy
from groupwise.rollouts.engines.vllm.base import UNTRUNCATED, CompletionRequest, Sampler
from groupwise.types import Group

FIXED, NEWEST = 2, 4
"""Sequences that stay the same for the whole run, and sequences of the newest completions."""
LENGTH = 288
"""Tokens of each sequence, shorter ones repeated: more than two blocks of a prefix cache, which
have 16 tokens on a card and 128 on a CPU."""
PRIME = 7919
"""Distance between the token ids of the fixed sequences."""
NEXT_TEMPERATURE = 2.0
"""Temperature of the token drawn after each sequence. It is not 1, so that log-probabilities that
ignore the temperature are detected; the OpenAI API allows at most this value."""
GROWTH, FLOOR = 10.0, 1e-4
"""The gap may grow to `GROWTH` times the gap of weights known to have arrived, or to `FLOOR`
nats."""
ARRIVED = 0.5
"""The least share of the learner's movement that the sampler must have followed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both sides' log-probabilities of the same tokens.

    Attributes:
        gap: the larger of two mean differences, in nats: over the tokens of the sequences, which
            the sampler computes anew, and over one more token that it draws after each of them, for
            which it uses what its prefix cache holds. Infinite where a side gives no number.
        ours, theirs: of the tokens of the fixed sequences, by learner and sampler.
    """

    gap: float
    ours: Float[Tensor, "tokens"]
    theirs: Float[Tensor, "tokens"]


class Canary:
    """What both sides are compared on: fixed tokens from all over the vocabulary, and the newest
    completions.

    Args:
        policy: the learner's side.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        size = len(policy.tokenizer)
        self.fixed = [
            [((row * LENGTH + place + 1) * PRIME) % size for place in range(LENGTH)]
            for row in range(FIXED)
        ]
        self.newest: list[list[int]] = []
        self._usual = 0.0
        self._anchor: Comparison | None = None

    def remember(self, group: Group) -> None:
        """Compare on the first completion of this group from now on, instead of an older one."""
        written = [*group.prompt_tokens, *group.completions[0].tokens]
        tokens = list(islice(cycle(int(token) for token in written), LENGTH))
        if tokens:
            self.newest = [tokens, *self.newest[: NEWEST - 1]]

    def check_learner(self) -> None:
        """Check that the learner's weights give finite logits before the sampler receives them.

        Raises:
            RunError: the logits are NaN or infinite.
        """
        if not all(bool(logits.isfinite().all()) for logits in self._logits(self.fixed)):
            raise RunError(
                "model: the policy's weights compute NaN or infinite logits, so nothing can be "
                "sampled from them; they were not given to vLLM. Resume from a checkpoint with a "
                "lower optimizer.learning_rate."
            )

    def gap(self, sampler: Sampler) -> float:
        """The mean difference of the log-probabilities of the same tokens, in nats."""
        return self.compare(sampler).gap

    def compare(self, sampler: Sampler) -> Comparison:
        """Score all sequences on both sides."""
        # One more token must fit.
        sequences = [tokens[: sampler.context - 1] for tokens in (*self.fixed, *self.newest)]
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
        known: tuple[list[float], list[float]] = ([], [])
        for row, (tokens, logits) in enumerate(
            zip(sequences, self._logits(sequences), strict=True)
        ):
            ours = _at(logits[:-1].log_softmax(-1), tokens[1:])
            theirs = answers[2 * row].prompt_logprobs
            scored += _differences(ours, theirs)
            if row < FIXED:
                known[0].extend(ours)
                known[1].extend(theirs)
            following = answers[2 * row + 1].written[0]
            ours = _at((logits[-1:] / NEXT_TEMPERATURE).log_softmax(-1), following.tokens[:1])
            drawn += _differences(ours, following.logprobs[:1])
        ours, theirs = (torch.tensor(side, dtype=torch.float64) for side in known)
        return Comparison(gap=max(fmean(scored), fmean(drawn)), ours=ours, theirs=theirs)

    def settle(self, found: Comparison) -> None:
        """Record a comparison as one of weights that have arrived."""
        self._usual = max(self._usual, found.gap)
        self._anchor = found

    def problem(self, found: Comparison) -> str | None:
        """What is wrong with a comparison, given the earlier ones; None if nothing is.

        The weights are stale where the sampler has not followed the learner: of what the learner's
        log-probabilities moved since the weights last were seen to arrive, d, the sampler's moved
        ⟨s, d⟩/⟨d, d⟩, which is 1 up to rounding. While d is smaller than the difference between
        both sides, nothing can be said, and d grows over the updates.
        """
        anchor = self._anchor
        if anchor is None:
            self.settle(found)
            return None
        limit = max(FLOOR, GROWTH * self._usual)
        if found.gap > limit:
            return (
                f"differ from the learner's by {found.gap:.3g} nats on average, and by "
                f"{self._usual:.3g} when weights are known to have arrived"
            )
        moved = found.ours - anchor.ours
        if moved.square().mean() <= (anchor.theirs - anchor.ours).square().mean():
            return None
        followed = float((found.theirs - anchor.theirs) @ moved / (moved @ moved))
        if followed < ARRIVED:
            return f"followed {max(followed, 0.0):.0%} of the learner's movement"
        self._anchor = found
        return None

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
    """|ours − theirs| for each token; infinite where one is missing or not finite."""
    if len(ours) != len(theirs):
        return [math.inf]
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return [math.inf if math.isnan(gap) else gap for gap in gaps]
