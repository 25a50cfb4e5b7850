"""Rewards: functions that judge completions, the parts they are composed of, and what runs them safely.

Importing this package registers every reward and imports no torch, because worker processes import it too.
"""

from __future__ import annotations

from groupwise.rewards.contract import (
    GROUP_DATA,
    REWARDS,
    SAMPLE_DATA,
    GroupScore,
    in_process,
    verifier,
)

__all__ = ["GROUP_DATA", "REWARDS", "SAMPLE_DATA", "GroupScore", "in_process", "verifier"]
