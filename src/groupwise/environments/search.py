"""Search: the model writes a query, and reads the passages that are found."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from groupwise.environments.base import ENVIRONMENTS, SEARCH_TAGS, Reply, TagEnvironment
from groupwise.environments.retrieval import Client, Finder, Passage, make_index, read_corpus
from groupwise.errors import UsageError, suggest


@ENVIRONMENTS.register
def search(
    *,
    corpus: str = "",
    server: str = "",
    top_k: int = 3,
    tags: str = "search-r1",
    encoder: str = "",
    query_prefix: str = "",
    passage_prefix: str = "",
    index_folder: str = "",
    max_result_chars: int = 2000,
    max_calls: int = 4,
) -> TagEnvironment:
    """Passages for a query, from an index in this process or from a server.

    Args:
        corpus: file of passages, or "closed_world" for the pages of that generator.
        server: address of a retrieval server with /retrieve, instead of a corpus.
        top_k: passages per query.
        tags: whose tags: "search-r1", "research" or "r1-searcher".
        encoder: model folder whose vectors are compared exactly; if empty, BM25.
        query_prefix, passage_prefix: put before queries and passages for an encoder that was
            trained so, such as "query: " and "passage: " for E5.
        index_folder: keeps the index of a corpus between runs; empty builds it in memory.
        max_result_chars: characters of a result; the rest is cut inside its tags.
        max_calls: queries of one completion.

    Raises:
        UsageError: unknown tags, a corpus that cannot be read, neither a corpus nor a server.

    Source: Search-R1 (2503.09516), ReSearch (2503.19470), R1-Searcher (2503.05592).
    """
    if tags not in SEARCH_TAGS:
        raise UsageError(f"environment.tags = {tags!r}: not known; {suggest(tags, SEARCH_TAGS)}")
    if top_k < 1:
        raise UsageError(f"environment.top_k = {top_k!r}: must be at least 1.")
    if bool(corpus) == bool(server):
        raise UsageError(
            f"environment.corpus = {corpus!r}: give either a corpus or environment.server."
        )
    of_index = {
        "encoder": encoder,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
    }
    for name, value in of_index.items():
        if server and value:
            raise UsageError(
                f"environment.{name} = {value!r}: needs a corpus; a server has its own index."
            )
    if server:
        found: Finder = Client(server)
    else:
        folder = Path(index_folder).expanduser() if index_folder else None
        found = make_index(read_corpus(corpus), folder=folder, **of_index)
    tool = functools.partial(_find, index=found, top_k=top_k)
    return TagEnvironment(
        tool, tags=SEARCH_TAGS[tags], max_result_chars=max_result_chars, max_calls=max_calls
    )


@ENVIRONMENTS.register
def no_search(*, tags: str = "search-r1", max_calls: int = 4) -> TagEnvironment:
    """A search that never finds anything, to measure what a model answers without its tool.

    Args:
        tags: as of `search`.
        max_calls: queries of one completion.
    """
    if tags not in SEARCH_TAGS:
        raise UsageError(f"environment.tags = {tags!r}: not known; {suggest(tags, SEARCH_TAGS)}")
    return TagEnvironment(lambda query: result([]), tags=SEARCH_TAGS[tags], max_calls=max_calls)


def _find(query: str, *, index: Finder, top_k: int) -> Reply:
    return result([hit.passage for hit in index.search(query, top_k=top_k)])


def result(passages: Sequence[Passage]) -> Reply:
    """Passages as the model reads them; "nothing found" is an answer, not a failure."""
    if not passages:
        return Reply(text="nothing found", values={"found": 0.0})
    lines = [
        f"({n}) {p.title}: {p.text}" if p.title else f"({n}) {p.text}"
        for n, p in enumerate(passages, 1)
    ]
    return Reply(text="\n".join(lines), values={"found": float(len(passages))})
