"""Where a completion ends, and how tokens become text."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from groupwise.models import Policy
from groupwise.types import Sampling

NOWHERE: Mapping[int, int] = MappingProxyType({})


class Ending:
    """Finds the rows that have just ended, by an end token or by a complete stop string.

    Stop strings are searched in the decoded tail of a completion, since one may straddle tokens.
    """

    def __init__(self, policy: Policy, sampling: Sampling, *, device: torch.device) -> None:
        self.tokenizer = policy.tokenizer
        self.ends = torch.tensor(sorted(policy.end_tokens), device=device)
        self.stop = sampling.stop
        self.stops = re.compile("|".join(map(re.escape, self.stop)))
        # A token adds at least one byte, so a tail of as many tokens as the longest stop string has
        # bytes holds it whole.
        self.tail = max((len(text.encode()) for text in self.stop), default=0) + 1
        self._may_end = _tokens_that_may_end(self.stop, self.tokenizer)

    def __call__(
        self,
        latest: Int[Tensor, "rows"],
        tokens: Int[Tensor, "all time"],
        rows: Int[Tensor, "rows"],
        place: Int[Tensor, "rows"],
        since: Mapping[int, int] = NOWHERE,
    ) -> Bool[Tensor, "rows"]:
        """Whether the token at `tokens[rows, place]`, which is `latest`, ends its row.

        Args:
            since: rows whose stop strings begin at that token or later; others at any.
        """
        ended = latest == self.ends[0] if len(self.ends) == 1 else torch.isin(latest, self.ends)
        if self.stop and (suspects := self._suspects(latest.tolist())):
            tails = self._tails(suspects, tokens, rows, place, since)
            texts = decode_all(self.tokenizer, tails)
            found = [
                at for at, text in zip(suspects, texts, strict=True) if self.stops.search(text)
            ]
            ended[found] = True
        return ended

    def _tails(
        self,
        suspects: list[int],
        tokens: Int[Tensor, "all time"],
        rows: Int[Tensor, "rows"],
        place: Int[Tensor, "rows"],
        since: Mapping[int, int],
    ) -> list[list[int]]:
        """The last tokens of some rows, from the device in one copy."""
        at = torch.tensor(suspects, device=rows.device)
        own, last = rows[at, None], place[at, None]
        back = torch.arange(1 - self.tail, 1, device=rows.device)
        window = tokens[own, (last + back).clamp(min=0)]
        found = torch.cat([own, last, window], dim=1).tolist()
        # As many tokens of the window as lie at the beginning of the search or later.
        sizes = [min(self.tail, n + 1 - since.get(row, 0)) for row, n, *_ in found]
        return [tail[len(tail) - size :] for (_, _, *tail), size in zip(found, sizes, strict=True)]

    def _suspects(self, latest: list[int]) -> list[int]:
        """Where a token stands that may complete a stop string: only they are worth decoding."""
        if new := [token for token in set(latest) if token not in self._may_end]:
            once = decode_all(self.tokenizer, [[token] for token in new])
            twice = decode_all(self.tokenizer, [[token, token] for token in new])
            for token, first, both in zip(new, once, twice, strict=True):
                # Some tokenizers decode the first token of a text differently.
                later = both.removeprefix(first) if both.startswith(first) else None
                self._may_end[token] = later is None or any(
                    may_end(text, stop) for stop in self.stop for text in (first, later)
                )
        return [at for at, token in enumerate(latest) if self._may_end[token]]


@functools.lru_cache(maxsize=8)
def _tokens_that_may_end(
    stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase
) -> dict[int, bool]:
    """Whether the tokens that have been decoded so far may complete a stop string. Rollouts share
    it: most tokens of a rollout have occurred in an earlier one."""
    return {}


def may_end(text: str, stop: str) -> bool:
    """Whether a token with this text may complete a stop string. It may hold parts of characters.

    Example:
        >>> [may_end(text, "</s>") for text in ("s>", "</s> ", "x>", "s")]
        [True, True, False, False]
    """
    if "\N{REPLACEMENT CHARACTER}" in text:
        return stop[-1] in text or not stop[-1].isascii()
    beginnings = (text[: place + 1] for place, last in enumerate(text) if last == stop[-1])
    return any(stop.endswith(each) or each.endswith(stop) for each in beginnings)


def decode_all(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Texts with special tokens kept: a tag may be one, and without it every reward would be 0."""
    decode = tokenizer.batch_decode
    return decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # pyright: ignore[reportArgumentType]
