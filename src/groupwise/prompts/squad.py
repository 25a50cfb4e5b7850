"""SQuAD's form: a JSON object of articles, whose paragraphs have questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from groupwise.errors import UsageError

UNKNOWN = "unknown"
"""The answer to a question that its paragraph does not answer."""


class Paragraph(NamedTuple):
    """A paragraph: the title of its article, its text and questions, and its place in the file."""

    title: str
    text: str
    questions: list[Any]
    where: str


def is_squad(value: Any) -> bool:
    """Whether the content of a JSON file has SQuAD's form.

    Example:
        >>> is_squad({"version": "1.1", "data": []}), is_squad({"Paris": ["A city."]})
        (True, False)
    """
    return isinstance(value, Mapping) and "version" in value and isinstance(value.get("data"), list)


def paragraphs(value: Mapping[str, Any], where: str) -> Iterator[Paragraph]:
    """The paragraphs of a file in SQuAD's form.

    Args:
        where: names the file in messages.

    Raises:
        UsageError: an article without paragraphs, or a paragraph without a text.
    """
    for number, article in enumerate(value["data"], start=1):
        place = f"{where}, article {number}"
        for count, paragraph in enumerate(_items(article, "paragraphs", place), start=1):
            inside = f"{place}, paragraph {count}"
            text = paragraph.get("context") if isinstance(paragraph, Mapping) else None
            if not isinstance(text, str) or not text.strip():
                raise UsageError(f"{inside}: must have a text in `context`.")
            questions = paragraph.get("qas") or []
            yield Paragraph(str(article.get("title") or ""), text, questions, inside)


def question_rows(value: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """A row for every question: `id`, `question`, `answer`, `title` and `context`.

    `answer` is the list of different answers; "unknown" where the question is impossible.

    Raises:
        UsageError: a part of the file is missing; the message names article and paragraph.

    Example:
        >>> asked = {"question": "Where?", "answers": [{"text": "here"}, {"text": "here"}]}
        >>> page = {"context": "It is here.", "qas": [asked]}
        >>> file = {"version": "1.1", "data": [{"title": "It", "paragraphs": [page]}]}
        >>> question_rows(file, "squad.json")[0]["answer"]
        ['here']
    """
    rows = []
    for paragraph in paragraphs(value, where):
        asked = _items({"qas": paragraph.questions}, "qas", paragraph.where)
        for number, question in enumerate(asked, start=1):
            place = f"{paragraph.where}, question {number}"
            text = question.get("question") if isinstance(question, Mapping) else None
            if not isinstance(text, str) or not text.strip():
                raise UsageError(f"{place}: must have a text in `question`.")
            row = {"question": text, "answer": _answer(question, place)}
            row |= {"title": paragraph.title, "context": paragraph.text}
            rows.append(({"id": question["id"]} if "id" in question else {}) | row)
    return rows


def _answer(question: Mapping[str, Any], where: str) -> list[str] | str:
    if question.get("is_impossible"):
        return UNKNOWN
    found = [
        each.get("text") if isinstance(each, Mapping) else None
        for each in _items(question, "answers", where)
    ]
    if not found or not all(isinstance(text, str) for text in found):
        raise UsageError(
            f"{where}: must have `answers`, each with a `text`, or `is_impossible` = true."
        )
    return list(dict.fromkeys(map(str, found)))


def _items(value: Any, name: str, where: str) -> list[Any]:
    """The list of this name in an object of the file."""
    found = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(found, list):
        raise UsageError(f"{where}: must have a list `{name}`.")
    return found
