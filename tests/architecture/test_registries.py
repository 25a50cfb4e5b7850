"""Every registered function explains itself, the mathematics with formula and source."""

from __future__ import annotations

import inspect
import re

import pytest

import groupwise
from groupwise.prompts.answers import ANSWERS
from groupwise.prompts.sources import GENERATORS
from groupwise.registry import Registry
from groupwise.rewards import REWARDS

MATHEMATICS = [name for name in groupwise.__all__ if name.isupper() and name != "ALGORITHMS"]
OTHERS = {"REWARDS": REWARDS, "ANSWERS": ANSWERS, "GENERATORS": GENERATORS}


def registered(names: list[str]) -> list[tuple[str, str]]:
    return [(kind, name) for kind in names for name in registry(kind).names()]


def registry(kind: str) -> Registry:
    return OTHERS[kind] if kind in OTHERS else getattr(groupwise, kind)


def test_the_registries_of_the_mathematics_are_filled() -> None:
    assert {"ADVANTAGES", "RATIOS", "SURROGATES", "DIVERGENCES", "WEIGHTINGS"} <= set(MATHEMATICS)
    assert all(registry(kind).names() for kind in MATHEMATICS)


@pytest.mark.parametrize("kind, name", registered(MATHEMATICS))
def test_mathematics_states_formula_and_source(kind: str, name: str) -> None:
    text = inspect.getdoc(registry(kind).get(name)) or ""
    assert re.search(r"^Source:", text, flags=re.MULTILINE), "no section `Source:`"
    assert re.search(r"[=≥≤∈]", text), "no formula"
    assert text.splitlines()[0].rstrip().endswith((".", ":")), "the first line is no sentence"


@pytest.mark.parametrize("kind, name", registered(MATHEMATICS))
def test_settings_of_the_mathematics_are_explained(kind: str, name: str) -> None:
    text = inspect.getdoc(registry(kind).get(name)) or ""
    for setting in registry(kind).settings(name):
        assert re.search(rf"\b{setting}\b", text), f"the docstring does not name {setting}"


@pytest.mark.parametrize("kind, name", registered([*MATHEMATICS, *OTHERS]))
def test_every_function_has_a_docstring_and_typed_settings(kind: str, name: str) -> None:
    assert inspect.getdoc(registry(kind).get(name)), "no docstring"
    for setting, parameter in registry(kind).settings(name).items():
        assert parameter.annotation is not parameter.empty, f"{setting} has no type"
