"""Korean pages keep in step with the English ones: code blocks, headings, links, terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    "docs/ko/README.md": "README.md",
    "docs/ko/competition.md": "docs/competition.md",
}
"""Korean pages by their English originals."""


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code(page: str) -> list[str]:
    """Fenced blocks, in order."""
    return re.findall(r"^```.*?^```$", text(page), flags=re.DOTALL | re.M)


def levels(page: str) -> list[int]:
    """Depth of every heading, in order."""
    prose = re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.M)
    return [len(marks) for marks in re.findall(r"^(#+) ", prose, flags=re.M)]


@pytest.mark.parametrize("korean", PAIRS)
def test_code_and_headings_are_those_of_the_english_page(korean: str) -> None:
    english = PAIRS[korean]
    assert code(korean) == code(english)
    assert levels(korean) == levels(english)


@pytest.mark.parametrize("korean", PAIRS)
def test_tables_name_the_same_commands(korean: str) -> None:
    found = [
        re.findall(r"^\| (`[^|]*`) \|", text(page), flags=re.M) for page in (korean, PAIRS[korean])
    ]
    assert found[0] == found[1]


def test_figures_are_those_of_the_english_page() -> None:
    measured = re.findall(r"\d+\.\d+", text("README.md").split("## Quick start")[0])
    assert all(figure in text("docs/ko/README.md") for figure in measured), measured


def test_the_glossary_has_every_term() -> None:
    def terms(page: str) -> list[str]:
        glossary = text(page).split("## Glossary")[-1]
        return [term for term in re.findall(r"^\| ([^|]+?) \|", glossary, flags=re.M)][1:]

    english = [term for term in terms("CONTRIBUTING.md") if set(term) != {"-"}]
    assert [term for term in terms("docs/ko/glossary.md") if set(term) != {"-"}] == english
