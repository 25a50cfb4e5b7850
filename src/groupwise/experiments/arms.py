"""How the arms of an experiment differ, and settings that reduce the differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.algorithms import ALGORITHMS, SLOTS, Algorithm, bind
from groupwise.algorithms.binding import OWN
from groupwise.config import Config
from groupwise.config.recipes import flat
from groupwise.registry import FunctionSpec


def fitting(recipe: Mapping[str, Any], algorithm: str) -> list[str]:
    """Overrides that remove the recipe's settings for functions that a row does not use.

    A recipe for softrank may set `algorithm.advantage.tau`; an arm with another advantage leaves it
    out. A slot whose function the recipe names is the same in every arm and stays.

    Args:
        recipe: the plain values of the recipe.
        algorithm: row of the arm.

    Example:
        >>> fitting({"algorithm": {"name": "softrank", "advantage": {"tau": 0.5}}}, "grpo")
        ['algorithm.advantage.tau=']
    """
    given = recipe.get("algorithm", {})
    row = ALGORITHMS.get(algorithm)
    left = []
    for slot, registry in SLOTS.items():
        settings = given.get(slot)
        if not isinstance(settings, Mapping) or "name" in settings:
            continue
        known = {*registry.settings(getattr(row, slot).name), *OWN.get(slot, ())}
        left += [f"algorithm.{slot}.{name}=" for name in settings if name not in known]
    return left


def advantage_only(recipe: Mapping[str, Any], algorithm: str, against: str) -> list[str]:
    """Overrides that give the row `against` the advantage of another row, and change nothing else.

    Args:
        recipe: the plain values of the recipe; its settings of the advantage stay where they fit.
        algorithm, against: rows of the arm and of the reference arm.

    Example:
        >>> advantage_only({}, "softrank", "grpo")
        ['algorithm.name="grpo"', 'algorithm.advantage={name = "softrank", tau = 0.5}']
    """
    chosen = ALGORITHMS.get(algorithm).advantage
    own = recipe.get("algorithm", {}).get("advantage", {})
    known = {*SLOTS["advantage"].settings(chosen.name), *OWN["advantage"]}
    kept = {} if "name" in own else {key: own[key] for key in own if key in known}
    values = {"name": chosen.name, **chosen.settings, **kept}
    inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    return [f"algorithm.name={json.dumps(against)}", f"algorithm.advantage={{{inside}}}"]


def differences(configs: Mapping[str, Config], against: str) -> dict[str, list[str]]:
    """How each arm differs from the reference arm, apart from the advantage.

    Args:
        configs: by label.
        against: label of the reference arm.

    Returns:
        By label, one line per slot of the algorithm and per further setting; arms without such a
        difference are left out.
    """
    rows = {label: _row(config) for label, config in configs.items()}
    found = {}
    for label, row in rows.items():
        if label == against:
            continue
        lines = [*_differing(row, rows[against], against)]
        lines += _other_settings(configs[label], configs[against], against)
        if lines:
            found[label] = lines
    return found


def in_words(found: Mapping[str, Sequence[str]]) -> list[str]:
    """The differences as sentences."""
    return [
        f"{label} differs in more than its advantage: {'; '.join(lines)}."
        for label, lines in found.items()
    ]


def _row(config: Config) -> Algorithm:
    return bind(config.algorithm.name, config.algorithm.overrides(), where="algorithm").row


def _differing(row: Algorithm, other: Algorithm, against: str) -> Sequence[str]:
    shown = (_shown(row), _shown(other))
    return [
        f"{slot} {shown[0][slot]}, where {against} has {shown[1][slot]}"
        for slot in shown[0]
        if shown[0][slot] != shown[1][slot]
    ]


def _other_settings(config: Config, other: Config, against: str) -> list[str]:
    """Settings outside the algorithm that differ; None stands for one that is not there."""
    own, others = flat(config), flat(other)
    return [
        f"{key} {own.get(key)}, where {against} has {others.get(key)}"
        for key in {**own, **others}
        if not key.startswith("algorithm.") and own.get(key) != others.get(key)
    ]


def _shown(row: Algorithm) -> dict[str, str]:
    """Every slot but the advantage, with all of its settings."""
    values = {}
    for slot, registry in SLOTS.items():
        chosen: FunctionSpec = getattr(row, slot)
        defaults = {
            key: parameter.default
            for key, parameter in registry.settings(chosen.name).items()
            if parameter.default is not parameter.empty
        }
        whole = FunctionSpec(name=chosen.name, settings=defaults | dict(chosen.settings))
        values[slot] = str(whole)
    unused = row.divergence.name == "none" or row.divergence_coefficient == 0
    values["divergence"] = (
        "none"
        if unused
        else f"{row.divergence_coefficient:g}·{values['divergence']} in the {row.divergence_in}"
    )
    values["entropy"] = f"{row.entropy:g}"
    values["scale of the advantages"] = str(row.advantage_rms)
    del values["advantage"]
    return values
