"""Replies as tokens: what comes from outside cannot end a turn, open one, or take more room than it
may."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace

from groupwise.environments import Reply
from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.rollouts.text import decode_all
from groupwise.types import Completion

CHARACTERS = 32
"""Characters read of a result for each token that it may have."""


class Injector:
    """Encodes replies for one tokenizer, without its own special tokens in front.

    Special tokens of the tokenizer in a result are broken up by a space, so that a page that quotes
    a chat template stays text. So are other added tokens with a punctuation mark, such as <think>.

    Args:
        policy: whose tokenizer, and whose end tokens.
        max_tokens: of one reply, frame included.
        around: what is put before and after every reply, as part of its frame.

    Raises:
        UsageError: `max_tokens` is too small for what is put around a reply.
    """

    def __init__(
        self, policy: Policy, *, max_tokens: int, around: tuple[str, str] = ("", "")
    ) -> None:
        self.tokenizer, self.max_tokens, self.around = policy.tokenizer, max_tokens, around
        if (least := len(self._encode("".join(around)))) >= max_tokens:
            raise UsageError(
                f"environment.max_result_tokens = {max_tokens}: the chat template alone puts "
                f"{least} tokens around a reply."
            )
        self.special = _control_tokens(policy)
        texts = set(decode_all(self.tokenizer, [[token] for token in sorted(self.special)]))
        self._texts = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)

    def read(self, reply: Reply) -> Reply:
        """A reply with as much of its result as is read of it."""
        first, last = reply.frame
        end = len(reply.text) - last
        if end - first <= CHARACTERS * self.max_tokens:
            return reply
        start = reply.text[: first + CHARACTERS * self.max_tokens]
        return replace(reply, text=start + reply.text[end:])

    def encode(self, reply: Reply) -> list[int]:
        """The tokens of a reply; a result that is too long is cut inside its frame."""
        reply = self.read(reply)
        first, last = reply.frame
        end = len(reply.text) - last
        before = self.around[0] + reply.text[:first]
        after = reply.text[end:] + self.around[1]
        inside = self._harmless(reply.text[first:end])
        opening, closing = self._encode(before), self._encode(after)
        room = max(0, self.max_tokens - len(closing))
        tokens = self._encode(before + inside + after)
        if len(tokens) > self.max_tokens:
            tokens = [*self._encode(before + inside)[:room], *closing]
        if self._count(tokens) > self._count(opening) + self._count(closing):
            within = [token for token in self._encode(inside) if token not in self.special]
            tokens = [*[*opening, *within][:room], *closing]
        return tokens

    def _count(self, tokens: Sequence[int]) -> int:
        """How many of the tokens are special."""
        return sum(map(self.special.__contains__, tokens))

    def _harmless(self, text: str) -> str:
        """Text that can be encoded and holds no special token."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        for special in self._texts:
            text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def _encode(self, text: str) -> list[int]:
        # Not verbose: a long result is cut below, so nobody needs to hear of its length.
        found = self.tokenizer(text, add_special_tokens=False, verbose=False) if text else None
        return [] if found is None else list(found.input_ids)


def _control_tokens(policy: Policy) -> frozenset[int]:
    """Special tokens, end tokens, and added tokens that look like marks of a template. Some
    tokenizers do not list all of them as special; added words and runs of spaces are text."""
    added = policy.tokenizer.added_tokens_decoder
    marks = {
        token
        for token, text in added.items()
        if text.special or any(char in string.punctuation for char in text.content)
    }
    return frozenset(policy.tokenizer.all_special_ids) | policy.end_tokens | marks


def extended(completion: Completion, tokens: list[int]) -> Completion:
    """A completion with injected tokens at its end, to be continued."""
    count = len(tokens)
    return replace(
        completion,
        tokens=[*completion.tokens, *tokens],
        mask=[*completion.mask, *[False] * count],
        logprobs=[*completion.logprobs, *[0.0] * count],
        support=None if completion.support is None else (*completion.support, *[()] * count),
        finish="length",
    )
