"""Retrieval: passages of a corpus, an index over them, a retrieval server and its client."""

from groupwise.environments.retrieval.corpus import Finder, Hit, Passage, read_corpus
from groupwise.environments.retrieval.index import Index, make_index
from groupwise.environments.retrieval.server import Client, Server

__all__ = [
    "Client",
    "Finder",
    "Hit",
    "Index",
    "Passage",
    "Server",
    "make_index",
    "read_corpus",
]
