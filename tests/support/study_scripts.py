"""The scripts of the SoftRank study as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from groupwise.algorithms import ALGORITHMS
from groupwise.algorithms.advantages import ADVANTAGES
from groupwise.rewards import REWARDS

STUDY = Path(__file__).parents[2] / "studies" / "softrank"


def modules(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> Iterator[dict[str, ModuleType]]:
    """Some scripts by name; all scripts, and what they register, are gone again afterwards."""
    monkeypatch.syspath_prepend(str(STUDY))
    monkeypatch.setattr(ALGORITHMS, "_rows", {**ALGORITHMS._rows})
    for registry in (ADVANTAGES, REWARDS):
        monkeypatch.setattr(registry, "_functions", {**registry._functions})
    yield {name: importlib.import_module(name) for name in names}
    for path in STUDY.glob("*.py"):
        sys.modules.pop(path.stem, None)
