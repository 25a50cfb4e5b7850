"""Printing for commands: tables, text made safe for a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def command_name() -> str:
    """How to run this command again: by its path if it is not on PATH."""
    here = Path(sys.argv[0])
    return str(here) if here.name == "groupwise" and not shutil.which("groupwise") else "groupwise"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; the last one may be of any length."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings) - 1)]
    for row in (headings, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(visible("  ".join([*cells, row[-1]]).rstrip()))


def visible(text: str) -> str:
    """Text as one line without control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def drop_output() -> None:
    """Discard pending output, so that Python does not fail when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
