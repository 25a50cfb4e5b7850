"""Properties that registered functions have, and the mark of those that lack one by design.

Every registered advantage and loss is tested for these properties. A function that lacks one says
so with `@breaks("…")`; the tests then check that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from groupwise.errors import UsageError, suggest

F = TypeVar("F", bound=Callable[..., Any])

PROPERTIES: Mapping[str, str] = {
    "zero_without_signal": "a group whose rewards are all equal gets advantage 0",
    "prompts_independent": "the advantages of a group depend on that group alone",
    "zero_at_zero_advantage": "a row whose advantages are all 0 has no gradient",
    "on_policy_gradient": "on-policy, ∂(Σ weight · loss)/∂logp is −weight · advantage",
}


def breaks(*properties: str) -> Callable[[F], F]:
    """Mark a function as lacking some of `PROPERTIES` by design.

    Raises:
        UsageError: a name that is not in `PROPERTIES`.

    Example:
        >>> @breaks("zero_without_signal")
        ... def raw(rewards): ...
        >>> sorted(broken(raw))
        ['zero_without_signal']
    """
    for name in properties:
        if name not in PROPERTIES:
            raise UsageError(f"property = {name!r}: not known; {suggest(name, PROPERTIES)}")

    def mark(function: F) -> F:
        setattr(function, "breaks", frozenset(properties))  # noqa: B010 (functions have no fields)
        return function

    return mark


def broken(function: Callable[..., Any]) -> frozenset[str]:
    """The properties that a function is marked as lacking."""
    return getattr(function, "breaks", frozenset())
