"""Settings of completions that are written over several steps."""

from __future__ import annotations

from typing import Literal

from groupwise.settings.base import Count, Section


class PartialRolloutsSettings(Section):
    """Completions that are cut at a number of tokens per step and go on in the next one."""

    tokens_per_step: Count
    """Tokens that a completion may get in one step; from `sampling.max_tokens` on, none is cut."""
    old_tokens: Literal["correct", "mask"] = "correct"
    """Whether tokens of earlier steps are weighted by `algorithm.correction`, or left out of the
    loss."""
