"""The files that `make dist` builds: complete, and working where the checkout is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "groupwise"


def built(pattern: str) -> Path:
    """The one file in dist/, or a skip where nothing was built."""
    found = sorted((ROOT / "dist").glob(pattern))
    if not found:
        pytest.skip("needs dist/: make dist")
    assert len(found) == 1, found
    return found[0]


def ours() -> set[str]:
    """Every file of the package, as a wheel names it."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    return {
        str(path.relative_to(PACKAGE.parent)) for path in files if "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == ours()
    assert {"groupwise/py.typed", "groupwise/recipes/word-problems.toml"} <= held


def test_its_metadata_name_the_command_the_licence_and_every_extra() -> None:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        info = next(n.partition("/")[0] for n in wheel.namelist() if ".dist-info/" in n)
        metadata = BytesParser().parsebytes(wheel.read(f"{info}/METADATA"))
        assert b"groupwise = groupwise.cli:main" in wheel.read(f"{info}/entry_points.txt")
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert {"quant", "vllm", "trl", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert str(metadata.get_payload()).lstrip().startswith("# groupwise")


def test_the_sdist_is_enough_to_build_and_test() -> None:
    with tarfile.open(built("*.tar.gz")) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in ours()} <= held
    assert {"pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "tests/conftest.py"} <= held
    assert not any(name.startswith((".git/", ".venv", "runs/", "dist/")) for name in held)


def test_the_wheel_alone_finds_its_recipes_its_model_and_its_data(tmp_path: Path) -> None:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        wheel.extractall(tmp_path)
    program = (
        "import groupwise; from groupwise.config import load, packaged; "
        "from groupwise.models import load_policy; from groupwise.prompts.sources import "
        "load_prompts; load_policy('bundled'); assert load_prompts('korean_norms', limit=2); "
        "load('word-problems'); print(groupwise.__file__, len(packaged()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    place, recipes = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path)
    assert int(recipes) == len(list((PACKAGE / "recipes").glob("*.toml")))
