"""Run TRL's own tests of its GRPOTrainer against the drop-in, and compare with `expected.toml`.

    python tests/integrations/trl_suite/suite.py [--file FILE] [arguments of pytest]

The test file is downloaded to build/trl-suite, or copied from FILE where there is no network. Only
its import of the trainer changes. With arguments of pytest, such as `-k eval`, only the tests that
ran are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

import stand_ins

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "build" / "trl-suite"
VERSION = "v1.9.0"
NAME = "test_grpo_trainer.py"
URL = f"https://raw.githubusercontent.com/huggingface/trl/{VERSION}/tests/{NAME}"
SHA256 = "9bb0803af24748fa176c3a8371c8ab5f6c6e4f6ec3d7661817b50cf273e17cb4"
THEIRS = "from trl import GRPOConfig, GRPOTrainer\n"
OURS = "from groupwise.integrations.trl import GRPOConfig, GRPOTrainer\n"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The committed list.

    Attributes:
        passes: tests that pass.
        refused: tests that fail, with a part of the error that they fail with.
        needs: tests, or classes of tests, that are not run, with what they need.
    """

    passes: frozenset[str]
    refused: Mapping[str, str]
    needs: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Expected:
        """The list in a TOML file.

        Raises:
            ValueError: a test that is listed twice.
        """
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        refused = {test: one["says"] for one in table["refused"] for test in one["tests"]}
        needs = {test: what for what, tests in table["needs"].items() for test in tests}
        listed = [*table["passes"]["tests"], *needs]
        listed += [test for one in table["refused"] for test in one["tests"]]
        if twice := sorted({test for test in listed if listed.count(test) > 1}):
            raise ValueError(f"{path.name}: listed twice: {', '.join(twice)}")
        return cls(passes=frozenset(table["passes"]["tests"]), refused=refused, needs=needs)


def prepare(folder: Path, given: Path | None) -> None:
    """Write the test file with another import, the module beside it, models and data sets."""
    tests = folder / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    original = folder / NAME
    if given is not None:
        copy(given, original)
    elif not original.exists():
        try:
            with urllib.request.urlopen(URL, timeout=60) as reply:
                original.write_bytes(reply.read())
        except urllib.error.URLError as error:
            sys.exit(
                f"{URL}: cannot be downloaded ({error.reason}). Take the file from a clone of TRL "
                f"at {VERSION} and pass it: make trl-suite ARGS='--file {NAME}'."
            )
    text = original.read_text(encoding="utf-8")
    if (found := hashlib.sha256(text.encode()).hexdigest()) != SHA256:
        original.unlink()
        sys.exit(f"{NAME}: SHA-256 {found} is not that of TRL {VERSION}, {SHA256}.")
    assert text.count(THEIRS) == 1
    (tests / NAME).write_text(text.replace(THEIRS, OURS), encoding="utf-8")
    (tests / "__init__.py").touch()
    copy(HERE / "testing_utils.py", tests)
    stand_ins.make(folder)


def run(folder: Path, deselected: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """Outcome of every test that ran: "passed", "skipped", or the text of its failure."""
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    options = ["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "--tb=short"]
    left_out = [f"--deselect=tests/{NAME}::{test}" for test in deselected]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={results.name}", *left_out,
         f"tests/{NAME}", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
             "HF_DATASETS_CACHE": str(folder / "cache")},
        check=False,
    )  # fmt: skip
    if not results.exists():
        sys.exit("pytest ended without results.")
    found: dict[str, str] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        test = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        broken = [one for one in case if one.tag in ("failure", "error")]
        skipped = any(one.tag == "skipped" for one in case)
        said = "\n".join(f"{one.attrib.get('message', '')}\n{one.text or ''}" for one in broken)
        found[test] = said if broken else "skipped" if skipped else "passed"
    return found


def differences(expected: Expected, found: Mapping[str, str], *, whole: bool) -> list[str]:
    """A line for every test whose outcome is not the expected one."""
    lines = []
    for test, outcome in found.items():
        says = expected.refused.get(test)
        if test in expected.passes:
            wrong = "" if outcome == "passed" else "should pass"
        elif says is not None:
            wrong = "" if says in outcome else f"should be refused with {says!r}"
        else:
            wrong = "is not listed"
        if wrong:
            first = next((line for line in outcome.splitlines() if line.strip()), "")
            lines.append(f"{test}: {wrong}; found: {first[:200]}")
    if whole:
        missing = (expected.passes | expected.refused.keys()) - found.keys()
        lines += [f"{test}: did not run" for test in sorted(missing)]
    return lines


def main() -> None:
    """Run, compare, report; the exit status is 1 where an outcome differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help=f"{NAME} of TRL {VERSION}")
    options, arguments = parser.parse_known_args()
    expected = Expected.read(HERE / "expected.toml")
    prepare(FOLDER, options.file)
    found = run(FOLDER, list(expected.needs), arguments)
    lines = differences(expected, found, whole=not arguments)
    passed = sum(outcome == "passed" for outcome in found.values())
    print(f"{passed} of {len(found)} tests of TRL {VERSION} pass.")
    for line in lines:
        print(f"differs: {line}")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
