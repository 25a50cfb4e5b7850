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
    PolicyObjective,
)
from groupwise.errors import UsageError
from groupwise.registry import FunctionSpec, Registry
from groupwise.types import Objective

PARTS: Mapping[str, Registry] = {
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "divergence": DIVERGENCES,
    "correction": CORRECTIONS,
}


@dataclass(frozen=True, kw_only=True)
class NamedObjective:
    """The parts of a `PolicyObjective` by name; every process has the functions themselves.

    Attributes:
        parts: name and settings of the function in each slot.
        settings: the other attributes of the `PolicyObjective`, as they are.
    """

    parts: Mapping[str, FunctionSpec]
    settings: Mapping[str, Any]


def named(objective: Objective) -> NamedObjective:
    """An objective in a form that can be sent to other processes.

    Raises:
        UsageError: it is not made of registered functions.
    """
    if not isinstance(objective, PolicyObjective):
        raise UsageError(
            f"objective = {objective!r}: cannot be sent to other processes; only a "
            "PolicyObjective, which consists of registered functions, can."
        )
    parts = {slot: getattr(objective, slot).spec for slot in PARTS}
    names = [field.name for field in fields(objective) if field.name not in PARTS]
    return NamedObjective(parts=parts, settings={name: getattr(objective, name) for name in names})


def built(sent: NamedObjective) -> PolicyObjective:
    """The objective that was sent.

    Raises:
        UsageError: a function is not registered in this process.
    """
    bound = {slot: PARTS[slot].bind(part, where=slot) for slot, part in sent.parts.items()}
    return PolicyObjective(**bound, **sent.settings)
