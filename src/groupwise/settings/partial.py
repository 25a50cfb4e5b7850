"""Settings of partial rollouts."""

from __future__ import annotations

from typing import Literal

from groupwise.settings.base import Count, Section


class PartialRolloutsSettings(Section):
    """Completions are cut at a token budget per step and continue in the next step."""

    tokens_per_step: Count
    """Maximum number of tokens added to a completion in one step; with `sampling.max_tokens` or
    more, no completion is cut."""
    old_tokens: Literal["correct", "mask"] = "correct"
    """Whether tokens of earlier steps are weighted by `algorithm.correction` or masked out of the
    loss."""
