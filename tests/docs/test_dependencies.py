"""Declared dependencies are those that the source imports, and docs/install.md lists them."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import groupwise.errors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

BROUGHT = {"triton"}
"""What torch's wheels for GPUs install."""
INDIRECT = {"kiwipiepy", "tensorboard", "trl"}
"""Packages of extras that are imported by name at run time, or by torch or the user."""


def names(requirements: Iterable[str]) -> set[str]:
    """Names of the packages in requirement strings."""
    return {re.split(r"[<>=!~ \[]", each, maxsplit=1)[0] for each in requirements}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all modules that a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                str(argument.value).partition(".")[0]
                for argument in node.args
                if isinstance(argument, ast.Constant)
            )


def imported() -> set[str]:
    """Distributions that the source imports."""
    known = packages_distributions()
    modules = {
        module
        for path in (ROOT / "src").rglob("*.py")
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    }
    modules -= {*sys.stdlib_module_names, "groupwise"}
    found = {known[module][0] if module in known else module for module in modules}
    return {name.lower().replace("_", "-") for name in found}


def test_required_packages_are_imported_and_imported_ones_declared() -> None:
    required = names(PROJECT["dependencies"])
    extras = names(
        each
        for extra, given in PROJECT["optional-dependencies"].items()
        if extra != "dev"
        for each in given
    )
    used = imported()
    assert sorted(required - used) == [], "declared, but not imported"
    assert sorted(used - required - extras - BROUGHT) == [], "imported, but not declared"
    assert sorted(extras - used - INDIRECT) == [], "an extra that nothing imports"


def test_the_page_says_what_each_package_is_for() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    section = page.partition("## Dependencies")[2].partition("## Extras")[0]
    listed = re.findall(r"^\| ([a-z-]+) \| \S", section, flags=re.MULTILINE)
    assert listed[1:] == sorted(names(PROJECT["dependencies"]))


def test_constraints_pin_every_required_package() -> None:
    pinned = names((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    assert sorted(names(PROJECT["dependencies"]) - pinned) == []


def test_a_missing_extra_is_installed_from_the_checkout_where_one_runs(tmp_path: Path) -> None:
    source = groupwise.errors.__file__
    assert groupwise.errors.install_command("ray") == f"pip install -e '{ROOT}[ray]'"
    installed = tmp_path / "lib" / "python" / "site-packages" / "groupwise" / "errors.py"
    installed.parent.mkdir(parents=True)
    shutil.copyfile(source, installed)
    found = runpy.run_path(str(installed))["install_command"]("ray")
    assert found == "pip install 'groupwise[ray]'"


def test_messages_name_extras_that_exist() -> None:
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"install_command\([\"'](\w+)", text))
        if path.name != "errors.py":
            assert "groupwise[" not in text, path
    assert named and named <= set(PROJECT["optional-dependencies"])
