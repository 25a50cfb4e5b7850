"""Engines by name. A new one is a class and a line of `ENGINES`, and no other list has its name."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.errors import UsageError, suggest, warn
from groupwise.models import Policy, unsupported
from groupwise.rollouts.engines.generate import GenerateEngine
from groupwise.rollouts.engines.group import GroupEngine
from groupwise.rollouts.engines.vllm import VllmEngine
from groupwise.settings import EngineSettings
from groupwise.types import Engine

Factory = Callable[[Policy, EngineSettings, int | None], Engine]
"""From a policy, the settings and the longest sequence (None: the model's context) to an engine."""

ENGINES: dict[str, Factory] = {
    "group": lambda policy, settings, _: _group_engine(policy, settings),
    "generate": lambda policy, settings, _: GenerateEngine(policy, max_rows=settings.max_rows),
    "vllm": lambda policy, settings, length: VllmEngine(
        policy, max_rows=settings.max_rows, settings=settings, length=length
    ),
}
"""Engines by their names in `engine.name`."""


def make_engine(
    policy: Policy, settings: EngineSettings | None = None, *, length: int | None = None
) -> Engine:
    """The engine of the settings; "group" falls back to "generate" with a warning that says why.

    Args:
        policy: model and tokenizer.
        settings: of the engine.
        length: tokens of the longest prompt with its completion; None is the model's context.

    Raises:
        UsageError: the engine is unknown, or no vLLM can serve this policy.
    """
    settings = settings or EngineSettings()
    return find_engine(settings.name)(policy, settings, length)


def find_engine(name: str) -> Factory:
    """The factory registered under a name in `engine.name`.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    if name not in ENGINES:
        raise UsageError(f"engine.name = {name!r}: no such engine; " + suggest(name, ENGINES))
    return ENGINES[name]


def _group_engine(policy: Policy, settings: EngineSettings) -> Engine:
    """The group engine, or the generate engine if the model does not support grouped attention."""
    if (reason := unsupported(policy.model)) is None:
        return GroupEngine(policy, max_rows=settings.max_rows)
    warn(f"engine 'group' cannot run this model, 'generate' is used instead: {reason}")
    return GenerateEngine(policy, max_rows=settings.max_rows)
