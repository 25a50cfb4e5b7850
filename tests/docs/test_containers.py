"""Container files: what they copy is in the repository and in the build's context, and what they
install and run exists. The images themselves are not built here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = ("Dockerfile", "Dockerfile.cuda")


def instructions(name: str) -> list[tuple[str, str]]:
    """Every instruction of a container file with its arguments, on one line each."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line]


@pytest.mark.parametrize("name", FILES)
def test_copied_files_exist_and_are_sent_to_the_build(name: str) -> None:
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [p for key, value in instructions(name) if key == "COPY" for p in value.split()[:-1]]
    assert kept[0] == "*" and len(copied) == 5
    assert [path for path in copied if not (ROOT / path).exists() or f"!{path}" not in kept] == []


@pytest.mark.parametrize("name", FILES)
def test_python_extras_and_command_are_those_of_the_project(name: str) -> None:
    found = dict(instructions(name))
    version = re.fullmatch(r"python:(3\.\d+)-slim", found["FROM"])
    assert version and f"Python :: {version[1]}" in " ".join(PROJECT["project"]["classifiers"])
    (extras,) = re.findall(r"'/groupwise\[([\w,]+)\]'", found["RUN"])
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    assert found["ENTRYPOINT"] == '["groupwise"]' and "groupwise" in PROJECT["project"]["scripts"]


def test_the_torch_that_is_installed_first_is_the_pinned_one() -> None:
    for name in FILES:
        runs = [value for key, value in instructions(name) if key == "RUN"]
        (torch,) = [run for run in runs if "torch" in run]
        assert "grep '^torch==' /groupwise/constraints.txt" in torch
        assert ("whl/cpu" in torch) is (name == "Dockerfile")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^torch==", pins, flags=re.M)) == 1


@pytest.mark.parametrize("name", FILES)
def test_the_commands_mount_the_folder_that_runs_are_written_to(name: str) -> None:
    found = dict(instructions(name))
    assert found["ENV"] == f"HOME={found['WORKDIR']}" and found["WORKDIR"] in found["RUN"]
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in (name, "docs/install.md")]
    mounted = [folder for text in texts for folder in re.findall(r'\$PWD/runs:(\S+)"', text)]
    assert len(mounted) == 2 and {*mounted} == {f"{found['WORKDIR']}/runs"}


@pytest.mark.parametrize("name", FILES)
def test_kernels_are_cached_in_a_home_that_every_user_may_write_to(name: str) -> None:
    """A folder open to all is trusted only if it is sticky, as `/tmp` is."""
    found = dict(instructions(name))
    assert f"mkdir -m 1777 {found['WORKDIR']}" in found["RUN"]
