"""Retrieval: passages of a corpus, an index over them, a retrieval server and its client."""

from groupwise.environments.retrieval.corpus import Passage, read_corpus
from groupwise.environments.retrieval.index import Hit, Index
from groupwise.environments.retrieval.server import Client, Server

__all__ = ["Client", "Hit", "Index", "Passage", "Server", "read_corpus"]
