"""Code blocks of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def blocks(text: str, *languages: str) -> Iterator[str]:
    """Fenced blocks in one of these languages."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.M):
        if language in languages:
            yield block


def commands(text: str) -> Iterator[list[str]]:
    """Words of every `groupwise` command in the blocks and in backticks of a page."""
    text = re.sub(r"\\\n\s*", "", text)
    found = [*blocks(text, "sh")]
    found += re.findall(r"`(groupwise [^`]+)`", text)
    for block in found:
        for words in commands_of(block):
            if words[:1] == ["groupwise"] and "…" not in words[1]:
                yield words[1:]


def commands_of(block: str) -> Iterator[list[str]]:
    """Words of every line; a quotation may go over several lines."""
    open_lines = ""
    for line in block.splitlines():
        open_lines += line + "\n"
        try:
            words = shlex.split(open_lines, comments=True)
        except ValueError:  # no closing quotation yet
            continue
        open_lines = ""
        yield words
    assert not open_lines.startswith("groupwise"), f"no closing quotation: {open_lines}"
