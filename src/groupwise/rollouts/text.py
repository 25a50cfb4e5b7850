"""Where a completion ends, and what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

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
        tokens: Int[Tensor, "rows time"],
        length: Int[Tensor, "rows"],
    ) -> Bool[Tensor, "rows"]:
        ended = torch.isin(latest, self.ends)
        if self.stop:
            tails = [
                row[max(0, n - self.tail) : n].tolist()
                for row, n in zip(tokens, length.tolist(), strict=True)
            ]
            texts = decode_all(self.tokenizer, tails)
            ended |= torch.tensor(
                [any(stop in text for stop in self.stop) for text in texts], device=ended.device
            )
        return ended


def decode_all(tokenizer: object, rows: Sequence[Sequence[int]]) -> list[str]:
    """Texts with special tokens kept: a tag may be one, and dropping it would make every reward 0
    in silence."""
    return tokenizer.batch_decode(
        rows, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )  # pyright: ignore


def completion_of(
    policy: Policy,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    *,
    stopped: bool,
    version: int,
    kept: tuple[Sequence[int], ...] | None,
) -> Completion:
    """A completion of sampled tokens; its text leaves out the end token only."""
    spoken = tokens[:-1] if tokens and tokens[-1] in policy.end_tokens else tokens
    return Completion(
        tokens=tokens,
        mask=[True] * len(tokens),
        logprobs=logprobs,
        text=decode_all(policy.tokenizer, [spoken])[0],
        finish="stop" if stopped else "length",
        versions=((0, version),),
        kept=kept,
    )
