"""Rewards: functions that judge completions, their composition, and what runs them safely.

Importing this package registers every reward and imports no torch: worker processes load it. What
needs torch (the scorers) is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from groupwise.rewards import (
    code,
    countdown,
    format,
    judge,
    korean,
    logic,
    math,
    reasoning,
    reward_model,
    rouge,
    search,
    shaping,
    similarity,
    text,
)
from groupwise.rewards.combine import COMBINATIONS, combination
from groupwise.rewards.contract import (
    GROUP_DATA,
    REWARDS,
    SAMPLE_DATA,
    GroupScore,
    in_process,
    verifier,
)
from groupwise.rewards.extract import extract_answer
from groupwise.rewards.format import dropped_tags
from groupwise.rewards.math import math_equal

if TYPE_CHECKING:
    from groupwise.rewards.pool import PoolScorer
    from groupwise.rewards.scorer import (
        InlineScorer,
        RewardPart,
        Scorer,
        Ticket,
        alarm,
        build_scorer,
        from_functions,
        stack,
    )

MODULES = (
    code,
    countdown,
    format,
    judge,
    korean,
    logic,
    math,
    reasoning,
    reward_model,
    rouge,
    search,
    shaping,
    similarity,
    text,
)
"""The modules whose rewards are registered, for the pages that list them by subject."""

_LATER = {
    "InlineScorer": "scorer",
    "PoolScorer": "pool",
    "RewardPart": "scorer",
    "Scorer": "scorer",
    "Ticket": "scorer",
    "alarm": "scorer",
    "build_scorer": "scorer",
    "from_functions": "scorer",
    "stack": "scorer",
}

__all__ = [
    "COMBINATIONS",
    "GROUP_DATA",
    "MODULES",
    "REWARDS",
    "SAMPLE_DATA",
    "GroupScore",
    "InlineScorer",
    "PoolScorer",
    "RewardPart",
    "Scorer",
    "Ticket",
    "alarm",
    "build_scorer",
    "combination",
    "dropped_tags",
    "extract_answer",
    "from_functions",
    "in_process",
    "math_equal",
    "stack",
    "verifier",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"groupwise.rewards.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
