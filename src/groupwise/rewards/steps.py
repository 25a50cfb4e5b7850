"""The steps of an answer, and the aggregation of their rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

Aggregate = Literal["min", "mean", "product", "last"]

WINDOW = 16
"""Tokens that are decoded together, to see what one of them adds to the text."""


def step_ends(tokens: Sequence[int], separator: str, tokenizer: Any) -> list[int]:
    """Places of the last token of every step.

    A step ends with the token that completes the separator behind it, and the last step with the
    last token. White space alone makes no step.

    Args:
        tokens: of an answer.
        separator: text between two steps.
        tokenizer: of the tokens.

    Example: of the tokens "a", ";", " b", ";", "c" and the separator ";", the ends are 1, 3 and 4.
    """
    ends: list[int] = []
    text = ""
    for place in range(len(tokens)):
        start = max(0, place - WINDOW)
        before = _decoded(tokens[start:place], tokenizer)
        text += _decoded(tokens[start : place + 1], tokenizer)[len(before) :]
        step, found, rest = text.rpartition(separator)
        if found:
            if step.strip():
                ends.append(place)
            text = rest
    if not tokens:
        return ends
    behind = tokens[ends[-1] + 1 :] if ends else tokens
    if ends and not _decoded(behind, tokenizer, special=False).strip():
        ends.pop()  # The end token alone is not a step: it belongs to the last one.
    return [*ends, len(tokens) - 1]


def _decoded(tokens: Sequence[int], tokenizer: Any, *, special: bool = True) -> str:
    return tokenizer.decode(
        list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )


def aggregated(rewards: Sequence[float], how: Aggregate) -> float:
    """The rewards of an answer's steps, aggregated to one number.

    Args:
        rewards: at least one; for "product" from 0 to 1.
        how: the smallest, the mean, the product, or that of the last step.

    Example:
        >>> [round(aggregated([0.5, 0.8], how), 2) for how in ("min", "mean", "product", "last")]
        [0.5, 0.65, 0.4, 0.8]

    Source: Let's Verify Step by Step (2305.20050) takes the product, Math-Shepherd (2312.08935) the
        smallest.
    """
    found: dict[Aggregate, Callable[[Sequence[float]], float]] = {
        "min": min,
        "mean": lambda values: math.fsum(values) / len(values),
        "product": math.prod,
        "last": lambda values: values[-1],
    }
    return float(found[how](rewards))
