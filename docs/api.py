"""Writes docs/api.md, the page of the public names: `python docs/api.py`, or `make api`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import groupwise
from groupwise.algorithms import ALGORITHMS
from groupwise.prompts.answers import ANSWERS
from groupwise.prompts.sources import GENERATORS
from groupwise.registry import Registry
from groupwise.rewards import REWARDS

PAGE = Path(__file__).parent / "api.md"

HEAD = """# Public names

Names on this page change only with an entry in the changelog. Everything else is internal.
`make api` writes the page from the code, and a test fails where the two differ.
"""

MODULES = {
    "groupwise": "Training, and the registries of functions that algorithms consist of.",
    "groupwise.types": "Data classes of the stages of a step, and the protocols of the loop.",
    "groupwise.registry": "Registries, and functions with their settings.",
    "groupwise.errors": "Exceptions.",
    "groupwise.testing": "Checks for your own rewards and engines.",
    "groupwise.rewards": "Helpers for your own reward functions.",
    "groupwise.experiments": "Paired comparisons from Python.",
    "groupwise.integrations.trl": "TRL scripts on groupwise, and advantages in TRL.",
}

ONLY = {
    "groupwise.rewards": (
        "REWARDS", "verifier", "in_process", "own_worker", "extract_answer", "math_equal",
    )
}  # fmt: skip
"""The public part of a module whose other exports serve its neighbours."""

MOST_FIELDS = 24
"""A data class with more of them has a page of its own."""

REGISTRIES: dict[str, Registry] = {
    **{
        name: getattr(groupwise, name)
        for name in groupwise.__all__
        if name.isupper() and name != "ALGORITHMS"
    },
    "REWARDS": REWARDS,
    "ANSWERS": ANSWERS,
    "GENERATORS": GENERATORS,
}


def public_names(module: ModuleType) -> tuple[str, ...]:
    """The names of a module that this page lists: `__all__`, or else what the module defines."""
    if module.__name__ in ONLY:
        return ONLY[module.__name__]
    if hasattr(module, "__all__"):
        return tuple(module.__all__)
    names = [name for name, _ in _definitions(module) if not name.startswith("_")]
    return tuple(one for one in names if not isinstance(getattr(module, one), TypeVar))


def _definitions(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Top-level definitions in the order of the source, each with the string that follows it."""
    body = ast.parse(inspect.getsource(module)).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        note = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            note = str(after.value.value)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, note
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, note


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line and safe inside a table."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    found = re.match(r"(?:`[^`]*`|[^`])*?\.(?= )", paragraph)  # no full stop inside code ends it
    sentence = (found[0] if found else paragraph).rstrip(".:") + "."
    return sentence.replace("|", "\\|") if paragraph else ""


def parameters(function: Any) -> str:
    """The parameters of a function with their defaults, without annotations."""
    found = []
    starred = False
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            found.append("*")
        starred = starred or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        has_default = one.default is not one.empty and prefix == ""
        plain = isinstance(one.default, str | int | float | tuple | None)
        default = f"={one.default!r}" if plain else "=…"
        found.append(prefix + one.name + (default if has_default else ""))
    return "(" + ", ".join(found).replace("|", "\\|") + ")"


def members(value: type) -> list[str]:
    """The fields of a data class, or the methods of a protocol."""
    if getattr(value, "_is_protocol", False):
        return [
            f"{name}{parameters(method)}" if inspect.isfunction(method) else name
            for name, method in vars(value).items()
            if not name.startswith("_") or name == "__call__"
        ]
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value) if not one.name.startswith("_")]
        return names if len(names) <= MOST_FIELDS else []
    return []


def row(name: str, value: Any, note: str) -> str:
    """A line of the table of a module."""
    if inspect.isclass(value):
        parts = ", ".join(f"`{one}`" for one in members(value))
        text = first_sentence(inspect.getdoc(value) or "")
        return f"| `{name}` | {text}{f' {parts}' if parts else ''} |"
    if inspect.isfunction(value):
        text = first_sentence(inspect.getdoc(value) or "")
        return f"| `{name}` | {text} `{name}{parameters(value)}` |"
    kind = getattr(value, "kind", None) if isinstance(value, Registry) else None
    text = first_sentence(note) or (f"Registry; its entries are below ({kind})." if kind else "")
    if value is ALGORITHMS:
        text = "The table of algorithms: `groupwise algorithms` prints it."
    return f"| `{name}` | {text} |"


def module_section(name: str, about: str) -> list[str]:
    """The section of one module."""
    module = import_module(name)
    notes = dict(_definitions(module))
    rows = [row(one, getattr(module, one), notes.get(one, "")) for one in public_names(module)]
    return [f"## {name}", "", about, "", "| name | what it is |", "|---|---|", *rows, ""]


def registry_section(name: str, registry: Registry) -> list[str]:
    """The registered functions of one kind."""
    rows = []
    for one in registry.names():
        function = registry.get(one)
        text = first_sentence(inspect.getdoc(function) or "")
        rows.append(f"| `{one}` | {text} `{one}{parameters(function)}` |")
    return [f"### {name}", "", "| function | what it is |", "|---|---|", *rows, ""]


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for name, about in MODULES.items():
        lines += module_section(name, about)
    lines += [
        "## Registered functions",
        "",
        "Parameters before the `*` are data; those after it are settings of a recipe.",
        "",
    ]
    for name, registry in REGISTRIES.items():
        lines += registry_section(name, registry)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
