"""Markdown of the generated pages (`docs/pages.py`)."""

from __future__ import annotations

import json
import re
import textwrap


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


def described(page: str) -> str:
    """A page with its first sentence as its description, which searches and previews show."""
    head, body = re.fullmatch(r"(?:---\n(.*?)---\n)?(.*)", page, flags=re.DOTALL).groups()
    prose = re.sub(r"^```.*?^```$", "", body, flags=re.DOTALL | re.M)
    for paragraph in re.split(r"\n{2,}", prose):
        text = re.sub(r"^\[[^\]]*\]\(\.\./[^)]*\)(?: · )?", "", " ".join(paragraph.split()))
        if len(text) > SHORTEST and not re.match(r"[#|!<*]", text):
            said = re.split(r"(?<=[a-z0-9)]{3}\.) (?=[A-Z])", _words(text))[0].rstrip(":")
            description = textwrap.shorten(said, LONGEST, placeholder=" …")
            meta = f"description: {json.dumps(description, ensure_ascii=False)}\n"
            return f"---\n{head or ''}{meta}---\n{body}"
    return page


SHORTEST, LONGEST = 14, 200
"""Lengths of a description in characters; shorter paragraphs are notes below a title."""


def _words(text: str) -> str:
    """Markdown without links, emphasis and escapes."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*\*|`(?:\{ \.whole \})?", "", text)
    return re.sub(r"\\([*\[\]])", r"\1", text).replace("&lt;", "<")
