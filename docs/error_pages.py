"""The pages of error messages in the reference (`docs/pages.py`)."""

from __future__ import annotations

import ast
import functools
import inspect
import re

from markup import anchor, cell, file_name, plain
from messages import PACKAGE, Message, messages

from groupwise.algorithms.describe import slot_settings
from groupwise.config.reference import reference
from groupwise.errors import ModelError, RewardError, RunError, UsageError


def errors() -> str:
    """What kinds of errors there are, and the pages of their messages."""
    lines = [
        "# Error messages",
        "",
        "A message says which setting is wrong, what must hold, and what to type instead; `…` "
        "stands for values of the run. To find a message, search this site for a part of it "
        "without values. A value with the wrong type or out of range raises "
        "`setting = value: must be …`; [the settings](settings.md) list the values of each.",
        "",
        "| part of the package | messages | what it is |",
        "|---|---|---|",
    ]
    for name, inside in _by_package().items():
        link = f"[{name}](errors/{file_name(name)}.md)"
        lines.append(f"| {link} | {len(inside)} | {cell(_about_module(name))} |")
    lines += ["", "| kind | exit code | what it means |", "|---|---|---|"]
    for kind in (UsageError, RewardError, ModelError, RunError):
        said = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
        lines.append(f"| `{kind.__name__}` | {kind.exit_code} | {cell(said)} |")
    return "\n".join(lines) + "\n"


def error_pages() -> dict[str, str]:
    """A page for the messages of every package."""
    return {f"errors/{file_name(name)}": errors_of(name) for name in _by_package()}


def errors_of(package: str) -> str:
    """The messages of a package by module, with links to the settings that they name."""
    about = plain(_about_module(package))
    lines = [f"# Errors: {package}", "", f"[Error messages](../errors.md) · {about}"]
    module = ""
    for each in _by_package()[package]:
        if each.module != module:
            module = each.module
            said = _about_module(module.removesuffix(".py"))
            lines += ["", f"## `{module}`", "", plain(said), ""]
        lines.append(f"* {with_settings(each.text, '../settings')} (`{each.kind}`)")
    return "\n".join(lines) + "\n"


@functools.cache
def _by_package() -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = {}
    for message in messages()[0]:
        package = message.module.partition("/")[0].removesuffix(".py")
        found.setdefault(package, []).append(message)
    return found


def _about_module(name: str) -> str:
    """The first sentence of a module's or package's docstring."""
    place = PACKAGE / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(said.partition("\n\n")[0].split())


@functools.cache
def _settings() -> set[str]:
    return {*reference(), *slot_settings()}


def with_settings(text: str, folder: str) -> str:
    """A message as Markdown; the settings that it names are links to the pages in a folder."""

    def link(match: re.Match[str]) -> str:
        section, _, name = match[0].rpartition(".")
        if match[0] not in _settings():
            return plain(match[0])
        return f"[{match[0]}]({folder}/{file_name(section)}.md#{anchor(name)})"

    pieces = re.split(r"(\b[a-z_]+(?:\.[a-z_]+)+\b)", " ".join(text.split()))
    pieces[::2] = [plain(piece) for piece in pieces[::2]]
    pieces[1::2] = [re.sub(r".+", link, piece) for piece in pieces[1::2]]
    return "".join(pieces)
