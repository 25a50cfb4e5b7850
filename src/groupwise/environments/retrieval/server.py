"""A retrieval server and its client, in the form that trainers of search models share.

    POST /retrieve {"queries": ["…"], "topk": 3, "return_scores": true}
    → {"result": [[{"document": {"contents": "…"}, "score": 1.5}, …], …]}

Without `return_scores`, a result is the document itself. `contents` holds the title in quotes in
its first line, and the text behind it. The form is that of Search-R1 (2503.09516).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, urlsplit

from groupwise.environments.retrieval.corpus import Finder, Hit, Passage
from groupwise.errors import UsageError
from groupwise.rewards.http import HttpError, post

MOST_QUERIES, MOST_BYTES, MOST_PASSAGES = 1024, 4 << 20, 100
"""Limits of one request: queries, bytes, and passages per query."""


class Client:
    """Asks a retrieval server.

    Args:
        server: its address, such as "http://127.0.0.1:8000"; the path is /retrieve where none is
            given.
        timeout_s: seconds for one query, all retries included.

    Raises:
        UsageError: no HTTP address.
    """

    def __init__(self, server: str, *, timeout_s: float = 20.0) -> None:
        self.address, self.timeout_s = _address(server), timeout_s

    def search(self, query: str, *, top_k: int = 3) -> list[Hit]:
        """The passages that the server finds, best first.

        Raises:
            TimeoutError: no reply in time.
            HttpError: the server cannot be reached, refuses, or replies in another form.
        """
        body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True}).encode()
        where = f"search at {self.address.scheme}://{self.address.netloc}"
        headers = {"Content-Type": "application/json"}
        content = post(self.address, headers, body, timeout=self.timeout_s, where=where)
        try:
            return [_hit(found) for found in json.loads(content)["result"][0][:top_k]]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise HttpError(f"{where}: the reply does not have the form of /retrieve.") from None


def _address(server: str) -> SplitResult:
    try:
        address = urlsplit(server)
        usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        address, usable = None, False
    if address is None or not usable:
        raise UsageError(
            f"environment.server = {server!r}: must begin with http:// or https:// and name a host."
        )
    if address.username is not None or address.password is not None:
        raise UsageError(
            "environment.server: must not contain a user name or password, which are not "
            "sent and would appear in messages."
        )
    return address if address.path.strip("/") else address._replace(path="/retrieve")


def _hit(found: Mapping[str, Any]) -> Hit:
    """A result with or without its score, of a document with or without a title of its own."""
    document = found.get("document", found)
    contents = str(document.get("contents") or document["text"])
    title, line, text = contents.partition("\n")
    if document.get("title"):
        title, text = str(document["title"]), text if line else contents
    elif not line:
        title, text = "", contents
    return Hit(Passage(title.strip().strip('"'), text.strip()), float(found.get("score") or 0.0))


class Server(ThreadingHTTPServer):
    """Serves an index; one thread for each connection.

    Args:
        index: what is searched.
        host, port: where it listens; port 0 takes a free one.
        top_k: passages for a query that does not say how many.
    """

    daemon_threads = True

    def __init__(
        self, index: Finder, *, host: str = "127.0.0.1", port: int = 8000, top_k: int = 3
    ) -> None:
        self.index, self.top_k = index, top_k
        super().__init__((host, port), _Handler)

    def answer(self, question: Any) -> dict[str, Any]:
        """The reply to a question of /retrieve.

        Raises:
            UsageError: the question has another form, or asks too much.
        """
        if not isinstance(question, Mapping):
            raise UsageError("the request must be a JSON object")
        queries, top_k = question.get("queries"), question.get("topk")
        top_k = self.top_k if top_k is None else top_k
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            raise UsageError("queries must be a list of texts")
        if len(queries) > MOST_QUERIES:
            raise UsageError(f"queries must be at most {MOST_QUERIES}")
        if type(top_k) is not int or not 1 <= top_k <= MOST_PASSAGES:
            raise UsageError(f"topk must be a whole number from 1 to {MOST_PASSAGES}")
        scored = bool(question.get("return_scores"))
        return {
            "result": [
                [_plain(hit, scored=scored) for hit in self.index.search(query, top_k=top_k)]
                for query in queries
            ]
        }


def _plain(hit: Hit, *, scored: bool) -> dict[str, Any]:
    document = {"contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if scored else document


class _Handler(BaseHTTPRequestHandler):
    """Answers POST /retrieve; nothing else is served."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30.0
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.path.rstrip("/") != "/retrieve":
            self._send(404, {"error": "only POST /retrieve is served"})
            return
        self._reply(self._question)

    def do_GET(self) -> None:
        self._send(404, {"error": "only POST /retrieve is served"})

    def _question(self) -> Any:
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > MOST_BYTES:
            self.close_connection = True
            raise UsageError(f"Content-Length must be at most {MOST_BYTES}")
        try:
            return json.loads(self.rfile.read(int(size)))
        except (ValueError, RecursionError):
            raise UsageError("the request must be JSON") from None

    def _reply(self, question: Callable[[], Any]) -> None:
        try:
            self._send(200, self.server.answer(question()))
        except UsageError as error:
            self._send(400, {"error": str(error)})

    def _send(self, status: int, reply: Mapping[str, Any]) -> None:
        content = json.dumps(reply).encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged for a request."""
