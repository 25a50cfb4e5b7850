"""Passages of a corpus, from the forms in which corpora are published, and what finds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from groupwise.errors import UsageError
from groupwise.prompts.generators import closed_world
from groupwise.prompts.rows import read_rows
from groupwise.prompts.squad import is_squad, paragraphs


class Passage(NamedTuple):
    """One passage: its title, which may be empty, and its text."""

    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as retrieval servers return them."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text


class Hit(NamedTuple):
    """A passage that was found, and its score; larger is better."""

    passage: Passage
    score: float


class Finder(Protocol):
    """Finds passages for a query: an index, or a client of a server."""

    def search(self, query: str, *, top_k: int = 3) -> list[Hit]: ...


def read_corpus(source: str) -> list[Passage]:
    """The passages of a file, each once, in its order.

    Supported formats are rows with `contents` (title in the first line), with `title` and `text`
    (or `paragraph_text`), or with `text` alone; a JSON object from title to text or sentences; and
    SQuAD's form, whose paragraphs are the passages.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, a folder of `datasets`, a hub name, or
            "closed_world" for the pages of the generator of that name.

    Raises:
        UsageError: no such file, a corrupt line (with its number), a row without text, no passages.
    """
    path = Path(source).expanduser()
    if source == "closed_world" and not path.exists():
        worlds = closed_world.splits().values()
        return [Passage(title, text) for world in worlds for title, text in world.pages.items()]
    whole = _json_object(path) if path.suffix == ".json" and path.is_file() else None
    if whole is not None:
        found = _of_object(whole, source)
    else:
        try:
            rows = read_rows(source)
        except UsageError as error:
            raise UsageError(str(error).replace("data = ", "corpus = ", 1)) from None
        numbered = enumerate(rows, start=1)
        found = [_of_row(row, f"corpus = {source!r}, row {number}") for number, row in numbered]
    passages = list(dict.fromkeys(found))
    if not passages:
        raise UsageError(f"corpus = {source!r}: contains no passages.")
    return passages


def _json_object(path: Path) -> Mapping[str, Any] | None:
    """The object that a JSON file holds; None where it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"corpus = {str(path)!r}: is not JSON ({error}).") from None
    return value if isinstance(value, dict) else None


def _of_object(value: Mapping[str, Any], source: str) -> Iterable[Passage]:
    where = f"corpus = {source!r}"
    if is_squad(value):
        return [Passage(each.title, each.text) for each in paragraphs(value, where)]
    return [
        _of_row({"title": key, "text": text}, f"{where}, {key!r}") for key, text in value.items()
    ]


def _of_row(row: Mapping[str, Any], where: str) -> Passage:
    title = str(row.get("title") or "")
    text = row.get("contents", row.get("text", row.get("paragraph_text")))
    if isinstance(text, list):
        text = "".join(map(str, text))
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where}: must have a text in `text` or `contents`.")
    if not title and "contents" in row and "\n" in text:
        title, _, text = text.partition("\n")
    return Passage(title=title.strip().strip('"'), text=text.strip())
