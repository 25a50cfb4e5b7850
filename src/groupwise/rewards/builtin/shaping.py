"""Rewards for length: every length counts tokens, end-of-sequence token included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import UsageError
from groupwise.rewards.base import REWARDS
from groupwise.rewards.extract import boxes


@REWARDS.register
def soft_overlong(
    length: int,
    max_tokens: int | None = None,
    *,
    cache: int | None = None,
    limit: int | None = None,
    floor: float | None = -1.0,
) -> float:
    """0 up to limit − cache, then a line down to −1 at the limit; added to correctness.

    r = min(0, ((limit − cache) − length) / cache), not below `floor`.

    Args:
        length: tokens of the completion.
        max_tokens: budget of the sampler; the limit where none is given.
        cache: tokens before the limit over which the penalty grows; None takes a fifth of the
            limit, as the paper's 4,096 are of 20,480.
        limit: the longest completion wanted; default the budget.
        floor: None continues the line beyond the limit.

    Example:
        >>> [soft_overlong(n, limit=20480) for n in (16384, 17408, 18432, 20480, 24576)]
        [0.0, -0.25, -0.5, -1.0, -1.0]

    Source: DAPO (2503.14476), equation 13.
    Elsewhere: verl has no floor; TRL's function takes token ids and has the floor.
    """
    top = _limit("limit", limit, max_tokens)
    cache = max(1, top // 5) if cache is None else cache
    if not 0 < cache <= top:
        raise UsageError(f"reward.cache = {cache}: must be from 1 to the limit, {top}.")
    penalty = min(0.0, (top - cache - length) / cache)
    return penalty if floor is None else max(penalty, floor)


@REWARDS.register
def kimi_length(lengths: Sequence[int], corrects: Sequence[float]) -> list[float]:
    """λ = ½ − (length − min) / (max − min) within the group; min(0, λ) for a wrong answer.

    0 for all completions if all lengths are equal. The paper starts to add it, with a constant
    weight, after a phase without it.

    Example:
        >>> kimi_length([100, 200, 300, 500], [1, 0, 1, 0])
        [0.5, 0.0, 0.0, -0.5]

    Source: Kimi k1.5 (2501.12599), section 2.3.3.
    Elsewhere: open-r1's `len_reward` counts characters, takes min and max over all prompts of the
    batch, and counts a sample whose reference cannot be read as correct.
    """
    low, high = min(lengths, default=0), max(lengths, default=0)
    if low == high:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - low) / (high - low) for length in lengths]
    return [
        share if correct >= 0.5 else min(0.0, share)
        for share, correct in zip(shares, corrects, strict=True)
    ]


@REWARDS.register
def cosine(
    length: int,
    correct: float,
    max_tokens: int | None = None,
    *,
    limit: int | None = None,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceed: float | None = None,
) -> float:
    """A half cosine of the length, from its value at 0 to its value at the limit; constant beyond.

    r = long + ½ (short − long) (1 + cos(π · min(length, limit) / limit)).

    Args:
        length: tokens of the completion.
        correct: raw correctness; at least ½ counts as correct.
        max_tokens: budget of the sampler; the limit where none is given.
        limit: length at which the `_long` values are reached.
        correct_short, correct_long, wrong_short, wrong_long: values at length 0 and at the limit.
        exceed: reward from the limit on, whatever the answer; None for the `_long` value.

    Example:
        >>> [round(cosine(n, 1.0, limit=1000), 6) for n in (0, 250, 500, 1000, 2000)]
        [1.0, 0.926777, 0.75, 0.5, 0.5]

    Source: Demystifying Long CoT (2502.03373), with exceed −10, correct 2 → 1, wrong −10 → 0.
    Elsewhere: open-r1 counts characters and does not clamp, so at twice the limit the reward is
    the highest again; its script gives wrong answers 0 when short and −½ when long.
    """
    top = _limit("limit", limit, max_tokens)
    if exceed is not None and length >= top:
        return exceed
    short, long = (correct_short, correct_long) if correct >= 0.5 else (wrong_short, wrong_long)
    return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * min(length, top) / top))


@REWARDS.register
def lcpo_exact(
    length: int,
    correct: float,
    columns: Mapping[str, Any],
    *,
    alpha: float = 0.0003,
    column: str = "num_tokens",
) -> float | None:
    """correct − α · |target − length|; the target length is in a column and in the prompt.

    Args:
        length, correct: of the completion.
        columns: of the row.
        alpha: α, per token.
        column: where the target stands; None or −1 means none.

    Returns:
        None where the row has no target. A wrong answer still gets the length term.

    Example:
        >>> round(lcpo_exact(1200, 1.0, {"num_tokens": 1000}), 6)
        0.94

    Source: L1 (2503.04697), equation 1; prompts end in "Think for n tokens."
    """
    target = _target(columns, column)
    return None if target is None else correct - alpha * abs(target - length)


@REWARDS.register
def lcpo_max(
    length: int,
    correct: float,
    columns: Mapping[str, Any],
    *,
    alpha: float = 0.0003,
    delta: float = 0.5,
    column: str = "num_tokens",
) -> float | None:
    """correct · clip(α · (budget − length) + δ, 0, 1); the budget is in a column.

    Args:
        length, correct: of the completion.
        columns: of the row.
        alpha: α, per token.
        delta: δ, the reward of a correct answer that uses up its budget.
        column: where the budget stands; None or −1 means none.

    Returns:
        None where the row has no budget.

    Example:
        >>> round(lcpo_max(1200, 1.0, {"num_tokens": 1000}), 6)
        0.44

    Source: L1 (2503.04697), equation 2; prompts end in "Think for maximum n tokens."
    Elsewhere: the released code has half the slope, (clip(α Δ, −1, 1) + 1) / 2, and stores a
    budget as a negative number; the sign is ignored here, and −1 means none, as there.
    """
    target = _target(columns, column)
    if target is None:
        return None
    return correct * min(max(alpha * (target - length) + delta, 0.0), 1.0)


@REWARDS.register
def concise(
    text: str, correct: float, *, right: float = 1.0, wrong: float = -0.5, unboxed: float = -1.0
) -> float:
    """Outcome reward for a second phase on a few sometimes solved problems, which shortens answers.

    `right` for a correct answer, `wrong` for another answer in a box, `unboxed` for none. With a
    negative reward for failure only, the per-token loss favours long wrong answers; problems that
    are sometimes solved reverse this.

    Source: Concise Reasoning via RL (2504.05185); its code is not public, so the values are
    settings.
    """
    if correct >= 0.5:
        return right
    return wrong if boxes(text) else unboxed


@REWARDS.register
def untruncated(finish: str) -> float | None:
    """0, or None for a truncated completion, which then leaves the statistics of its group.

    Source: after the overlong filtering of DAPO (2503.14476), which takes such completions out of
        the loss alone: the filter `not_truncated`.
    """
    return None if finish == "length" else 0.0


def _limit(name: str, given: int | None, budget: int | None) -> int:
    limit = given if given is not None else budget
    if limit is None or limit < 1:
        raise UsageError(f"reward.{name} = {limit}: must be a positive number of tokens.")
    return limit


def _target(columns: Mapping[str, Any], column: str) -> int | None:
    if column not in columns:
        known = ", ".join(sorted(columns)) or "none"
        raise UsageError(f"reward.column = {column!r}: no such column. Known: {known}.")
    target = columns[column]
    return None if target is None or int(target) == -1 else abs(int(target))
