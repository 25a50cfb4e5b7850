"""Which engine serves a policy."""

from __future__ import annotations

import warnings

from groupwise.errors import UsageError, suggest
from groupwise.models import Policy, unsupported
from groupwise.rollouts.engines.generate import GenerateEngine
from groupwise.rollouts.engines.group import GroupEngine
from groupwise.rollouts.engines.vllm import VllmEngine, VllmSettings
from groupwise.types import Engine

ENGINES = ("group", "generate", "vllm")


def make_engine(
    policy: Policy, *, name: str = "group", max_rows: int = 128, vllm: VllmSettings | None = None
) -> Engine:
    """The engine asked for; "group" falls back to "generate" with a warning that says why.

    Args:
        policy: model and tokenizer.
        name: "group", "generate" or "vllm".
        max_rows: completions written at the same time.
        vllm: where vLLM runs and how it is kept up to date.

    Raises:
        UsageError: no such engine, or no vLLM that could serve this policy.
    """
    if name not in ENGINES:
        raise UsageError(f"engine.name = {name!r}: no such engine; " + suggest(name, ENGINES))
    if name == "vllm":
        return VllmEngine(policy, max_rows=max_rows, settings=vllm)
    if name == "group" and (reason := unsupported(policy.model)) is not None:
        warnings.warn(
            f"engine 'group' cannot run this model, 'generate' is used instead: {reason}",
            stacklevel=2,
        )
        name = "generate"
    engine = GroupEngine if name == "group" else GenerateEngine
    return engine(policy, max_rows=max_rows)
