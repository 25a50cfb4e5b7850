"""Orders of prompts other than a shuffle: shares of several sources, a curriculum, priorities.

Every order is endless, depends only on its data, its seed and what it was told, and can be resumed
from its `state`. Algorithms under comparison therefore draw the same prompts, except from
`PrioritisedOrder`, which follows the success of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.errors import UsageError, suggest
from groupwise.prompts.order import PromptOrder
from groupwise.types import Prompt


class MixedOrder:
    """Prompts of several sources in fixed shares, each source in its own shuffled order.

    The next prompt is of the source that is furthest behind its share, so every stretch of n
    prompts holds each source's share of n within one prompt.

    Args:
        members: the indices of each source's prompts, by name.
        shares: of each source; they add up to 1.
        seed: of the orders.

    Raises:
        UsageError: a source without prompts, or shares that do not add up to 1.

    Example:
        >>> order = MixedOrder({"easy": [0, 1], "hard": [2, 3]}, {"easy": .75, "hard": .25}, seed=0)
        >>> [index < 2 for index in order.next(8)].count(True)
        6
    """

    def __init__(
        self, members: Mapping[str, Sequence[int]], shares: Mapping[str, float], *, seed: int
    ) -> None:
        check_shares(shares)
        for name in shares:
            if not members.get(name):
                raise UsageError(f"data.sources: {name!r} has no prompts.")
        self.members, self.shares = members, shares
        self.orders = {
            name: PromptOrder(len(members[name]), seed=seed + place)
            for place, name in enumerate(shares)
        }
        self.drawn = dict.fromkeys(shares, 0)

    def next(self, number: int) -> list[int]:
        """The next indices."""
        return [self._one() for _ in range(number)]

    def _one(self) -> int:
        total = sum(self.drawn.values()) + 1
        name = max(self.shares, key=lambda each: self.shares[each] * total - self.drawn[each])
        self.drawn[name] += 1
        return self.members[name][self.orders[name].next(1)[0]]

    def observe(self, success: Mapping[str, float]) -> None:
        """Told the share of right answers by prompt id; ignored."""

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        orders = {name: order.state() for name, order in self.orders.items()}
        return {"drawn": dict(self.drawn), "orders": orders}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            UsageError: it is of other sources.
        """
        if set(state.get("drawn", {})) != set(self.drawn):
            raise UsageError("data.sources: are not those of the run to resume.")
        self.drawn = {name: int(state["drawn"][name]) for name in self.drawn}
        for name, order in self.orders.items():
            order.restore(state["orders"][name])


class CurriculumOrder:
    """Easy prompts first: level after level, shuffled within each.

    Args:
        levels: of every prompt, lower first.
        per_level: prompts drawn of each level before the next one begins; None takes every prompt
            of a level once. The last level has no end.
        seed: of the orders within levels.

    Raises:
        UsageError: no prompts.

    Example:
        >>> order = CurriculumOrder([2, 1, 2, 1], per_level=None, seed=0)
        >>> sorted(order.next(2)), sorted(order.next(2))
        ([1, 3], [0, 2])
    """

    def __init__(self, levels: Sequence[float], *, per_level: int | None, seed: int) -> None:
        if not levels:
            raise UsageError("prompts = 0: must be at least 1.")
        self.levels = sorted(set(levels))
        self.members = [[i for i, e in enumerate(levels) if e == level] for level in self.levels]
        self.orders = [
            PromptOrder(len(own), seed=seed + place) for place, own in enumerate(self.members)
        ]
        sizes = [len(own) if per_level is None else per_level for own in self.members]
        self.ends = np.cumsum(sizes[:-1]).tolist()
        self.position = 0

    def next(self, number: int) -> list[int]:
        """The next indices."""
        found = []
        for _ in range(number):
            level = sum(end <= self.position for end in self.ends)
            found.append(self.members[level][self.orders[level].next(1)[0]])
            self.position += 1
        return found

    def observe(self, success: Mapping[str, float]) -> None:
        """Told the share of right answers by prompt id; ignored."""

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {"position": self.position, "orders": [order.state() for order in self.orders]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            UsageError: it is of other levels.
        """
        if len(state.get("orders", ())) != len(self.orders):
            raise UsageError("data.order: its levels are not those of the run to resume.")
        self.position = int(state["position"])
        for order, saved in zip(self.orders, state["orders"], strict=True):
            order.restore(saved)


class PrioritisedOrder:
    """Prompts drawn in proportion to how often they are answered wrongly.

        p_i ∝ max(1 − s_i, floor)

    where s_i is the share of right answers the last time prompt i was drawn, and 0 before. A call
    of `next` draws no prompt twice while others have a chance.

    Args:
        ids: of the prompts.
        floor: least weight, so that solved prompts come back; 0 is the paper's.
        seed: of the draws; the n-th draw's random number depends on n alone.

    Example:
        >>> order = PrioritisedOrder(["a", "b"], floor=0.0, seed=0)
        >>> order.observe({"a": 1.0}); order.next(1)
        [1]

    Source: Kimi k1.5 (2501.12599), section 2.3.3.
    """

    def __init__(self, ids: Sequence[str], *, floor: float, seed: int) -> None:
        self.places = {id: place for place, id in enumerate(ids)}
        self.floor, self.seed, self.position = floor, seed, 0
        self.success = np.zeros(len(ids))

    def next(self, number: int) -> list[int]:
        """The next indices."""
        weights = np.maximum(1 - self.success, self.floor)
        if not weights.any():
            weights = np.ones_like(weights)
        found: list[int] = []
        for _ in range(number):
            left = weights.copy()
            left[found] = 0
            if not left.any():
                left = weights
            u = np.random.default_rng([self.seed, self.position]).random()
            place = int(np.searchsorted(np.cumsum(left) / left.sum(), u, side="right"))
            found.append(min(place, len(left) - 1))
            self.position += 1
        return found

    def observe(self, success: Mapping[str, float]) -> None:
        """Told the share of right answers by prompt id."""
        for id, share in success.items():
            if math.isfinite(share):
                self.success[self.places[id]] = share

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {"position": self.position, "success": self.success.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            UsageError: it is of other prompts.
        """
        if len(state.get("success", ())) != len(self.success):
            raise UsageError("data.order: the run to resume had another number of prompts.")
        self.position = int(state["position"])
        self.success = np.asarray(state["success"], dtype=float)


Order = PromptOrder | MixedOrder | CurriculumOrder | PrioritisedOrder


def check_shares(shares: Mapping[str, float]) -> None:
    """Refuse shares that do not add up to 1.

    Raises:
        UsageError: they do not.
    """
    total = sum(shares.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise UsageError(f"data.sources: shares add up to {total:g}; they must add up to 1.")


def levels_of(prompts: Sequence[Prompt], column: str, *, easiest: str) -> list[float]:
    """The level of every prompt by a column of numbers.

    Args:
        easiest: whether "low" or "high" numbers come first.

    Raises:
        UsageError: a prompt has no number there.
    """
    sign = 1.0 if easiest == "low" else -1.0
    found = []
    for prompt in prompts:
        try:
            found.append(sign * float(prompt.columns[column]))
        except KeyError:
            raise UsageError(
                f"data.order.column = {column!r}: prompt {prompt.id} has none; "
                + suggest(column, map(str, prompt.columns))
            ) from None
        except (TypeError, ValueError):
            raise UsageError(
                f"data.order.column = {column!r}: prompt {prompt.id} has "
                f"{prompt.columns[column]!r} there, which is not a number."
            ) from None
    return found
