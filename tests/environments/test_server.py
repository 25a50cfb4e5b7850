"""The retrieval server and its client."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")

from groupwise.environments import ENVIRONMENTS
from groupwise.environments.retrieval import Client, Index, Passage, Server
from groupwise.errors import UsageError
from groupwise.rewards.http import HttpError
from groupwise.types import Prompt, Stream

PASSAGES = [Passage("Paris", "The capital of France."), Passage("", "Berlin is large.")]


@pytest.fixture
def address() -> Iterator[str]:
    with Server(Index(PASSAGES), port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def ask(address: str, body: bytes | None, path: str = "/retrieve") -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{address}{path}", data=body, timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_client_finds_what_the_index_finds(address: str) -> None:
    index, client = Index(PASSAGES), Client(address)
    for query in ("capital", "berlin large", "quokka"):
        assert client.search(query) == index.search(query)


def test_the_server_speaks_the_shared_form(address: str) -> None:
    body = json.dumps({"queries": ["capital", "quokka"], "topk": 1, "return_scores": True})
    status, reply = ask(address, body.encode())
    assert status == 200 and reply["result"][1] == []
    [found] = reply["result"][0]
    assert found["document"] == {"contents": '"Paris"\nThe capital of France.'}
    assert found["score"] > 0
    _, plain = ask(address, b'{"queries": ["capital"]}')
    assert plain["result"] == [[{"contents": '"Paris"\nThe capital of France.'}]]


@pytest.mark.parametrize(
    "body",
    [b"x", b"[]", b'{"queries": "a"}', b'{"queries": ["a"], "topk": 0}', b"[" * 9999, b"\xff"],
)
def test_bad_requests_are_refused_and_the_server_goes_on(address: str, body: bytes) -> None:
    status, reply = ask(address, body)
    assert status == 400 and reply["error"]
    assert ask(address, b'{"queries": ["capital"]}')[0] == 200
    assert ask(address, b"{}", path="/other")[0] == 404
    status, reply = ask(address, None)
    assert status == 404 and reply["error"] == "only POST /retrieve is served"


def test_the_environment_asks_a_server(address: str) -> None:
    environment = ENVIRONMENTS.get("search")(server=address)
    state = environment.begin(Prompt(id="a"), stream=Stream())
    reply = environment.reply(state, "<search>capital</search>")
    assert "(1) Paris: The capital of France." in reply.text


def test_a_server_that_is_gone_is_an_error_and_no_result() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = Client(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.3)
        with pytest.raises(HttpError, match="search at http://127.0.0.1"):
            gone.search("capital")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{", b"<html>", b"[1]", b'{"result": [[{"score": 1}]]}']
)
def test_what_is_no_reply_of_a_server_is_an_error(content: bytes) -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(HttpError, match="does not have the form of /retrieve"):
            client.search("capital")
        server.shutdown()


@pytest.mark.parametrize("settings", [{}, {"corpus": "a", "server": "http://b"}])
def test_either_a_corpus_or_a_server_must_be_given(settings: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="environment.corpus"):
        ENVIRONMENTS.get("search")(**settings)
    with pytest.raises(UsageError, match="environment.server = 'ftp://x'"):
        ENVIRONMENTS.get("search")(server="ftp://x")
