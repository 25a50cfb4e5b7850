"""How the values of several parts become one total, group by group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.registry import BoundFunction, FunctionSpec, Registry

Values = Sequence[Sequence[float | None]]
Number = int | float

COMBINATIONS = Registry("combination", data=("parts", "weights", "labels", "total"))
"""Functions of `parts` (a row per part, a value per valid completion, None where a part does not
apply) make a total; functions of `total` change one. All see one group at a time."""


@COMBINATIONS.register
def weighted_sum(parts: Values, weights: Sequence[float]) -> list[float]:
    """Σ weight · value; a part that does not apply adds nothing.

    Example:
        >>> weighted_sum([[1.0, 0.0], [0.5, None]], [2.0, 1.0])
        [2.5, 0.0]
    """
    return [
        sum(w * v for w, v in zip(weights, column, strict=True) if v is not None)
        for column in zip(*parts, strict=True)
    ]


@COMBINATIONS.register
def product(parts: Values, weights: Sequence[float]) -> list[float]:
    """Π weight · value: every part is a gate for the others; one that does not apply is open.

    Example:
        >>> product([[1.0, 1.0, 0.0], [0.5, None, 1.0]], [1.0, 1.0])
        [0.5, 1.0, 0.0]
    """
    return [
        math.prod(w * v for w, v in zip(weights, column, strict=True) if v is not None)
        for column in zip(*parts, strict=True)
    ]


@COMBINATIONS.register
def gated_sum(
    parts: Values, weights: Sequence[float], labels: Sequence[str], *, by: str
) -> list[float]:
    """Value of the part `by` times the weighted sum of the other parts.

    Example:
        >>> gated_sum([[1.0, 0.0], [0.5, 0.5]], [1.0, 2.0], ["format", "maths"], by="format")
        [1.0, 0.0]
    """
    if by not in labels:
        raise UsageError(f"reward.combine.by = {by!r}: no such part; {suggest(by, labels)}")
    gate = labels.index(by)
    rest = [row for i, row in enumerate(parts) if i != gate]
    sums = weighted_sum(rest, [w for i, w in enumerate(weights) if i != gate])
    opened = [1.0 if value is None else value * weights[gate] for value in parts[gate]]
    return [total * gate for total, gate in zip(sums, opened, strict=True)]


@COMBINATIONS.register
def maximum(parts: Values, weights: Sequence[float]) -> list[float]:
    """The largest weight · value among the parts that apply."""
    return [
        max(w * v for w, v in zip(weights, column, strict=True) if v is not None)
        for column in zip(*parts, strict=True)
    ]


@COMBINATIONS.register
def first_decisive(parts: Values, weights: Sequence[float]) -> list[float]:
    """weight · value of the first part that is not None; later parts are not even called.

    Every part may return None here; a completion that no part decides cannot be judged.
    """
    return [
        next(w * v for w, v in zip(weights, column, strict=True) if v is not None)
        for column in zip(*parts, strict=True)
    ]


@COMBINATIONS.register
def normalised_sum(parts: Values, weights: Sequence[float], *, ddof: int = 1) -> list[float]:
    """Σ weight · (value − mean) / std, each part normalised within the group first.

    A part that is the same for the whole group adds 0, as does a value that does not apply.

    Args:
        parts, weights: as handed over by the composition.
        ddof: 1 for the sample standard deviation, 0 for that of the population.

    Example:
        >>> sums = normalised_sum([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], [1.0, 1.0])
        >>> [round(value, 6) for value in sums]
        [2.366025, 0.366025, -1.366025, -1.366025]

    Source: GDPO (2601.05242), which whitens the sums over the batch afterwards.
    """
    if ddof not in (0, 1):
        raise UsageError(f"reward.combine.ddof = {ddof}: must be 0 or 1.")
    normalised = [_normalised(row, ddof) for row in parts]
    return weighted_sum(normalised, weights)


def _normalised(row: Sequence[float | None], ddof: int) -> list[float | None]:
    known = [value for value in row if value is not None]
    if len(known) < 2:
        return [0.0 if value is not None else None for value in row]
    mean = statistics.fmean(known)
    std = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - ddof))
    if std <= 1e-8 * max(1.0, abs(mean)):
        return [0.0 if value is not None else None for value in row]
    return [None if value is None else (value - mean) / std for value in row]


@COMBINATIONS.register
def clip(total: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """The total cut to low … high.

    Example:
        >>> clip([-2.0, 0.5, 3.0], low=-1.0, high=1.0)
        [-1.0, 0.5, 1.0]
    """
    if low > high:
        raise UsageError(f"reward.combine.low = {low}: must not be above high = {high}.")
    return [min(max(value, low), high) for value in total]


@COMBINATIONS.register
def shift(total: Sequence[float], *, low: float | None = None) -> list[float]:
    """The total moved so that none is negative, as the paper's form of SoftRank needs.

    Args:
        total: of the group.
        low: the smallest total that can occur: every group is moved by −low. Without it a group
            with negative totals is moved by its own minimum, which makes groups incomparable.

    Example:
        >>> shift([-1.0, 0.5, 2.0]), shift([-1.0, 0.5], low=-3.0), shift([0.5, 1.0])
        ([0.0, 1.5, 3.0], [2.0, 3.5], [0.5, 1.0])
    """
    offset = -low if low is not None else max(0.0, -min(total, default=0.0))
    return [value + offset for value in total]


@COMBINATIONS.register
def shuffled(total: Sequence[float]) -> list[float]:
    """The totals of a group dealt out in ascending order, whoever earned them: a control.

    The completions of a prompt are drawn alike and independently, so which of them stands first is
    chance: this is a shuffle that needs no random numbers. What a completion gets says nothing
    about it, and every group keeps its totals.

    Example:
        >>> shuffled([1.0, 0.0, 0.5])
        [0.0, 0.5, 1.0]
    """
    return sorted(total)


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One function that makes a total of the parts, and any number that change it."""

    steps: tuple[BoundFunction, ...]

    @property
    def stops_at_first(self) -> bool:
        return self.steps[0].spec.name == "first_decisive"

    def __call__(
        self, parts: Values, *, weights: Sequence[float], labels: Sequence[str]
    ) -> list[float]:
        if not parts or not parts[0]:
            return []
        data: dict[str, Any] = {"parts": parts, "weights": weights, "labels": labels}
        for step in self.steps:
            data["total"] = step(data)
        return data["total"]


