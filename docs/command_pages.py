"""The pages of commands in the reference (`docs/pages.py`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from markup import anchor, cell, file_name, plain

from groupwise.cli import app


def commands() -> str:
    """Every command with its first sentence."""
    lines = ["# Commands", "", "`groupwise COMMAND --help` prints the same as the pages below.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    for name, each in _every().items():
        said = " ".join((each.help or "").partition("\n\n")[0].split())
        lines.append(f"| [{name}](commands/{file_name(name)}.md) | {cell(said)} |")
    return "\n".join(lines) + "\n"


def command_pages() -> dict[str, str]:
    """A page for every command."""
    return {f"commands/{file_name(name)}": command(name, each) for name, each in _every().items()}


def command(name: str, command: Any) -> str:
    """A command with its arguments and options."""
    lines = [f"# {name}", "", "[Commands](../commands.md)", ""]
    lines += [plain(" ".join(p.split())) + "\n" for p in (command.help or "").split("\n\n")]
    parameters = [each for each in command.params if each.name != "help"]
    words = [_shown(each) for each in parameters if each.param_type_name == "argument"]
    needed = [_shown(each) for each in parameters if each.required and _is_option(each)]
    rest = (
        ["[OPTIONS]"] if any(_is_option(each) and not each.required for each in parameters) else []
    )
    called = ["COMMAND"] if getattr(command, "commands", None) else []
    usage = " ".join([name, *words, *needed, *rest, *called])
    lines += ["```sh", usage, "```", ""]
    for each in parameters:
        lines += [*_parameter(each), ""]
    return "\n".join(lines) + "\n"


@functools.cache
def _every() -> dict[str, Any]:
    return dict(_commands(typer.main.get_command(app), "groupwise"))


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inside: Mapping[str, Any] = getattr(command, "commands", {})
    if not inside or command.params:
        yield name, command
    for key, each in inside.items():
        yield from _commands(each, f"{name} {key}")


def _is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


def _shown(parameter: Any) -> str:
    """A parameter as the usage of its command shows it."""
    if not _is_option(parameter):
        name = _argument(parameter)
        several = "..." if parameter.nargs < 0 and not name.endswith("...") else ""
        return f"{name}{several}" if parameter.required or name[0] == "[" else f"[{name}{several}]"
    return f"{parameter.opts[0]} {_value(parameter)}".strip()


def _argument(parameter: Any) -> str:
    return parameter.metavar or (parameter.name or "").upper()


def _value(parameter: Any) -> str:
    """What stands behind an option: its placeholder, its choices, or a number."""
    if getattr(parameter, "is_flag", False):
        return ""
    described = parameter.type_descriptor
    choices = "|".join(map(str, described.choices or ())) if described.is_choice else ""
    kind = "path" if described.is_path else parameter.bare_type()
    placeholder = {"int": "N", "float": "X", "str": "TEXT"}.get(kind, kind.upper())
    return parameter.metavar or choices or placeholder


def _parameter(parameter: Any) -> Iterator[str]:
    value = _value(parameter) if _is_option(parameter) else ""
    names = parameter.opts if _is_option(parameter) else [_argument(parameter)]
    title = ", ".join(f"`{name}{' ' + value if value else ''}`" for name in names)
    default = parameter.default
    known = type(default) in (int, float) or (isinstance(default, str | Path) and str(default))
    notes = "Required." if parameter.required else f"Default: `{default}`." if known else ""
    yield f"## {title} {{ #{anchor(parameter.name or '')} }}"
    yield ""
    yield f"{plain(getattr(parameter, 'help', None) or '')} {notes}".strip()
