"""Markdown of the generated pages (`docs/pages.py`)."""

from __future__ import annotations

import re


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def plain(text: str) -> str:
    """Plain text as Markdown; what stands between backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [
        re.sub(r"([*\[\]])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]
    ]
    return "".join(pieces)


def anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())


def file_name(name: str) -> str:
    """The name of a page: that of a setting, algorithm, function or command."""
    name = re.sub(r"^groupwise (?=.)|\.N$", "", name)
    return re.sub(r"[^A-Za-z0-9_.@+-]", "-", name) or "top-level"
