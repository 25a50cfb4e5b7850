"""The order of prompts: reshuffled every epoch, resumable from one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from groupwise.errors import UsageError


class PromptOrder:
    """An endless shuffled order over a data set, in which every epoch contains every prompt once.

    The i-th index depends only on (count, seed, i), not on the calls that draw it. Memory holds the
    permutation of the current epoch.

    Args:
        count: number of prompts.
        seed: determines the order.

    Raises:
        UsageError: count below 1, or a negative seed.

    Example:
        >>> whole = PromptOrder(5, seed=0)
        >>> first = whole.next(7)
        >>> sorted(first[:5])
        [0, 1, 2, 3, 4]
        >>> resumed = PromptOrder(5, seed=0)
        >>> resumed.restore(whole.state())
        >>> resumed.next(3) == whole.next(3)
        True
    """

    def __init__(self, count: int, *, seed: int) -> None:
        if count < 1:
            raise UsageError(f"prompts = {count}: must be at least 1.")
        if seed < 0:
            raise UsageError(f"seed = {seed}: must be 0 or more.")
        self.count = count
        self.seed = seed
        self._position = 0
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far, as a fraction."""
        return self._position / self.count

    def next(self, number: int) -> list[int]:
        """The next indices, across epochs where needed."""
        indices: list[int] = []
        while len(indices) < number:
            epoch, offset = divmod(self._position, self.count)
            drawn = self._shuffled(epoch)[offset : offset + number - len(indices)]
            indices += drawn.tolist()
            self._position += len(drawn)
        return indices

    def observe(self, success: Mapping[str, float]) -> None:
        """Receives the share of right answers by prompt id, and ignores it."""

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {"count": self.count, "seed": self.seed, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            UsageError: the state belongs to another number of prompts or another seed.
        """
        for name, mine in (("count", self.count), ("seed", self.seed)):
            if state[name] != mine:
                raise UsageError(
                    f"prompts.{name} = {mine}: the run to resume had {state[name]}; "
                    "resume with the same data and seed."
                )
        self._position = int(state["position"])

    def _shuffled(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._epoch = epoch
        return self._permutation
