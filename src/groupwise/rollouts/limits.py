"""What a request must keep to, whichever engine answers it."""

from __future__ import annotations

from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.types import Request, Sampling


def check(request: Request, policy: Policy) -> None:
    """Refuse what no engine can answer.

    Raises:
        UsageError: no completion wanted, an empty prompt, or one that fills the context.
    """
    if request.group < 1:
        raise UsageError(f"group_size = {request.group}: must be at least 1.")
    if not len(request.tokens):
        raise UsageError(f"prompt {request.prompt.id}: has no tokens; a prompt must not be empty.")
    if len(request.tokens) >= policy.context:
        raise UsageError(
            f"prompt {request.prompt.id}: has {len(request.tokens)} tokens, and the model's "
            f"context is {policy.context}; "
            "set data.max_prompt_tokens so that longer prompts are left out."
        )


def budget(request: Request, policy: Policy, sampling: Sampling) -> int:
    """Tokens that a completion may have: what was asked for, or what the context leaves."""
    return min(sampling.max_tokens, policy.context - len(request.tokens))
