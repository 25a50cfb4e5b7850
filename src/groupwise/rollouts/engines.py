"""Which engine serves a policy."""

from __future__ import annotations

import warnings

from groupwise.errors import UsageError, suggest
from groupwise.models import Policy, unsupported
from groupwise.rollouts.fallback import GenerateEngine
from groupwise.rollouts.group import GroupEngine
from groupwise.types import Engine

ENGINES = {"group": GroupEngine, "generate": GenerateEngine}


def make_engine(policy: Policy, *, name: str = "group", max_rows: int = 128) -> Engine:
    """The engine asked for; "group" falls back to "generate" with a warning that says why.

    Raises:
        UsageError: no such engine.
    """
    if name not in ENGINES:
        raise UsageError(f"engine.name = {name!r}: no such engine; " + suggest(name, ENGINES))
    if name == "group" and (reason := unsupported(policy.model)) is not None:
        warnings.warn(
            f"engine 'group' cannot run this model, 'generate' is used instead: {reason}",
            stacklevel=2,
        )
        name = "generate"
    return ENGINES[name](policy, max_rows=max_rows)
