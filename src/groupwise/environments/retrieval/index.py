"""BM25 over the passages of a corpus."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.environments.retrieval.corpus import Finder, Hit, Passage
from groupwise.errors import UsageError, install_command

_WORD = re.compile(r"[^\W_]+")
_HANGUL = re.compile("[\uac00-\ud7a3]+")


def make_index(
    passages: Sequence[Passage],
    *,
    encoder: str,
    folder: Path | None,
    query_prefix: str = "",
    passage_prefix: str = "",
) -> Finder:
    """A dense index where an encoder is named, else one of terms.

    Raises:
        UsageError: prefixes without an encoder, or what the index raises.
    """
    if not encoder:
        for name, value in (("query_prefix", query_prefix), ("passage_prefix", passage_prefix)):
            if value:
                raise UsageError(f"{name} = {value!r}: needs an encoder; BM25 has no prefixes.")
        return Index(passages, folder=folder)
    # Loads torch and transformers.
    from groupwise.environments.retrieval.dense import DenseIndex

    return DenseIndex(
        passages,
        encoder=encoder,
        folder=folder,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )


def terms(text: str) -> list[str]:
    """The terms of a text: words in lower case, and pairs of letters of Korean words.

    A Korean word carries its particles without a space, so the word alone would seldom be found;
    its pairs of letters are found under any particle.

    Example:
        >>> terms("Paris, 1889")
        ['paris', '1889']
        >>> terms("서울에서")
        ['서울에서', '서울', '울에', '에서']
    """
    return [term for word in _WORD.findall(text.lower()) for term in _of_word(word)]


def _of_word(word: str) -> Iterator[str]:
    yield word
    for run in _HANGUL.findall(word):
        if len(run) > 2:
            yield from (run[i : i + 2] for i in range(len(run) - 1))


class Index:
    """Finds the passages that share the most telling terms with a query (BM25, Lucene's form).

        score = Σ_terms idf · tf / (tf + k1 · (1 − b + b · length / mean length))

    Equal scores are ordered by the passages' place in the corpus, so the result is a function of
    corpus and query alone.

    Args:
        passages: what is searched; the title counts as text.
        k1, b: saturation of repeated terms, and how far length is made up for.
        folder: where the index is kept and memory-mapped from; None keeps it in memory.

    Raises:
        UsageError: bm25s is not installed.

    Source: Robertson and Zaragoza 2009; Kamphuis et al. 2020 for Lucene's form.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        k1: float = 1.5,
        b: float = 0.75,
        folder: Path | None = None,
    ) -> None:
        self.passages = passages
        if folder is None:
            self._index = _built(passages, k1=k1, b=b)
            return
        place = folder / _digest(passages, k1=k1, b=b)
        if not place.exists():
            _store(_built(passages, k1=k1, b=b), place)
        self._index = _library().BM25.load(str(place), mmap=True, show_progress=False)

    def search(self, query: str, *, top_k: int = 3) -> list[Hit]:
        """The best passages, best first; fewer where fewer share a term with the query."""
        wanted = [term for term in dict.fromkeys(terms(query)) if term in self._index.vocab_dict]
        if not wanted:
            return []
        scores = self._index.get_scores(wanted)
        best = np.lexsort((np.arange(len(scores)), -scores))[:top_k]
        return [Hit(self.passages[i], float(scores[i])) for i in best.tolist() if scores[i] > 0]


def _library() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise UsageError(
            f"search: needs the package bm25s; {install_command('search')}."
        ) from error
    return bm25s


def _built(passages: Sequence[Passage], *, k1: float, b: float) -> Any:
    index = _library().BM25(method="lucene", k1=k1, b=b, backend="numpy")
    index.index([terms(f"{p.title} {p.text}") for p in passages], show_progress=False)
    return index


def _digest(passages: Sequence[Passage], *, k1: float, b: float) -> str:
    found = hashlib.blake2b(repr((k1, b)).encode(), digest_size=16)
    for passage in passages:
        found.update(repr(tuple(passage)).encode())
    return found.hexdigest()


def _store(index: Any, place: Path) -> None:
    """Write an index under another name, then rename it: a reader never sees half of one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = tempfile.mkdtemp(prefix=".index-", dir=place.parent)
    try:
        index.save(draft, show_progress=False)
        os.rename(draft, place)
    except OSError:
        if not place.exists():  # another process was not faster: this is a real failure
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
