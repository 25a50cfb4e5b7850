"""Share of the passages that a question needs among the first k, the question itself as query.

    python studies/search/recall.py DATA

DATA holds the folders `hotpotqa`, `musique`, `squad` and `korquad` with the published files.
Of KorQuAD, every eighth question is asked.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from groupwise.environments.retrieval import Index, Passage, read_corpus

KS = (1, 3, 5, 10)
FILES = {
    "hotpotqa": "corpus.json",
    "musique": "corpus.json",
    "squad": "dev-v2.0-part.json",
    "korquad": "KorQuAD_v1.0_dev.json",
}
Question = tuple[str, str, set[Passage]]
"""What it is about, the question, and the passages that it needs."""


def questions(name: str, folder: Path, passages: list[Passage]) -> Iterator[Question]:
    """The questions of a data set that have an answer."""
    if name == "hotpotqa":
        by_title = {passage.title: passage for passage in passages}
        for row in json.loads((folder / "questions.json").read_text()):
            titles = {title for title, _ in row["supporting_facts"]}
            yield f"{len(titles)} hops", row["question"], {by_title[title] for title in titles}
    elif name == "musique":
        for row in json.loads((folder / "questions.json").read_text()):
            needed = [part for part in row["paragraphs"] if part["is_supporting"]]
            pages = {Passage(part["title"], part["paragraph_text"]) for part in needed}
            yield f"{row['id'][0]} hops", row["question"], pages
    else:
        asked = [
            (entry["question"], {Passage(article["title"], paragraph["context"])})
            for article in json.loads((folder / FILES[name]).read_text())["data"]
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
            if not entry.get("is_impossible")
        ]
        for question, page in asked[:: 8 if name == "korquad" else 1]:
            yield "1 hop", question, page


def main(data: Path) -> None:
    print("| | " + " | ".join(f"k = {k}" for k in KS) + " |\n|---" + "|---" * len(KS) + "|")
    for name, file in FILES.items():
        passages = read_corpus(str(data / name / file))
        index, shares = Index(passages), defaultdict(list)
        for kind, question, needed in questions(name, data / name, passages):
            assert needed <= set(passages), question
            found = [hit.passage for hit in index.search(question, top_k=max(KS))]
            shares[kind].append([len(needed & set(found[:k])) / len(needed) for k in KS])
        for kind, rows in sorted(shares.items()):
            means = " | ".join(
                f"{sum(column) / len(rows):.2f}" for column in zip(*rows, strict=True)
            )
            print(f"| {name}, {kind} ({len(rows)} of {len(passages)} passages) | {means} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
