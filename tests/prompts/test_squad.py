"""Files in SQuAD's form are rows of questions, and passages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_folder import data_file
from groupwise.environments.retrieval import Passage, read_corpus
from groupwise.errors import UsageError
from groupwise.prompts.rows import read_rows

ROME = {"text": "Rome", "answer_start": 0}
KNOWN = {"id": "a", "question": "Where?", "answers": [ROME, ROME, {"text": "in Rome"}]}
IMPOSSIBLE = {"question": "When?", "answers": [], "is_impossible": True}


def squad(folder: Path, *articles: Any) -> str:
    path = folder / "squad.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}), encoding="utf-8")
    return str(path)


def article(*questions: Any, **changed: Any) -> dict[str, Any]:
    page = {"context": "Rome is a city.", "qas": list(questions)} | changed
    return {"title": "Italy", "paragraphs": [page]}


def test_every_question_is_a_row_and_every_paragraph_a_passage(tmp_path: Path) -> None:
    path = squad(tmp_path, article(KNOWN, IMPOSSIBLE))
    around = {"title": "Italy", "context": "Rome is a city."}
    assert read_rows(path) == [
        {"id": "a", "question": "Where?", "answer": ["Rome", "in Rome"], **around},
        {"question": "When?", "answer": "unknown", **around},
    ]
    assert read_corpus(path) == [Passage("Italy", "Rome is a city.")]
    assert len(read_corpus(squad(tmp_path, article(), {"paragraphs": []}))) == 1


FIRST = ", article 2, paragraph 1"


@pytest.mark.parametrize(
    ("broken", "said", "of_corpus"),
    [
        ("Italy", ", article 2: must have a list `paragraphs`", True),
        ({"title": "Italy"}, ", article 2: must have a list `paragraphs`", True),
        ({"paragraphs": [None]}, f"{FIRST}: must have a text in `context`", True),
        (article(context=None), f"{FIRST}: must have a text in `context`", True),
        ({"paragraphs": [{"qas": []}]}, f"{FIRST}: must have a text in `context`", True),
        (article(context=" "), f"{FIRST}: must have a text in `context`", True),
        (article(qas={"a": 1}), f"{FIRST}: must have a list `qas`", False),
        (article("Where?"), f"{FIRST}, question 1: must have a text in `question`", False),
        (article(KNOWN, KNOWN | {"question": ""}), f"{FIRST}, question 2: must have a", False),
        (article({"question": "Who?"}), f"{FIRST}, question 1: must have a list `answers`", False),
        (article(KNOWN | {"answers": []}), "question 1: must have `answers`, each with", False),
        (article(KNOWN | {"answers": ["Rome"]}), "question 1: must have `answers`, each", False),
    ],
)
def test_a_broken_entry_is_named_by_its_place(
    broken: Any, said: str, of_corpus: bool, tmp_path: Path
) -> None:
    path = squad(tmp_path, article(KNOWN), broken)
    with pytest.raises(UsageError, match=f"squad.json.*{said}"):
        read_rows(path)
    if not of_corpus:
        return
    with pytest.raises(UsageError, match=f"corpus = .*squad.json'{said}"):
        read_corpus(path)


@pytest.mark.parametrize("name", ["squad/dev-v2.0-part.json", "korquad/KorQuAD_v1.0_dev.json"])
def test_published_files_are_read_whole(name: str) -> None:
    path = data_file(name)
    file = json.loads(path.read_text(encoding="utf-8"))
    asked = [q for a in file["data"] for p in a["paragraphs"] for q in p["qas"]]
    rows = read_rows(str(path))
    assert [row["question"] for row in rows] == [q["question"] for q in asked]
    impossible = [bool(q.get("is_impossible")) for q in asked]
    assert [row["answer"] == "unknown" for row in rows] == impossible
