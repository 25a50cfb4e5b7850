"""Serialisation of objectives for other processes: names of registered functions and their
settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from groupwise.algorithms.losses import (
    CORRECTIONS,
    DIVERGENCES,
    RATIOS,
    SURROGATES,
    VALUE_LOSSES,
    OutcomeObjective,
    PolicyObjective,
    ValueObjective,
)
from groupwise.errors import UsageError
from groupwise.registry import FunctionSpec, Registry
from groupwise.types import Objective

PARTS: Mapping[type[Objective], Mapping[str, Registry]] = {
    PolicyObjective: {
        "ratio": RATIOS,
        "surrogate": SURROGATES,
        "divergence": DIVERGENCES,
        "correction": CORRECTIONS,
    },
    ValueObjective: {"loss": VALUE_LOSSES},
    OutcomeObjective: {},
}
"""The attributes of every objective that are registered functions, with their registries."""


@dataclass(frozen=True, kw_only=True)
class NamedObjective:
    """An objective with its functions by name; every process has the functions themselves.

    Attributes:
        kind: of the objective.
        parts: name and settings of the function in each slot.
        settings: the other attributes of the objective, as they are.
    """

    kind: type[Objective]
    parts: Mapping[str, FunctionSpec]
    settings: Mapping[str, Any]


def named(objective: Objective) -> NamedObjective:
    """An objective in a form that can be sent to other processes.

    Raises:
        UsageError: it is not made of registered functions.
    """
    kind = type(objective)
    if kind not in PARTS:
        kinds = ", ".join(each.__name__ for each in PARTS)
        raise UsageError(
            f"objective = {objective!r}: cannot be sent to other processes; only objectives that "
            f"consist of registered functions can ({kinds})."
        )
    given = {field.name: getattr(objective, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    parts = {slot: given.pop(slot).spec for slot in PARTS[kind]}
    return NamedObjective(kind=kind, parts=parts, settings=given)


def built(sent: NamedObjective) -> Objective:
    """The objective that was sent.

    Raises:
        UsageError: a function is not registered in this process.
    """
    of = PARTS[sent.kind]
    bound = {slot: of[slot].bind(part, where=slot) for slot, part in sent.parts.items()}
    return sent.kind(**bound, **sent.settings)
