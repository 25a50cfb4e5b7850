"""The page that follows a run: new steps renew it, and the run directory is only read."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.report.data import RunData
from groupwise.report.live import LivePage, serve
from groupwise.report.page import content_hash
from groupwise.report.sections import alerts


def write_steps(folder: Path, count: int) -> None:
    config = {"config": {"algorithm": {"name": "grpo"}, "steps": 9, "seed": 0}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = [{"step": n, "reward": n / 10, "accuracy": n / 10} for n in range(1, count + 1)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A server that ends with the tests."""
    found: list[str] = []
    ready = threading.Event()

    def started(url: str) -> None:
        found.append(url)
        ready.set()

    page = LivePage(tmp_path)
    threading.Thread(
        target=serve, args=(page,), kwargs={"port": 0, "started": started}, daemon=True
    ).start()
    assert ready.wait(10)
    return found[0]


def got(address: str, path: str = "") -> str:
    with urllib.request.urlopen(address + path, timeout=20) as answer:
        return answer.read().decode()


def test_the_page_is_renewed_after_every_step(address: str, tmp_path: Path) -> None:
    waiting = got(address)
    assert "Nothing to show yet" in waiting and "must contain" not in waiting
    write_steps(tmp_path, 2)
    first, version = got(address), got(address, "version")
    # The page knows its own version, and asks whether there is another.
    assert json.dumps(json.loads(version)) in first and 'fetch("/version")' in first
    assert got(address) == first
    # The report's content security policy lets the added script run and ask, and nothing else.
    policy = re.findall(r'Content-Security-Policy" content="([^"]+)"', first)[0]
    script = re.findall(r"<script>(\n\(\(\) => .*?)</script>", first, flags=re.DOTALL)[0]
    assert f"'{content_hash(script)}'" in policy and "connect-src 'self'" in policy
    write_steps(tmp_path, 3)
    assert got(address, "version") != version
    assert got(address) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "metrics.jsonl"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        got(address, "../config.json")
    port = int(re.findall(r":(\d+)/", address)[0])
    with pytest.raises(UsageError, match=f"--port = {port}: cannot be used"):
        serve(LivePage(tmp_path), port=port, started=print)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a run directory; the folder does not exist"):
        LivePage(tmp_path / "nowhere")


def test_a_request_by_another_name_of_this_machine_is_refused(address: str) -> None:
    port = re.findall(r":(\d+)/", address)[0]
    for host in (f"evil.example:{port}", "evil.example", f"localhost.evil.example:{port}"):
        asked = urllib.request.Request(address, headers={"Host": host})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(asked, timeout=20)
    assert got(f"http://localhost:{port}/", "version")


def test_commands_in_alerts_are_code() -> None:
    row = {"step": 3, "alarm": "no_signal", "text": "Try `groupwise doctor` <b>"}
    run = RunData(label="a", algorithm="grpo", seed=0, alerts=[row])
    assert "Try <code>groupwise doctor</code> &lt;b&gt;" in alerts([run])


def test_alerts_are_counted_in_one_sentence() -> None:
    def run(seed: int, *steps: int) -> RunData:
        rows = [{"step": step, "alarm": "no_signal", "text": f"at {step}"} for step in steps]
        return RunData(label="a", algorithm="grpo", seed=seed, alerts=rows)

    assert "<p>1 alert, the first at step 3.</p>" in alerts([run(0, 3)])
    several = [run(0, 5, 9), run(1, 4), run(2)]
    assert "<p>3 alerts in 2 of 3 runs, the first at step 4.</p>" in alerts(several)
    assert alerts([run(0)]) == ""
