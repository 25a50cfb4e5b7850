"""Which engine serves a policy."""

from __future__ import annotations

import warnings

from groupwise.errors import UsageError, suggest
from groupwise.models import Policy, unsupported
from groupwise.rollouts.engines.generate import GenerateEngine
from groupwise.rollouts.engines.group import GroupEngine
from groupwise.rollouts.engines.vllm import VllmEngine
from groupwise.settings import EngineSettings
from groupwise.types import Engine

ENGINES = ("group", "generate", "vllm")


def make_engine(
    policy: Policy, settings: EngineSettings | None = None, *, length: int | None = None
) -> Engine:
    """The engine asked for; "group" falls back to "generate" with a warning that says why.

    Args:
        policy: model and tokenizer.
        settings: of the engine.
        length: tokens of the longest prompt with its completion; None is the model's context.

    Raises:
        UsageError: no such engine, or no vLLM that could serve this policy.
    """
    settings = settings or EngineSettings()
    name = settings.name
    if name not in ENGINES:
        raise UsageError(f"engine.name = {name!r}: no such engine; " + suggest(name, ENGINES))
    if name == "vllm":
        return VllmEngine(policy, max_rows=settings.max_rows, settings=settings, length=length)
    if name == "group" and (reason := unsupported(policy.model)) is not None:
        warnings.warn(
            f"engine 'group' cannot run this model, 'generate' is used instead: {reason}",
            stacklevel=2,
        )
        name = "generate"
    engine = GroupEngine if name == "group" else GenerateEngine
    return engine(policy, max_rows=settings.max_rows)
