"""A small server that speaks vLLM's protocol over a real model, with the faults of real servers.

It stands in for `vllm serve` where there is none: everything that the client says goes over a
socket, and what comes back was computed by a model of its own, read from the folders that it is
given.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.models import Policy, load_policy
from groupwise.training.stages.base_model import small_policy

ENDS = tuple(range(100, 140))

Reload = Literal["right", "ignored", "scrambled", "stale_cache", "altered", "rounded"]
"""What the server makes of new weights: takes them over, does nothing, takes over some of them,
keeps what its prefix cache has computed with the old ones, changes four rows of a matrix, or rounds
them to bfloat16. It says that all went well each time."""


def saved_policy(folder: Path, *, seed: int = 0) -> Policy:
    """A random model that vLLM can run too (heads 32 wide), of which every token in `ENDS` ends a
    completion; saved and loaded."""
    policy = small_policy(
        hidden=64, layers=2, heads=2, key_value_heads=1, feed_forward=128, seed=seed
    )
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    policy.model.generation_config.eos_token_id = [*policy.end_tokens, *ENDS]
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return load_policy(folder)


class Server:
    """`vllm serve FOLDER`, as far as the client uses it.

    Args:
        folder: of the model.
        reload: what becomes of new weights.
        raw: report log-probabilities before the temperature, as a server without
            `--logprobs-mode processed_logprobs` does.
        developer: whether it was started with VLLM_SERVER_DEV_MODE=1.
        version: what it says it is.
        context: its --max-model-len.
        skew: added to every log-probability that it reports, as other kernels add noise.
        uds: path of the Unix socket to listen on; None takes a free port.
        breaks: the number of a transfer that fails, counted from 1.
        plugin: receives weights by the weight-transfer protocol; None if not started for it.
    """

    def __init__(
        self,
        folder: str,
        *,
        reload: Reload = "right",
        raw: bool = False,
        developer: bool = True,
        version: str = "0.32.0",
        context: int = 256,
        skew: float = 0.0,
        uds: str | None = None,
        breaks: int = 0,
        plugin: Any = None,
    ) -> None:
        self.root, self.reload, self.raw, self.developer = folder, reload, raw, developer
        self.version, self.context, self.skew = version, context, skew
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.cached: Any = None
        self.breaks, self.plugin = breaks, plugin
        self.transfers, self.updating = 0, False
        self.said: list[str] = []
        self.lock = threading.Lock()
        self.dies_after: int | None = None
        """Completions that it still answers; somebody starts it again soon after."""
        self.address: Any = uds or ("127.0.0.1", 0)
        self.listener: ThreadingHTTPServer | None = None
        self.listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def listen(self) -> None:
        """Answer at the same address as before."""
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: dict[str, Any]) -> None:
                with peer.lock:
                    status, found = peer.answer(self.path, body)
                if status == 0:
                    self.close_connection = True
                    return
                data = b"" if found is None else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if found is not None:
                    self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            address_family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET

        self.listener = Listener(self.address, Handler)
        self.address = self.listener.server_address
        threading.Thread(target=self.listener.serve_forever, args=(0.02,), daemon=True).start()

    def die(self) -> None:
        """Nobody answers any more."""
        listener, self.listener = self.listener, None
        if listener is not None:
            threading.Thread(target=listener.shutdown, daemon=True).start()
            listener.socket.close()

    def come_back(self) -> None:
        """Started again by somebody, with the weights of the start."""
        self.dies_after = None
        self.model, self.cached = AutoModelForCausalLM.from_pretrained(self.root).eval(), None
        self.listen()

    def answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and JSON; status 0 breaks the connection off."""
        if self.listener is None:
            return 0, None
        self.said.append(path)
        if path == "/health":
            return 200, None
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/v1/models":
            card = {"id": "served", "root": self.root, "max_model_len": self.context}
            return 200, {"data": [card]}
        if path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False)
            return 200, {"tokens": ids, "count": len(ids), "max_model_len": self.context}
        if path == "/detokenize":
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        if path == "/v1/completions":
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self.die()
                    threading.Timer(0.3, self.come_back).start()
                    return 0, None
            return self.complete(body)
        return self.developer_answer(path, body)

    def developer_answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        if not self.developer:
            return 404, {"detail": "Not Found"}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.take_over(AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"]))
            return 200, {"results": [None]}
        if self.plugin is not None and path.endswith(("weight_update", "update_weights")):
            try:
                self.transfer(path, body)
            except (RuntimeError, ValueError) as error:
                return 500, {"error": {"message": str(error)}}
            return 200, {"message": "done"}
        if path == "/init_weight_transfer_engine":
            return 200, {"message": "Weight transfer initialized"}
        if path == "/reset_prefix_cache":
            if self.reload != "stale_cache":
                self.cached = None
            return 200, {"success": True}
        if path in ("/sleep?level=1", "/wake_up"):
            return 200, {}
        return 404, {"detail": "Not Found"}

    def transfer(self, path: str, body: Mapping[str, Any]) -> None:
        """A phase of the weight-transfer protocol."""
        if (path == "/start_weight_update") == self.updating:
            found = "a" if self.updating else "no"
            raise RuntimeError(f"{path[1:]}: {found} weight update is active")
        if path != "/update_weights":
            self.updating = path == "/start_weight_update"
            return
        update = self.plugin.SharedUpdate(**body["update_info"])
        self.transfers += 1
        if self.transfers == self.breaks:
            update.digests[3] = "that of other bytes"
        fresh = copy.deepcopy(self.model)
        fresh.load_state_dict(dict(self.plugin.read(update)))
        self.take_over(fresh)

    def take_over(self, fresh: Any) -> None:
        fresh.eval()
        if self.reload == "ignored":
            return
        with torch.no_grad():
            if self.reload == "altered":
                fresh.model.layers[0].mlp.up_proj.weight[:4] *= 0.98
            for parameter in fresh.parameters() if self.reload == "rounded" else ():
                parameter.copy_(parameter.bfloat16())
        if self.reload == "scrambled":
            for old, new in zip(self.model.model.layers, fresh.model.layers, strict=True):
                new.self_attn = old.self_attn
        # Whoever reads new weights keeps the keys and values of old prompts until told otherwise.
        self.cached = self.cached or self.model
        self.model = fresh

    @torch.no_grad()
    def complete(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        prompt, most = list(body["prompt"]), int(body["max_tokens"])
        if body["temperature"] == 0 and body["n"] > 1:
            return 400, {"error": {"message": "n must be 1 when using greedy sampling"}}
        if body["temperature"] > 2:
            return 400, {"error": {"message": "temperature must be in [0, 2]"}}
        if len(prompt) + most > self.context:
            return 400, {"error": {"message": f"maximum context length is {self.context}"}}
        scores = None
        if body.get("prompt_logprobs") is not None:
            logp = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            given = [{str(t): {"logprob": float(logp[n, t])}} for n, t in enumerate(prompt[1:])]
            scores = [None, *given]
        choices = [self.one(prompt, body, sample) for sample in range(body["n"])]
        for index, choice in enumerate(choices):
            choice.update(index=index, prompt_logprobs=scores)
        return 200, {"choices": choices}

    def one(self, prompt: list[int], body: Mapping[str, Any], sample: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed((int(body["seed"]) + sample) % 2**62)
        heat, tokens, logprobs, finish = float(body["temperature"]), [], [], "length"
        while len(tokens) < body["max_tokens"]:
            # Without a cache of prefixes there is nothing stale.
            model = self.cached if self.cached is not None and not tokens else self.model
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].double()
            logp = (logits / (heat or 1.0)).log_softmax(-1)
            token = (
                int(logits.argmax())
                if heat == 0
                else int(torch.multinomial(logp.exp(), 1, generator=generator))
            )
            tokens.append(token)
            reported = logits.log_softmax(-1) if self.raw else logp
            logprobs.append(float(reported[token]) + self.skew)
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            if token in body.get("stop_token_ids", ()) or any(
                stop in text for stop in body.get("stop", ())
            ):
                finish = "stop"
                break
        return {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": finish,
        }


@contextmanager
def served(folder: str, **settings: Any) -> Iterator[Server]:
    """A server, for as long as it is needed."""
    server = Server(folder, **settings)
    try:
        yield server
    finally:
        server.die()


def interpreter(folder: Path) -> Path:
    """An interpreter of an environment with a vLLM: this server, started as `vllm serve` is."""
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\n[ $1 = -c ] && exec echo 0.32.0\n"
        f"PYTHONPATH=$PYTHONPATH:{os.pathsep.join(sys.path)} exec {sys.executable} {__file__} $@\n"
    )
    python.chmod(0o755)
    return python


def installed_plugin() -> Any:
    """The module of the plugin on the path, if there is one."""
    found = [each.module for each in entry_points(group="vllm.general_plugins")]
    return import_module(*found) if found else None


if __name__ == "__main__":
    given = dict(zip(sys.argv[1:-1], sys.argv[2:], strict=True))
    Server(
        given["--model"],
        uds=given["--uds"],
        reload=given.get("--reload", "right"),  # pyright: ignore[reportArgumentType]
        breaks=int(given.get("--breaks", 0)),
        plugin=installed_plugin() if "--weight-transfer-config" in given else None,
    )
    time.sleep(600)
