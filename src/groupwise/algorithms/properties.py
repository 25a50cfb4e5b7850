"""Laws that registered functions obey, and the mark of those that break one by design.

Every registered advantage and loss is tested against these laws. A function that cannot obey one
says so with `@breaks("…")`; the tests then check that it really does break it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from groupwise.errors import UsageError, suggest

F = TypeVar("F", bound=Callable[..., Any])

LAWS: Mapping[str, str] = {
    "zero_without_signal": "a group whose rewards are all equal gets advantage 0",
    "prompts_independent": "the advantages of a group depend on that group alone",
    "zero_at_zero_advantage": "a row whose advantages are all 0 has no gradient",
    "on_policy_gradient": "on-policy, ∂(Σ weight · loss)/∂logp is −weight · advantage",
}


def breaks(*laws: str) -> Callable[[F], F]:
    """Mark a function as breaking some of `LAWS` by design.

    Raises:
        UsageError: a name that is not in `LAWS`.

    Example:
        >>> @breaks("zero_without_signal")
        ... def raw(rewards): ...
        >>> sorted(broken(raw))
        ['zero_without_signal']
    """
    for law in laws:
        if law not in LAWS:
            raise UsageError(f"law = {law!r}: not a law; {suggest(law, LAWS)}")

    def mark(function: F) -> F:
        setattr(function, "breaks", frozenset(laws))  # noqa: B010 (a plain function has no such field)
        return function

    return mark


def broken(function: Callable[..., Any]) -> frozenset[str]:
    """The laws that a function says it breaks."""
    return getattr(function, "breaks", frozenset())
