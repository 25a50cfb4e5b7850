"""Sizes, names and marks that keep the code readable, checked on the source text."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import groupwise

PACKAGE = Path(groupwise.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES = 500
FUNCTION_LINES = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "stuff"}
STATEFUL = {
    "CriticTrainer",
    "SecondLearnerTrainer",
    "TokenRewardTrainer",
    "DistillationTrainer",
    "OnlinePreferenceTrainer",
    "ProcessTrainer",
    "OfflineTrainer",
    "Trainer",
    "LayerCache",
    "GroupCache",
    "Alerts",
    "DivergenceGuard",
    "Evaluation",
    "GRPOConfig",
    "Row",
}
"""Dataclasses whose fields change: runs, memory that is written in place, and TRL's settings, which
scripts assign."""
POSITIONAL = {"Node", "Token", "Grid", "GRPOConfig"}
"""Dataclasses with positional fields: nodes of a parser, and TRL's own calling convention."""
TRAINER_FIELDS, STEP_LINES = 12, 20
MARKERS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
BARE_IGNORE = re.compile(r"#.*?\b(type: ignore(?!\[)|pyright: ignore(?!\[)|noqa(?!: [A-Z]))")


parsed = functools.cache(ast.parse)


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def long_functions(source: str) -> list[str]:
    """Functions whose lines, without their docstring, exceed the budget."""
    return [
        f"{node.name}: {lines} lines"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node))
        > FUNCTION_LINES
    ]


def loose_dataclasses(source: str) -> list[str]:
    """Public dataclasses that are not frozen, or take their fields by position."""
    loose = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            name = ast.unparse(call.func if call else decorator)
            if name not in ("dataclass", "dataclasses.dataclass"):
                continue
            given = {k.arg: ast.unparse(k.value) for k in call.keywords} if call else {}
            if given.get("frozen") != "True" and node.name not in STATEFUL:
                loose.append(f"{node.name} is not frozen")
            if given.get("kw_only") != "True" and node.name not in POSITIONAL:
                loose.append(f"{node.name} is not keyword-only")
    return loose


def empty_names(source: str) -> list[str]:
    """Functions and classes whose name says nothing."""
    return [
        node.name
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name.lower().strip("_") in EMPTY_NAMES
    ]


def offenders(check: Callable[[str], Iterable[str]]) -> list[str]:
    """What a check finds in the sources, each with its file."""
    return [
        f"{path.relative_to(PACKAGE)}: {found}"
        for path in SOURCES
        for found in check(path.read_text())
    ]


def long_files(source: str) -> list[str]:
    """The file itself, if it exceeds the budget."""
    lines = len(source.splitlines())
    return [f"{lines} lines; split it by what comes out of it"] if lines > FILE_LINES else []


def markers(source: str) -> list[str]:
    """Lines that put off work."""
    return [line.strip() for line in source.splitlines() if MARKERS.search(line)]


def bare_ignores(source: str) -> list[str]:
    """Comments that silence a checker without naming what they silence."""
    return [line for line in source.splitlines() if BARE_IGNORE.search(line)]


def missing_docstrings(source: str) -> list[str]:
    """The module and its public definitions that have no docstring."""
    tree = parsed(source)
    missing = [] if ast.get_docstring(tree) else ["the module"]
    return missing + [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


def test_files_keep_to_their_budget() -> None:
    assert offenders(long_files) == []


def test_functions_keep_to_their_budget() -> None:
    assert offenders(long_functions) == []


def test_public_dataclasses_are_frozen_and_keyword_only() -> None:
    assert offenders(loose_dataclasses) == []


def test_no_work_is_put_off_in_a_comment() -> None:
    assert offenders(markers) == []


def test_functions_and_classes_have_telling_names() -> None:
    assert offenders(empty_names) == []


def test_files_have_telling_names() -> None:
    names = {part for path in SOURCES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert EMPTY_NAMES & names == set()


def test_every_ignore_says_what_it_ignores() -> None:
    assert offenders(bare_ignores) == []


def test_modules_and_public_definitions_have_docstrings() -> None:
    assert offenders(missing_docstrings) == []


def trainer_class() -> ast.ClassDef:
    tree = ast.parse((PACKAGE / "training" / "trainer.py").read_text())
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Trainer")


def test_the_trainer_has_few_fields() -> None:
    fields = [
        ast.unparse(node.target) for node in trainer_class().body if isinstance(node, ast.AnnAssign)
    ]
    assert len(fields) <= TRAINER_FIELDS, fields


def test_a_training_step_reads_on_one_screen() -> None:
    steps = [n for n in trainer_class().body if isinstance(n, ast.FunctionDef) and n.name == "step"]
    lines = [(node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node) for node in steps]
    assert len(lines) == 1 and lines[0] <= STEP_LINES


def test_the_checks_can_fail() -> None:
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    doc = '    """\n' + "    word\n" * 80 + '    """'
    assert long_functions(f"def f():\n{body}") == ["f: 61 lines"]
    assert long_functions(f"def f():\n{doc}\n" + body[:-10]) == []
    both = ["A is not frozen", "A is not keyword-only"]
    assert loose_dataclasses("@dataclass\nclass A: ...") == both
    assert loose_dataclasses("@dataclass(kw_only=True)\nclass A: ...") == both[:1]
    assert loose_dataclasses("@dataclass(frozen=True)\nclass A: ...") == both[1:]
    assert loose_dataclasses("@dataclass(frozen=True, kw_only=True)\nclass A: ...") == []
    assert markers("x = 1  # TODO: two") == ["x = 1  # TODO: two"]
    assert empty_names("def _utils(): ...") == ["_utils"]
    assert BARE_IGNORE.search("x = 1  # type: ignore")
    assert not BARE_IGNORE.search("x = 1  # type: ignore[attr-defined]")
    assert BARE_IGNORE.search("x = 1  # noqa")
    assert missing_docstrings("def f(): ...") == ["the module", "f"]
    assert long_files("x\n" * (FILE_LINES + 1)) != []
