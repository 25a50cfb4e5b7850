"""Corpora and their index: what is read, what is found, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_folder import data_file
from groupwise.environments.retrieval import Index, Passage, read_corpus
from groupwise.environments.retrieval.index import terms
from groupwise.errors import UsageError
from groupwise.prompts.generators.closed_world import make_world, questions

pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")

PASSAGES = [
    Passage("Paris", "The capital of France, on the Seine."),
    Passage("Lyon", "A city in France, on the Rhone."),
    Passage("서울", "서울은 대한민국의 수도이다."),
]


def test_passages_with_more_telling_terms_come_first() -> None:
    found = Index(PASSAGES).search("Which city is the capital of France?", top_k=2)
    assert [hit.passage.title for hit in found] == ["Paris", "Lyon"]
    assert found[0].score > found[1].score > 0


def test_a_query_without_known_terms_finds_nothing() -> None:
    assert Index(PASSAGES).search("quokka") == []


def test_korean_words_are_found_under_their_particles() -> None:
    assert Index(PASSAGES).search("대한민국에서 서울까지")[0].passage.title == "서울"
    assert terms("수도이다") == ["수도이다", "수도", "도이", "이다"]


def test_equal_scores_keep_the_order_of_the_corpus() -> None:
    same = [Passage(f"p{i}", "alpha beta") for i in range(20)]
    found = Index(same).search("alpha", top_k=5)
    assert [hit.passage.title for hit in found] == ["p0", "p1", "p2", "p3", "p4"]


def test_a_stored_index_is_mapped_and_gives_the_same_hits(tmp_path: Path) -> None:
    built = Index(PASSAGES, folder=tmp_path)
    again = Index(PASSAGES, folder=tmp_path)
    fresh = Index(PASSAGES)
    query = "the capital of France"
    assert built.search(query) == again.search(query) == fresh.search(query)
    assert len(list(tmp_path.iterdir())) == 1
    Index([*PASSAGES, Passage("", "more")], folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # another corpus has another index


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"title": "T", "text": "x"}\n{"text": "y"}\n', [("T", "x"), ("", "y")]),
        ("a.jsonl", json.dumps({"contents": '"T"\nx y'}) + "\n", [("T", "x y")]),
        ("a.json", '{"T": ["x ", "y"], "U": "z"}', [("T", "x y"), ("U", "z")]),
        ("a.json", '[{"title": "T", "paragraph_text": "x"}]', [("T", "x")]),
        (
            "a.json",
            '{"version": "1", "data": [{"title": "T", "paragraphs": [{"context": "x"}]}]}',
            [("T", "x")],
        ),
    ],
)
def test_published_forms_of_corpora_are_read(tmp_path, name, content, expected) -> None:
    (tmp_path / name).write_text(content)
    assert [tuple(passage) for passage in read_corpus(str(tmp_path / name))] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "x"}\n{"text": \n', ":2: is not JSON"),
        (b'{"text": "x"}\n{"text": "\xff"}\n', ":2: is not UTF-8 text"),
        (b'{"title": "x"}\n', "row 1: must have a text"),
        (b'{"text": 7}\n', "row 1: must have a text"),
        (b"", r"corpus = .*: contains no rows"),
    ],
)
def test_broken_corpora_are_refused_with_their_row(tmp_path, content, message) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_corpus(str(tmp_path / "a.jsonl"))


def test_a_corpus_that_is_missing_is_named_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"corpus = .*none.jsonl': no such file"):
        read_corpus(str(tmp_path / "none.jsonl"))


def test_one_hop_questions_find_the_page_that_answers_them() -> None:
    world = make_world(3, size=300)
    index = Index([Passage(title, text) for title, text in world.pages.items()])
    asked = questions(world, count=100, hops=[1])
    right = 0
    for prompt in asked:
        ((subject, _),) = prompt.columns["chain"]
        found = [hit.passage for hit in index.search(str(prompt), top_k=3)]
        right += found[0].title == subject
        assert any(
            page.title == subject and (prompt.answer or "none") in page.text for page in found
        )
    assert right >= 85


@pytest.mark.parametrize("name", ["hotpotqa/corpus.json", "musique/corpus.json"])
def test_real_corpora_are_read_and_searched(name: str) -> None:
    path = data_file(name)
    passages = read_corpus(str(path))
    assert len(passages) > 900
    first = passages[0]
    assert Index(passages).search(first.title + " " + first.text[:80])[0].passage == first
