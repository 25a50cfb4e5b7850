"""vLLM behind HTTP: a client of `vllm serve`, token ids in and out."""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from groupwise.errors import RunError, UsageError
from groupwise.models import Policy, is_adapted
from groupwise.rollouts.engines.vllm.base import (
    Answer,
    CompletionOutput,
    CompletionRequest,
    EngineUnavailable,
    Weights,
    WeightSync,
)
from groupwise.rollouts.engines.vllm.receiver import SharedUpdate
from groupwise.rollouts.engines.vllm.versions import check_version

SHORT_S = 60.0
"""Seconds for requests that compute nothing."""

TEXTS = ("What is 17 + 25? Let us think.", "Zwölf – 十二 – 열둘\n\n\tx := [1, 2]; // ok", " 0042")
"""Texts that both tokenizers must encode alike."""

PAUSE_S = 0.02
"""Seconds between checks for further requests."""

END = object()

LOWEST = -9000.0
"""vLLM writes −9999 where a log-probability is −∞, which JSON cannot hold."""


class SocketConnection(http.client.HTTPConnection):
    """A connection to a Unix socket.

    Args:
        path: of the socket.
        timeout: seconds for each operation on it.
    """

    def __init__(self, path: str, *, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


class ServerClient:
    """Requests to one server; safe to use from several threads.

    Args:
        url: its address, or that of a Unix socket: "unix:///run/vllm.sock".
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        known = parts.hostname if parts.scheme in ("http", "https") else parts.path
        if parts.scheme not in ("http", "https", "unix") or not known:
            raise UsageError(
                f"engine.server = {url!r}: must be an address such as 'http://127.0.0.1:8000' or "
                "'unix:///run/vllm.sock'."
            )
        self.url = url.rstrip("/")
        self._parts = parts
        self._open: set[http.client.HTTPConnection] = set()

    def get(self, path: str) -> Any:
        """The JSON of a reply; None where it is something else, such as a word of success."""
        return self._request("GET", path, None, timeout=SHORT_S)

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = SHORT_S) -> Any:
        """As `get`; None as timeout waits for as long as the connection stands."""
        return self._request("POST", path, body, timeout=timeout)

    def close(self) -> None:
        """Abort open requests, so that no thread keeps waiting for them."""
        for connection in list(self._open):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout: float | None
    ) -> Any:
        connection, prefix = self._connection(timeout=timeout)
        self._open.add(connection)
        try:
            text = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"} if text else {}
            connection.request(method, prefix + path, text, headers)
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnavailable(
                f"engine.server = {self.url!r}: does not answer ({error or type(error).__name__})."
            ) from error
        finally:
            self._open.discard(connection)
            connection.close()
        if reply.status >= 500:
            raise EngineUnavailable(f"engine.server = {self.url!r}: failed ({_said(data)}).")
        if reply.status >= 400:
            raise Refused(
                f"engine.server = {self.url!r}: refused {path} ({reply.status}: {_said(data)}).",
                status=reply.status,
            )
        return json.loads(data) if "json" in reply.getheader("Content-Type", "") else None

    def _connection(self, *, timeout: float | None) -> tuple[http.client.HTTPConnection, str]:
        """A connection to the server, and the prefix of every path there."""
        parts = self._parts
        if parts.scheme == "unix":
            return SocketConnection(parts.path, timeout=timeout), ""
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=timeout), parts.path


class Refused(RunError):
    """The server refused a request."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def _said(data: bytes) -> str:
    """The message in the body of a reply that is not a success."""
    try:
        found = json.loads(data)
        error = found.get("error", found)
        said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = data.decode(errors="replace")
    return (str(said or "no message").strip().splitlines() or ["no message"])[0][:300]


class VllmServer:
    """A vLLM server that this run did not start.

    Args:
        url: its address.
        policy: what is trained; the server must have its tokenizer.
        max_rows: completions asked for at the same time.
        patience_s: seconds to wait for a server that does not answer.
    """

    def __init__(self, url: str, policy: Policy, *, max_rows: int, patience_s: float) -> None:
        self.client, self.policy = ServerClient(url), policy
        self.max_rows, self.patience_s = max_rows, patience_s
        self.model, self.root, self.context = "", "", 0
        self._adapter: str | None = None
        self._adapters = 0
        # A server may still hold the adapters of an earlier run, which must not be mistaken for
        # those of this one.
        self._run = secrets.token_hex(4)
        self._transfers = False

    @property
    def ways(self) -> tuple[WeightSync, ...]:
        return ("adapter",) if is_adapted(self.policy.model) else ("reload",)

    def start(self, weights: Weights | None = None) -> None:
        """Wait for the server, and check that it fits this policy.

        Raises:
            RunError: it does not answer in time.
            UsageError: it is too old, or has another tokenizer.
        """
        self.await_health()
        self.shake_hands()

    def await_health(self) -> None:
        """Poll the server until it answers, with growing pauses."""
        end, pause = time.monotonic() + self.patience_s, 0.1
        while True:
            try:
                self.client.get("/health")
                return
            except EngineUnavailable as gone:
                if time.monotonic() + pause > end:
                    raise RunError(
                        f"{str(gone).rstrip('.')}, for {self.patience_s:g} s "
                        "(engine.patience_minutes); start it with\n    "
                        f"VLLM_SERVER_DEV_MODE=1 vllm serve {self._name()} "
                        "--logprobs-mode processed_logprobs --generation-config vllm\n"
                        "or let the run start one: engine.python."
                    ) from gone
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def shake_hands(self) -> None:
        """Read the names of the server's models; check that its tokenizer is the policy's."""
        version = self.client.get("/version")["version"]
        check_version(version, where=f"engine.server = {self.client.url!r}")
        cards = self.client.get("/v1/models")["data"]
        base = next((card for card in cards if not card.get("parent")), cards[0])
        self.model, self.root = base["id"], base.get("root") or base["id"]
        self.context = int(base.get("max_model_len") or self.policy.context)
        self._adapter = None
        tokenizer = self.policy.tokenizer
        for text in TEXTS:
            ours = tokenizer.encode(text, add_special_tokens=False)
            body = {"model": self.model, "prompt": text, "add_special_tokens": False}
            theirs = self.client.post("/tokenize", body)["tokens"]
            if ours != theirs:
                self._refuse(f"reads {text!r} as {theirs[:8]}…, the policy as {ours[:8]}…")
        size = len(tokenizer)
        ids = sorted({place * (size - 1) // 63 for place in range(64)})
        said = self.client.post("/detokenize", {"model": self.model, "tokens": ids})["prompt"]
        if said != tokenizer.decode(ids, skip_special_tokens=False):
            self._refuse("writes the same tokens as another text")

    def _refuse(self, reason: str) -> None:
        raise UsageError(
            f"engine.server = {self.client.url!r}: serves {self.root!r}, whose tokenizer is not "
            f"that of {self._name()!r}: it {reason}; serve the model that is trained."
        )

    def _name(self) -> str:
        return str(getattr(self.policy.model.config, "_name_or_path", "") or "MODEL")

    def answer(self, asks: Iterable[CompletionRequest | None]) -> Iterator[tuple[int, Answer]]:
        """Ask for several prompts at a time; each prompt is computed once for its group."""
        source, held, over, count = iter(asks), deque[CompletionRequest](), False, 0
        running: dict[Future[Answer], tuple[int, int]] = {}  # its index and its completions
        pool = ThreadPoolExecutor(max_workers=self.max_rows)
        try:
            while held or running or not over:
                paused = False
                while held or not (over or paused):
                    ask = held.popleft() if held else next(source, END)
                    over, paused = over or ask is END, ask is None
                    if not isinstance(ask, CompletionRequest):
                        continue
                    rows, size = sum(n for _, n in running.values()), int(ask.params.get("n", 1))
                    if running and rows + size > self.max_rows:
                        held.append(ask)
                        break
                    running[pool.submit(self._complete, ask)] = (count, size)
                    count += 1
                if not running:
                    return
                done, _ = wait(running, PAUSE_S if paused else None, FIRST_COMPLETED)
                for each in done:
                    yield running.pop(each)[0], each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, ask: CompletionRequest) -> Answer:
        body = {
            **ask.params,
            "model": self._adapter or self.model,
            "prompt": list(ask.tokens),
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        reply = self.client.post("/v1/completions", body, timeout=None)
        return _answer(reply["choices"], ask)

    def renew(self, weights: Weights, way: WeightSync) -> None:
        """Have the server read the files; they must lie where it can see them."""
        if way == "adapter":
            # Its name is part of every key of the prefix cache.
            self._load_adapter(weights)
            return
        self._developer(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}},
            timeout=None,
        )
        self.flush()

    def transfer(self, update: SharedUpdate) -> None:
        """vLLM's weight-transfer protocol."""
        if not self._transfers:
            self._developer("/init_weight_transfer_engine", {"init_info": {}})
            self._transfers = True
        self._developer("/start_weight_update", {}, timeout=None)
        self._developer("/update_weights", {"update_info": asdict(update)}, timeout=None)
        self._developer(
            "/finish_weight_update", {"weight_version": str(update.version)}, timeout=None
        )
        self.flush()

    def _load_adapter(self, weights: Weights) -> None:
        self._adapters += 1
        name = f"groupwise-{self._run}-{weights.version}-{self._adapters}"
        try:
            self.client.post(
                "/v1/load_lora_adapter",
                {"lora_name": name, "lora_path": str(weights.folder)},
                timeout=None,
            )
        except Refused as refused:
            if refused.status != 404:
                raise
            raise RunError(
                f"engine.server = {self.client.url!r}: takes no adapters while it runs; start it "
                "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the environment and --enable-lora."
            ) from refused
        before, self._adapter = self._adapter, name
        if before is not None:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": before})

    def flush(self) -> None:
        """Reset the prefix cache, whose keys and values were computed with other weights."""
        for _ in range(50):
            reply = self._developer("/reset_prefix_cache", {})
            if not isinstance(reply, dict) or reply.get("success", True):
                return
            time.sleep(0.1)
        raise RunError(
            f"engine.server = {self.client.url!r}: does not reset its prefix cache; is anything "
            "else using this server? It must serve this run alone."
        )

    def _developer(
        self, path: str, body: Mapping[str, Any], *, timeout: float | None = SHORT_S
    ) -> Any:
        try:
            return self.client.post(path, body, timeout=timeout)
        except Refused as refused:
            if refused.status != 404:
                raise
            raise RunError(
                f"engine.server = {self.client.url!r}: has no {path}; start it with "
                "VLLM_SERVER_DEV_MODE=1 in the environment."
            ) from refused

    def sleep(self) -> None:
        self._developer("/sleep?level=1", {}, timeout=None)

    def wake(self) -> None:
        self._developer("/wake_up", {}, timeout=None)

    def close(self) -> None:
        self.client.close()
        if self._adapter is not None:
            with suppress(RunError):  # The server may have ended.
                gone = {"lora_name": self._adapter}
                self.client.post("/v1/unload_lora_adapter", gone, timeout=5.0)
            self._adapter = None


def _answer(choices: Sequence[Mapping[str, Any]], ask: CompletionRequest) -> Answer:
    """Convert the choices of a completion."""
    written = tuple(
        CompletionOutput(
            tokens=list(choice["token_ids"]),
            logprobs=[_number(x) for x in choice["logprobs"]["token_logprobs"]],
            finish=str(choice["finish_reason"]),
        )
        for choice in choices
    )
    prompt = choices[0].get("prompt_logprobs") or ()
    return Answer(
        written=written,
        prompt_logprobs=tuple(
            _number(given[str(token)]["logprob"])
            for token, given in zip(ask.tokens, prompt, strict=False)
            if given is not None
        ),
    )


def _number(value: float | None) -> float:
    return float("-inf") if value is None or value < LOWEST else float(value)