def combination(chosen: str | FunctionSpec | Mapping[str, Any] | Sequence[Any]) -> Combination:
    """A combination as written in TOML or Python.

    Args:
        chosen: a name, a `FunctionSpec`, a table with `name` and settings, or a list of those, such
            as `["weighted_sum", {"name": "clip", "low": -1.0}]`.

    Raises:
        UsageError: an unknown name or setting, or steps in an impossible order.
    """
    items = [chosen] if isinstance(chosen, str | FunctionSpec | Mapping) else list(chosen)
    steps = []
    for number, item in enumerate(items):
        if isinstance(item, str):
            item = FunctionSpec(name=item)
        elif isinstance(item, Mapping):
            settings = {key: value for key, value in item.items() if key != "name"}
            item = FunctionSpec(name=str(item.get("name", "")), settings=settings)
        elif not isinstance(item, FunctionSpec):
            raise UsageError(f"reward.combine[{number}] = {item!r}: must be a name or a table.")
        bound = COMBINATIONS.bind(item, where="reward.combine")
        if ("total" in bound.inputs) == (number == 0):
            must = "make a total of the parts" if number == 0 else "change a total"
            raise UsageError(f"reward.combine[{number}] = {item.name!r}: must {must}.")
        steps.append(bound)
    if not steps:
        raise UsageError("reward.combine = []: must name at least one combination.")
    return Combination(steps=tuple(steps))
