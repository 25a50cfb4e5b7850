"""Pages name files, folders, modules and pages that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "groupwise"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PLACES = (ROOT, PACKAGE, ROOT / "docs")
"""Where a path in a page may start."""

MADE = (
    "runs/",
    "critic/",
    "token_reward/",
    "final/",
    "checkpoints/",
    "rollouts/",
    "journal/",
    "results/",
    "suspects/",
    "dist/",
    "best/",
)
"""Folders that a run, an experiment or a build makes."""


def dead_links(text: str, folder: Path) -> Iterator[str]:
    """Relative links of a page that lead nowhere."""
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        if not (folder / link).exists():
            yield link


def missing_paths(text: str) -> Iterator[str]:
    """Paths in backticks with a folder in front, or ending in .py, that are nowhere."""
    for name in re.findall(r"`([\w./-]+)`", text):
        looks = name.endswith((".py", ".cpp", "/")) or re.fullmatch(r"(tests|src|docs)/.+", name)
        if looks and not name.startswith((*MADE, ".", "/")):
            if not any((place / name).exists() for place in PLACES):
                yield name


def missing_modules(text: str) -> Iterator[str]:
    """Dotted names below groupwise whose module does not exist."""
    for name in re.findall(r"\bgroupwise(?:\.[a-z_]+)+", text):
        parts = name.split(".")[1:]
        folder = PACKAGE
        for number, part in enumerate(parts):
            if (folder / part).is_dir():
                folder = folder / part
            elif (folder / f"{part}.py").exists():
                break
            else:
                last = number == len(parts) - 1
                init = (folder / "__init__.py").read_text(encoding="utf-8")
                if not (last and re.search(rf"\b{part}\b", init)):
                    yield name
                break


def broken_lists(text: str) -> Iterator[str]:
    """Paragraphs and tables that should continue an item: the site wants them indented by four."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"\n\n( {1,3}\S[^\n]{0,40})", prose)


def offenders(check) -> list[str]:
    """What a check finds in the pages, each with its page."""
    return [
        f"{page.relative_to(ROOT)}: {found}"
        for page in PAGES
        for found in check(page.read_text(encoding="utf-8"))
    ]


def test_links_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in dead_links(page.read_text(encoding="utf-8"), page.parent)
    ]
    assert dead == []


def test_files_and_folders_that_pages_name_exist() -> None:
    assert offenders(missing_paths) == []


def test_modules_that_pages_name_exist() -> None:
    assert offenders(missing_modules) == []


def test_items_of_lists_continue_on_the_site() -> None:
    assert offenders(broken_lists) == []


def test_the_checks_can_fail() -> None:
    assert list(broken_lists("* a\n\n  b\n\n    c")) == ["  b"]
    assert list(dead_links("[a](b.md) [c](https://example.org)", ROOT)) == ["b.md"]
    assert list(missing_paths("`trainer.py` `training/trainer.py` `models/`")) == ["trainer.py"]
    assert list(missing_modules("groupwise.logs.printable and groupwise.rewards.verifier")) == [
        "groupwise.logs.printable"
    ]


def test_messages_quoted_by_troubleshooting_are_written_by_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        message
        for title in re.findall(r"^### (`.*`)$", page, flags=re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", title)
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert len(quoted) > 5 and [message for message in quoted if message not in code] == []
