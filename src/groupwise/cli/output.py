"""Printing for commands: tables, text made safe for a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path


def command_name() -> str:
    """How to run this command again: by its path if it is not on PATH."""
    here = Path(sys.argv[0])
    return str(here) if here.name == "groupwise" and not shutil.which("groupwise") else "groupwise"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; the last one may be of any length, and is wrapped on a terminal."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings) - 1)]
    indent = sum(widths) + 2 * len(widths)
    for row in (headings, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(wrapped(visible("  ".join([*cells, row[-1]]).rstrip()), indent=indent))


def wrapped(line: str, *, indent: int) -> str:
    """A line that is wrapped between words on a terminal, with the rest indented.

    A column of fewer than 20 characters is too narrow for words; the rest then begins at 4.
    """
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if not len(line) > room > 0:
        return line
    rest = " " * (indent if room - indent >= 20 else 4)
    return textwrap.fill(line, room, subsequent_indent=rest, break_on_hyphens=False)


def visible(text: str) -> str:
    """Text as one line without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def drop_output() -> None:
    """Discard pending output, so that Python does not fail when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
