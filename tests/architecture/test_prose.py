"""Words that sources and pages avoid: private dialect for which the field has a term."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.cpp")),
    *sorted((ROOT / "src").rglob("*.toml")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
]
BETTER = {
    "nought": "0",
    "on end": "consecutive",
    "so many": "the number, by its name",
    "of our own": "its own, or the name of the thing",
    "told apart": "distinguished",
    "goes on with": "continues",
    "go on with": "continue",
    "hears of": "is called with",
    "steadfast": "non-blocking",
    "laws": "properties",
}
"""What to avoid, and what to write."""

PATTERN = re.compile(rf"\b({'|'.join(BETTER)})\b", flags=re.IGNORECASE)
EXAMPLES = re.compile(r"^\| not \| but \|$.*?^$", flags=re.MULTILINE | re.DOTALL)
"""The table of CONTRIBUTING.md that shows what to avoid."""


def dialect(text: str) -> list[str]:
    """Lines with a word to avoid, each with what to write instead."""
    return [
        f"{line.strip()!r}: not {found[0]!r} but {BETTER[found[0].lower()]!r}"
        for line in EXAMPLES.sub("", text).splitlines()
        for found in PATTERN.finditer(line)
    ]


def test_sources_and_pages_use_the_terms_of_the_field() -> None:
    assert [
        f"{path.relative_to(ROOT)}: {line}"
        for path in FILES
        for line in dialect(path.read_text(encoding="utf-8"))
    ] == []


def test_the_check_can_fail() -> None:
    assert dialect("three steps on end") == ["'three steps on end': not 'on end' but 'consecutive'"]
    assert dialect("depends on endings") == []
    assert dialect("| not | but |\n|---|---|\n| hears of | is called with |\n\n") == []
