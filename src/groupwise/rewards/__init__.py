"""Rewards: functions that judge completions, their composition, and their safe execution.

Importing this package registers every reward and imports no torch: worker processes load it. What
needs torch (the scorers) is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from groupwise.rewards.base import (
    GROUP_DATA,
    REWARDS,
    SAMPLE_DATA,
    GroupScore,
    Unjudgeable,
    in_process,
    in_thread,
    own_worker,
    reads_rows,
    verifier,
)
from groupwise.rewards.builtin import (
    contexts,
    countdown,
    format,
    korean,
    logic,
    reasoning,
    rouge,
    search,
    shaping,
    text,
)
from groupwise.rewards.builtin.format import dropped_tags
from groupwise.rewards.code import reward as code
from groupwise.rewards.compose import COMBINATIONS, combination
from groupwise.rewards.extract import extract_answer
from groupwise.rewards.judges import endpoint, local, process_reward, reward_model, similarity
from groupwise.rewards.math import reward as math
from groupwise.rewards.math.reward import math_equal

if TYPE_CHECKING:
    from groupwise.rewards.scoring.building import build_scorer, from_functions
    from groupwise.rewards.scoring.pool import PoolScorer
    from groupwise.rewards.scoring.scorer import InlineScorer, Scorer, Ticket, reward_alert, stack

MODULES = (
    code,
    contexts,
    countdown,
    format,
    endpoint,
    korean,
    local,
    logic,
    math,
    reasoning,
    process_reward,
    reward_model,
    rouge,
    search,
    shaping,
    similarity,
    text,
)
"""The modules whose rewards are registered, for the pages that list them by subject."""

_LATER = {
    "InlineScorer": "scoring.scorer",
    "PoolScorer": "scoring.pool",
    "Scorer": "scoring.scorer",
    "Ticket": "scoring.scorer",
    "reward_alert": "scoring.scorer",
    "build_scorer": "scoring.building",
    "from_functions": "scoring.building",
    "stack": "scoring.scorer",
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
    "Scorer",
    "Ticket",
    "Unjudgeable",
    "reward_alert",
    "build_scorer",
    "combination",
    "dropped_tags",
    "extract_answer",
    "from_functions",
    "in_process",
    "in_thread",
    "math_equal",
    "own_worker",
    "reads_rows",
    "stack",
    "verifier",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"groupwise.rewards.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
