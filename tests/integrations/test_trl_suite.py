"""The command that runs TRL's own tests tells every outcome that differs from the list."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SUITE = Path(__file__).parent / "trl_suite"
LISTED = """
[passes]
tests = ["A::good", "A::broken"]
[[refused]]
why = "beams are not samples"
says = "no beams"
tests = ["A::beams", "A::accepted"]
[needs]
images = ["B"]
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SUITE))
    yield importlib.import_module("suite")
    for name in ("suite", "stand_ins"):
        sys.modules.pop(name, None)


def test_outcomes_that_differ_are_told(tmp_path: Path, suite: ModuleType) -> None:
    (tmp_path / "expected.toml").write_text(LISTED)
    expected = suite.Expected.read(tmp_path / "expected.toml")
    found = {
        "A::good": "passed",
        "A::broken": "AssertionError: 1 != 2\nmore",
        "A::beams": "UsageError: there are no beams",
        "A::new": "passed",
    }
    lines = suite.differences(expected, found, whole=True)
    assert lines == [
        "A::broken: should pass; found: AssertionError: 1 != 2",
        "A::new: is not listed; found: passed",
        "A::accepted: did not run",
    ]
    found["A::accepted"] = "passed"
    assert "should be refused with 'no beams'" in suite.differences(expected, found, whole=True)[-1]
    assert len(suite.differences(expected, {"A::good": "passed"}, whole=False)) == 0


def test_a_test_is_listed_once(tmp_path: Path, suite: ModuleType) -> None:
    expected = suite.Expected.read(SUITE / "expected.toml")
    assert len(expected.passes) > 2 * len(expected.refused)
    (tmp_path / "expected.toml").write_text(LISTED.replace('"B"', '"A::good"'))
    with pytest.raises(ValueError, match="listed twice: A::good"):
        suite.Expected.read(tmp_path / "expected.toml")


def test_a_file_of_another_version_is_refused(tmp_path: Path, suite: ModuleType) -> None:
    other = tmp_path / "other.py"
    other.write_text(suite.THEIRS)
    with pytest.raises(SystemExit, match="is not that of TRL"):
        suite.prepare(tmp_path / "build", other)
    assert not (tmp_path / "build" / suite.NAME).exists()
