"""Every registered function documents itself; the mathematics states formula and source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import groupwise
from groupwise.prompts.answers import ANSWERS
from groupwise.prompts.sources import GENERATORS
from groupwise.registry import Registry
from groupwise.rewards import REWARDS

MATHEMATICS = {
    name: getattr(groupwise, name)
    for name in groupwise.__all__
    if name.isupper() and name != "ALGORITHMS"
}
ALL = MATHEMATICS | {"REWARDS": REWARDS, "ANSWERS": ANSWERS, "GENERATORS": GENERATORS}


def offenders(
    check: Callable[[Registry, str], Iterable[str]], registries: dict[str, Registry]
) -> list[str]:
    """What a check finds in registered functions, each with its registry and name."""
    return [
        f"{kind} {name}: {found}"
        for kind, registry in registries.items()
        for name in registry.names()
        for found in check(registry, name)
    ]


def docstring(registry: Registry, name: str) -> str:
    return inspect.getdoc(registry.get(name)) or ""


def undocumented(registry: Registry, name: str) -> Iterator[str]:
    if not docstring(registry, name):
        yield "no docstring"


def untyped_settings(registry: Registry, name: str) -> Iterator[str]:
    for setting, parameter in registry.settings(name).items():
        if parameter.annotation is Any:
            yield f"the setting {setting} has no type"


def without_formula_or_source(registry: Registry, name: str) -> Iterator[str]:
    text = docstring(registry, name)
    if not re.search(r"^Source:", text, flags=re.MULTILINE):
        yield "no section `Source:`"
    if not re.search(r"[=≥≤∈]", text):
        yield "no formula"
    if not text.partition("\n")[0].rstrip().endswith((".", ":")):
        yield "the first line is not a sentence"


def unexplained_settings(registry: Registry, name: str) -> Iterator[str]:
    for setting in registry.settings(name):
        if not re.search(rf"\b{setting}\b", docstring(registry, name)):
            yield f"the docstring does not name the setting {setting}"


def test_the_registries_of_the_mathematics_are_filled() -> None:
    assert {"ADVANTAGES", "RATIOS", "SURROGATES", "DIVERGENCES", "WEIGHTINGS"} <= set(MATHEMATICS)
    assert [kind for kind, registry in ALL.items() if not registry.names()] == []


def test_every_function_has_a_docstring() -> None:
    assert offenders(undocumented, ALL) == []


def test_every_setting_has_a_type() -> None:
    assert offenders(untyped_settings, ALL) == []


def test_mathematics_states_formula_and_source() -> None:
    assert offenders(without_formula_or_source, MATHEMATICS) == []


def test_settings_of_the_mathematics_are_explained() -> None:
    assert offenders(unexplained_settings, MATHEMATICS) == []


def test_the_checks_can_fail() -> None:
    registry = Registry("thing", ("rewards",))

    @registry.register
    def bare(rewards, *, scale=1.0): ...

    @registry.register
    def vague(rewards, *, scale: float = 1.0):
        """Some numbers"""

    kinds = {"THINGS": registry}
    assert offenders(undocumented, kinds) == ["THINGS bare: no docstring"]
    assert offenders(untyped_settings, kinds) == ["THINGS bare: the setting scale has no type"]
    assert len(offenders(without_formula_or_source, kinds)) == 6
    assert len(offenders(unexplained_settings, kinds)) == 2
