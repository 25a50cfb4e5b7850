"""What a step cost: seconds by stage, and memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

import torch

from groupwise.types import Metrics, ScoredGroups, Update


def costs(scored: ScoredGroups, updates: Sequence[Update], *, start: float) -> Metrics:
    """Seconds of the step as a whole and by stage, and the most memory used so far.

    Args:
        start: `time.perf_counter()` when the step began.

    Returns:
        "seconds", "seconds.rollout", "seconds.reward", …, and "memory_mb" of the graphics card, or
        of the process where there is none.
    """
    stages = dict(scored.seconds)
    for update in updates:
        for stage, seconds in update.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    return {
        "seconds": time.perf_counter() - start,
        **{f"seconds.{stage}": seconds for stage, seconds in stages.items()},
        "memory_mb": peak,
    }
