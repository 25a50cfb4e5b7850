"""The registered rewards: what each rewards, and its settings."""

from __future__ import annotations

import inspect

from groupwise.rewards.base import REWARDS


def listing() -> dict[str, str]:
    """What every registered reward pays for, by its name with its settings as a recipe writes them.

    Example:
        >>> from groupwise.rewards.listing import listing
        >>> listing()["exact_match(source='final')"].split(",")[0]
        '1 if the answer equals a reference character by character'
    """
    found = {}
    for name in REWARDS:
        settings = ", ".join(_setting(p) for p in REWARDS.settings(name).values())
        paragraph = inspect.cleandoc(REWARDS.get(name).__doc__ or "").split("\n\n", 1)[0]
        found[f"{name}({settings})" if settings else name] = " ".join(paragraph.split())
    return found


def _setting(parameter: inspect.Parameter) -> str:
    """A setting with its default; one without must be given."""
    default = "…" if parameter.default is parameter.empty else repr(parameter.default)
    return f"{parameter.name}={default}"
