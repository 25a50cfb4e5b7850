"""Sizes, names and marks that keep the code readable, checked on the source text."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import groupwise

PACKAGE = Path(groupwise.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES = 500
FUNCTION_LINES = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "stuff"}
STATEFUL = {"Trainer", "LayerCache", "GroupCache", "Alarms", "Guard"}
"""Dataclasses whose fields change, because they are a run, or memory that is written in place."""
BARE_IGNORE = re.compile(r"#.*?\b(type: ignore(?!\[)|pyright: ignore(?!\[)|noqa(?!: [A-Z]))")

every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def long_functions(source: str) -> list[str]:
    """Functions whose lines, without their docstring, exceed the budget."""
    return [
        f"{node.name}: {lines} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node))
        > FUNCTION_LINES
    ]


def loose_dataclasses(source: str) -> list[str]:
    """Public dataclasses that are not frozen."""
    loose = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            name = ast.unparse(call.func if call else decorator)
            if name not in ("dataclass", "dataclasses.dataclass"):
                continue
            given = {k.arg: ast.unparse(k.value) for k in call.keywords} if call else {}
            if given.get("frozen") != "True" and node.name not in STATEFUL:
                loose.append(node.name)
    return loose


def empty_names(source: str) -> list[str]:
    """Functions and classes whose name says nothing."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name.lower().strip("_") in EMPTY_NAMES
    ]


@every_source
def test_file_budget(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{lines} lines; split it by what comes out of it"


@every_source
def test_function_budget(path: Path) -> None:
    assert long_functions(path.read_text()) == []


@every_source
def test_public_dataclasses_are_frozen(path: Path) -> None:
    assert loose_dataclasses(path.read_text()) == []


@every_source
def test_names_say_something(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    assert EMPTY_NAMES.isdisjoint(part.removesuffix(".py") for part in inside.parts)
    assert empty_names(path.read_text()) == []


@every_source
def test_every_ignore_says_what_it_ignores(path: Path) -> None:
    bare = [line for line in path.read_text().splitlines() if BARE_IGNORE.search(line)]
    assert bare == []


@every_source
def test_every_module_and_public_definition_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    missing = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert missing == []


def test_the_checks_can_fail() -> None:
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    doc = '    """\n' + "    word\n" * 80 + '    """'
    assert long_functions(f"def f():\n{body}") == ["f: 61 lines"]
    assert long_functions(f"def f():\n{doc}\n" + body[:-10]) == []
    assert loose_dataclasses("@dataclass\nclass A: ...") == ["A"]
    assert loose_dataclasses("@dataclass(kw_only=True)\nclass A: ...") == ["A"]
    assert loose_dataclasses("@dataclass(frozen=True)\nclass A: ...") == []
    assert empty_names("def _utils(): ...") == ["_utils"]
    assert BARE_IGNORE.search("x = 1  # type: ignore")
    assert not BARE_IGNORE.search("x = 1  # type: ignore[attr-defined]")
    assert BARE_IGNORE.search("x = 1  # noqa")
