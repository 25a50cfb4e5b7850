"""Where a completion ends, and what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from groupwise.models import Policy
from groupwise.types import Completion, Sampling


class Ending:
    """Tells which rows have just ended: with an end token, or because a stop string is complete.

    Stop strings are looked for in the decoded tail of a completion, since one may straddle tokens.
    """

    def __init__(self, policy: Policy, sampling: Sampling, *, device: torch.device) -> None:
        self.tokenizer = policy.tokenizer
        self.ends = torch.tensor(sorted(policy.end_tokens), device=device)
        self.stop = sampling.stop
        # A token adds at least one byte, so a tail of as many tokens as the longest stop string has
        # bytes holds it whole.
        self.tail = max((len(text.encode()) for text in self.stop), default=0) + 1

    def __call__(
        self,
        latest: Int[Tensor, "rows"],
        tokens: Int[Tensor, "all time"],
        rows: Int[Tensor, "rows"],
        place: Int[Tensor, "rows"],
    ) -> Bool[Tensor, "rows"]:
        """Whether the token at `tokens[rows, place]`, which is `latest`, ends its row."""
        ended = latest == self.ends[0] if len(self.ends) == 1 else torch.isin(latest, self.ends)
        if self.stop:
            spans = zip(rows.tolist(), place.tolist(), strict=True)
            tails = [tokens[row, max(0, n + 1 - self.tail) : n + 1].tolist() for row, n in spans]
            texts = decode_all(self.tokenizer, tails)
            found = [any(stop in text for stop in self.stop) for text in texts]
            ended = ended | torch.tensor(found, device=ended.device)
        return ended


def decode_all(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Texts with special tokens kept: a tag may be one, and dropping it would make every reward 0
    in silence."""
    decode = tokenizer.batch_decode
    return decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # pyright: ignore[reportArgumentType]


def completions_of(
    policy: Policy,
    tokens: Sequence[list[int]],
    logprobs: Sequence[list[float]],
    *,
    stopped: Sequence[bool],
    version: int,
    kept: Sequence[Sequence[Tensor] | None],
) -> tuple[Completion, ...]:
    """Completions of sampled tokens; their texts leave out the end token only."""
    spoken = [row[:-1] if row and row[-1] in policy.end_tokens else row for row in tokens]
    texts = decode_all(policy.tokenizer, spoken)
    return tuple(
        Completion(
            tokens=row,
            mask=[True] * len(row),
            logprobs=logp,
            text=text,
            finish="stop" if stop else "length",
            versions=((0, version),),
            kept=None if sets is None else tuple(ids.tolist() for ids in sets),
        )
        for row, logp, text, stop, sets in zip(tokens, logprobs, texts, stopped, kept, strict=True)
    )
