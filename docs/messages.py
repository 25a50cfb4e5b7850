"""Every error message of the package and its module, read from the source
(`docs/error_pages.py`).
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "groupwise"
BASES = {"GroupwiseError", "CheckFailed", "Unjudgeable", "MissingData", "ContractError"}
"""Exceptions whose text users see; classes below them count as well."""
HOLE = "…"
"""What stands in a message for a value of the run."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message."""

    text: str
    kind: str
    """Class of the exception."""
    module: str
    """File below the package."""


@functools.cache
def messages(package: Path = PACKAGE) -> tuple[list[Message], list[str]]:
    """All messages below a folder by file and line, and the errors that pass on another's text,
    as `file: expression`."""
    trees = {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }
    kinds = _descendants(trees.values())
    everywhere = [function for tree in trees.values() for function in _functions(tree)]
    makers = {
        (_package(module), each.name): each
        for module, tree in trees.items()
        for each in _functions(tree)
        if _returned(each) in kinds
    }
    known: dict[Message, None] = {}
    passed_on: list[str] = []
    for module, tree in trees.items():
        for function in [None, *_functions(tree)]:
            if function is not None and _returned(function) in kinds:
                continue  # its messages are those of its callers
            for call in _calls(tree if function is None else function):
                name = _last(call.func)
                maker = makers.get((_package(module), name))
                if name not in kinds and maker is None:
                    continue
                reader = _Reader(tree, function, everywhere)
                texts = reader.made(call, maker) if maker else reader.error(call)
                kind = _returned(maker) if maker else name
                texts = [text for text in texts if re.search(r"\w", text)]
                known |= {Message(text=text, kind=kind, module=module): None for text in texts}
                if not texts:
                    passed_on.append(f"{module}: {ast.unparse(call)}")
    return list(known), passed_on


@dataclass(frozen=True)
class _Reader:
    """Reads the texts that an expression can have."""

    tree: ast.Module
    function: Function | None
    everywhere: list[Function]
    """All functions of the package."""
    given: Mapping[str, str] | None = None
    """Texts of parameters."""

    def error(self, call: ast.Call) -> list[str]:
        """Messages of an exception; a failed check has what was found and what to do."""
        parts = call.args if _last(call.func) == "CheckFailed" else call.args[:1]
        found = [self.texts(part) for part in parts]
        return [": ".join(each) for each in itertools.product(*found)] if found else []

    def made(self, call: ast.Call, maker: Function) -> list[str]:
        """Messages of a function that returns an error, with the texts it was called with."""
        names = [each.arg for each in maker.args.args if each.arg != "self"]
        given = [self.texts(argument) or [HOLE] for argument in call.args]
        readers = [
            replace(self, function=maker, given=dict(zip(names, texts, strict=False)))
            for texts in itertools.product(*given)
        ]
        calls = [made for made in _calls(maker) if _last(made.func) == _returned(maker)]
        return [text for reader in readers for made in calls for text in reader.error(made)]

    def texts(self, node: ast.expr, depth: int = 4) -> list[str]:
        """The texts of an expression; none where the source does not say."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                parts = [self.texts(value, depth) or [HOLE] for value in values]
                return ["".join(each) for each in itertools.product(*parts)]
            case ast.FormattedValue(value=ast.Name(id=name)) if name in (self.given or {}):
                return [(self.given or {})[name]]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = self.texts(left, depth), self.texts(right, depth)
                pairs = itertools.product(first or [HOLE], second or [HOLE])
                return [a + b for a, b in pairs] if first or second else []
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, depth) + self.texts(other, depth)
            case ast.Name() | ast.Attribute() if depth:
                return self._assigned(node, depth - 1)
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.texts(value, depth)]
            case ast.Call(func=func) if depth:
                here = [f for f in _functions(self.tree) if f.name == _last(func)]
                there = [f for f in self.everywhere if f.name == _last(func)]
                return self._results(here or there[:1] * (len(there) == 1), depth - 1)
        return []

    def _results(self, functions: Iterable[Function], depth: int) -> list[str]:
        """Texts that functions return."""
        return [
            text
            for each in functions
            for node in ast.walk(each)
            if isinstance(node, ast.Return) and node.value is not None
            for text in replace(self, function=each, given=None).texts(node.value, depth)
        ]

    def _assigned(self, node: ast.Name | ast.Attribute, depth: int) -> list[str]:
        """Texts that a local name has in its function, or an attribute in its file."""
        if isinstance(node, ast.Name) and node.id in (self.given or {}):
            return [(self.given or {})[node.id]]
        name = ast.unparse(node)
        inside = self.function or self.tree
        if isinstance(node, ast.Attribute):
            inside = self.tree
            properties = [f for f in self.everywhere if f.name == node.attr and f.decorator_list]
            if found := self._results(properties, depth):
                return found
        return [
            text
            for each in ast.walk(inside)
            if isinstance(each, ast.Assign) and any(ast.unparse(t) == name for t in each.targets)
            for text in self.texts(each.value, depth)
        ]


def _descendants(trees: Iterable[ast.Module]) -> set[str]:
    """The bases and every class below them."""
    parents = {
        node.name: {_last(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = set(BASES)
    while more := {name for name, above in parents.items() if above & found} - found:
        found |= more
    return found


def _package(module: str) -> str:
    return module.partition("/")[0]


@functools.cache
def _functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def _calls(scope: ast.Module | Function) -> Iterator[ast.Call]:
    """Calls of a scope, without those of functions inside it, in the order of lines."""
    waiting: list[ast.AST] = [*ast.iter_child_nodes(scope)]
    found = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            continue
        if isinstance(node, ast.Call):
            found.append(node)
        waiting += ast.iter_child_nodes(node)
    return iter(sorted(found, key=lambda call: call.lineno))


def _returned(function: Function) -> str:
    return _last(function.returns) if function.returns is not None else ""


def _last(node: ast.expr) -> str:
    """The last part of a dotted name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
