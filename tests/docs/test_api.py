"""docs/api.md lists the public names of the code, and only those."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from groupwise.registry import Registry

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def api() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("api", DOCS / "api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_names_are_those_of_the_page(api: ModuleType) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert page == api.page(), "public names or settings changed: if intended, run `make api`"


def test_every_public_name_is_described(api: ModuleType) -> None:
    undescribed = re.findall(r"^\| `([^`]+)` \|\s*(?:`[^`]*` )?\|$", api.page(), flags=re.MULTILINE)
    assert undescribed == []


def test_the_page_notices_a_new_function_and_a_changed_default(api: ModuleType) -> None:
    registry = Registry("thing", ("rewards",))

    @registry.register
    def double(rewards, *, scale: float = 2.0):
        """Twice the reward. Details."""

    assert api.registry_section("THINGS", registry)[-2] == (
        "| `double` | Twice the reward. `double(rewards, *, scale=2.0)` |"
    )
