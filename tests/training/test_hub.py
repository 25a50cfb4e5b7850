"""Uploads to the hub, by the hub's own client, to a server on this machine that speaks its protocol
as far as an upload needs it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import load
from groupwise.errors import RunError, UsageError
from groupwise.training.hub import HubUploads
from groupwise.training.offline.supervised import fine_tune
from groupwise.training.run import train_config
from groupwise.training.stages.recipe import supervise
from small_runs import Quiet, letters, prepared, settings, tiny

NAME = "someone/model"


class Hub(BaseHTTPRequestHandler):
    """Takes commits whose files are inline, which it asks for."""

    commits: list[tuple[str, dict[str, bytes]]]
    created: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            url = f"http://127.0.0.1:{self.server.server_address[1]}/{NAME}"
            return self.reply({"url": url, "name": NAME})
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.reply({"files": files})
        if self.path == "/api/validate-yaml":  # the metadata of the model card
            return self.reply({"errors": [], "warnings": []})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        self.commits.append((lines[0]["value"]["summary"], files))
        self.reply(
            {
                "commitUrl": f"https://huggingface.co/{NAME}/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
        )

    def do_GET(self) -> None:
        self.reply({"sha": "0", "id": NAME, "siblings": []})

    def reply(self, values: Any) -> None:
        content = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("Handler", (Hub,), {"commits": [], "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield handler
    server.shutdown()
    server.server_close()


def test_a_run_uploads_its_model_while_it_trains_and_at_its_end(
    hub: type[Hub], tmp_path: Path
) -> None:
    config = load("word-problems", settings(tmp_path, f'hub={{name="{NAME}", every_steps=3}}'))
    train_config(config, policy=tiny(), functions=[letters], progress=Quiet())
    assert [summary for summary, _ in hub.commits] == ["step 3", "final"]
    assert {"config.json", "model.safetensors", "README.md"} <= hub.commits[0][1].keys()
    final = (tmp_path / "final" / "model.safetensors").read_bytes()
    weights = [files["model.safetensors"] for _, files in hub.commits]
    assert weights[1] == final and weights[0] != final
    asked = hub.created[0]  # clients before 1.5 say "private"
    assert asked.get("visibility") == "private" or asked.get("private") is True
    assert not (tmp_path / "upload").exists()


def test_a_run_goes_on_without_the_hub_and_says_at_its_end_that_the_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    said = Quiet()
    config = load("word-problems", settings(tmp_path, f'hub={{name="{NAME}", every_steps=2}}'))
    with pytest.raises(RunError, match=f"hub.name = '{NAME}'.*The model is in {tmp_path}/final"):
        train_config(config, policy=tiny(), functions=[letters], progress=said)
    assert (tmp_path / "report.html").exists()
    assert any("hub.name" in line and "step" in line for line in said.said)


def test_an_upload_that_is_still_under_way_is_not_overtaken(tmp_path: Path) -> None:
    run = prepared(tmp_path, "steps=1")
    gate, said = threading.Event(), []
    uploads = HubUploads(
        load("word-problems", [f'hub={{name="{NAME}", every_steps=1}}']).hub,
        folder=tmp_path / "upload",
        write=run.trainer.write_model,
        log=said.append,
    )
    uploads._upload = threading.Thread(target=gate.wait)
    uploads._upload.start()
    uploads.on_step(1, None)
    gate.set()
    run.close()
    assert said == [f"the upload to {NAME} has not finished; step 1 is skipped"]
    assert not (tmp_path / "upload").exists()


def test_what_is_no_repository_is_refused_before_the_run() -> None:
    with pytest.raises(UsageError, match="hub.name"):
        load("word-problems", ['hub={name="no owner"}'])


def test_a_run_that_nobody_is_logged_in_for_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    config = load("word-problems", settings(tmp_path / "run", f'hub.name="{NAME}"'))
    with pytest.raises(UsageError, match=f"hub.name = '{NAME}': nobody is logged in"):
        train_config(config, policy=tiny(), functions=[letters], progress=Quiet())
    data = load("word-problems-sft", [f"output={tmp_path / 'run'}", f'hub.name="{NAME}"'])
    with pytest.raises(UsageError, match=f"hub.name = '{NAME}': nobody is logged in"):
        fine_tune(data, progress=Quiet())
    assert not (tmp_path / "run").exists()


def test_a_run_on_data_uploads_its_model_at_its_end(hub: type[Hub], tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} + 1?", "completion": str(a + 1)} for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [
        f"output={tmp_path / 'run'}",
        f"sft.data={tmp_path / 'rows.jsonl'}",
        "steps=2",
        "rewards=[]",
        "prompts_per_step=2",
        f'hub.name="{NAME}"',
    ]
    with pytest.raises(UsageError, match="hub.every_steps = 1: runs on data upload only final/"):
        fine_tune(load("word-problems-sft", [*given, "hub.every_steps=1"]), progress=Quiet())
    fine_tune(load("word-problems-sft", given), progress=Quiet())
    final = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    ((summary, files),) = hub.commits
    assert summary == "final" and files["model.safetensors"] == final


def test_a_warm_up_that_would_not_be_uploaded_is_refused(tmp_path: Path) -> None:
    given = [f'hub.name="{NAME}"', "warmup.steps=1"]
    with pytest.raises(UsageError, match="hub.name = .*made by .warmup. is not uploaded"):
        supervise("word-problems", given, output=str(tmp_path / "sft"))
