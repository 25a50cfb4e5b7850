"""The state of one completion while an engine writes it, and the completion that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from groupwise.models import Policy
from groupwise.rollouts.limits import budget, within_turn
from groupwise.rollouts.text import decode_all
from groupwise.types import Completion, Finish, Request, Sampling

EMPTY = Completion(tokens=(), mask=(), logprobs=(), text="", finish="length")


@dataclass(kw_only=True)
class Row:
    """The state that the host keeps of a completion while it is written.

    Attributes:
        begun: what was there before; without tokens where nothing was.
        places: maximum number of tokens before its next reply, begun and injected ones included.
        since: the first token of which a stop string may consist.
        ended: how it had finished before anything was added to it, else None.
        given: begun or injected tokens that have yet to pass through the model.
        start: tick of the engine's clock at which its first token would have passed.
        versions: (first token, policy version) spans.
        support: token ids that truncated sampling could draw at each new position.
        answers: where tokens were injected while it was written, from one place to another.
        idle: whether it waits for an answer, or has ended where others may wait.
    """

    begun: Completion
    places: int
    since: int
    ended: Finish | None
    given: list[int]
    start: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    support: list[Sequence[int]] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    idle: bool = False

    @property
    def injected(self) -> int:
        """How many of its tokens the policy did not write."""
        begun = len(self.begun.tokens) - self.begun.own_tokens
        return begun + sum(end - start for start, end in self.answers)

    def inject(self, start: int, end: int) -> None:
        """Note that the tokens from `start` to `end` were injected."""
        self.answers.append((start, end))
        self.since = end
        if self.support:
            self.support += [()] * (end - start)

    def mask(self, count: int) -> list[bool]:
        """Which of its first `count` tokens the policy wrote."""
        mask = [*self.begun.mask, *[True] * (count - len(self.begun.tokens))]
        for start, end in self.answers:
            mask[start:end] = [False] * (end - start)
        return mask

    def stamp(self, place: int, version: int) -> None:
        """Note the policy version of the tokens from `place` on."""
        place = max(place, len(self.begun.tokens), self.since)
        if self.versions and self.versions[-1][0] == place:
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((place, version))


def rows_of(request: Request, policy: Policy, sampling: Sampling, *, version: int) -> list[Row]:
    """The rows of a request, in the order of the samples wanted."""
    rows = []
    for begun in request.begun or (EMPTY,) * len(request.wanted):
        since = max((n + 1 for n, own in enumerate(begun.mask) if not own), default=0)
        most = budget(request, policy, sampling, begun)
        places = within_turn(most, sampling, since=since)
        ended = _ended(begun, policy, sampling, places=places, since=since)
        given = [int(token) for token in begun.tokens]
        row = Row(begun=begun, places=places, since=since, ended=ended, given=given)
        if begun.tokens:
            row.versions += begun.versions
        if ended is None:
            row.stamp(0, version)
        rows.append(row)
    return rows


def _ended(
    begun: Completion, policy: Policy, sampling: Sampling, *, places: int, since: int
) -> Finish | None:
    """How a begun completion has already finished: at its policy's last token, or by its length."""
    own = list(begun.tokens[since:])
    if own and own[-1] in policy.end_tokens:
        return "stop"
    if sampling.stop and own:
        text = decode_all(policy.tokenizer, [own])[0]
        if any(stop in text for stop in sampling.stop):
            return "stop"
    return "length" if len(begun.tokens) >= places else None


def completions_of(
    policy: Policy,
    rows: Sequence[Row],
    tokens: Sequence[list[int]],
    logprobs: Sequence[list[float]],
    *,
    stopped: Sequence[bool],
) -> tuple[Completion, ...]:
    """Completions from rows and all their tokens, begun ones included; their texts leave out the
    end token only."""
    masks = [row.mask(len(ids)) for row, ids in zip(rows, tokens, strict=True)]
    spoken = [ids[:-1] if ids and ids[-1] in policy.end_tokens else ids for ids in tokens]
    own = [
        None if all(mask) else [t for t, mine in zip(ids, mask, strict=False) if mine]
        for ids, mask in zip(spoken, masks, strict=True)
    ]
    texts = decode_all(policy.tokenizer, spoken)
    own_texts = texts
    if any(mine is not None for mine in own):
        own_texts = decode_all(policy.tokenizer, [mine or [] for mine in own])
    return tuple(
        Completion(
            tokens=ids,
            mask=mask,
            logprobs=logp,
            text=text,
            finish="stop" if stop else "length",
            versions=tuple(row.versions),
            support=_support(row),
            own=None if mine is None else own_text,
            injected=() if mine is None else _injected(policy, ids, mask, text),
        )
        for row, ids, mask, logp, text, stop, mine, own_text in zip(
            rows, tokens, masks, logprobs, texts, stopped, own, own_texts, strict=True
        )
    )


def _injected(
    policy: Policy, tokens: Sequence[int], mask: Sequence[bool], text: str
) -> tuple[tuple[int, int], ...]:
    """The spans of injected tokens in a text; empty if a character straddles a boundary."""
    marked = groupby(zip(tokens, mask, strict=False), lambda pair: pair[1])
    runs = [(own, [token for token, _ in run]) for own, run in marked]
    pieces = decode_all(policy.tokenizer, [ids for _, ids in runs])
    if not "".join(pieces).startswith(text):  # an end token stands in the last piece alone
        return ()
    ends = list(accumulate(len(piece) for piece in pieces))
    spans = zip([0, *ends], ends, strict=False)
    return tuple(span for span, (own, _) in zip(spans, runs, strict=True) if not own)


def _support(row: Row) -> tuple[Sequence[int], ...] | None:
    """The support of all positions; None where sampling was not truncated."""
    begun, new = row.begun.support, row.support
    if begun is None and not new:
        return None
    return (*(begun or ((),) * len(row.begun.tokens)), *new)
