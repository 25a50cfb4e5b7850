"""Whole runs with a tool: a server that dies again and again, and a resumed run without it."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")

from groupwise.environments import ENVIRONMENTS, Reply
from groupwise.environments.retrieval import Client, Index, Passage, Server
from groupwise.training.prepare import Prepared
from groupwise.types import Prompt, Stream
from small_runs import prepared, timeless

SETTINGS = (
    "environment.name=asks_often",
    "environment.max_result_tokens=16",
    "environment.max_injected_tokens=48",
)


class Asker:
    """Asks a server whenever the model writes a letter that noise writes often."""

    stops = ("e",)

    def __init__(self, server: str) -> None:
        self.client = Client(server, timeout_s=1.0)

    def begin(self, prompt: Prompt, *, stream: Stream) -> None:
        """Nothing is kept of a completion."""

    def reply(self, state: None, text: str) -> Reply:
        found = self.client.search("capital")
        return Reply(text=f"[{found[0].passage.text}]", values={"found": 1.0}, frame=(1, 1))


def asks_often(*, server: str) -> Asker:
    return Asker(server)


class Mortal:
    """A retrieval server that can be killed and started again on its port."""

    def __init__(self) -> None:
        self.index, self.port = Index([Passage("Paris", "capital of France")]), 0
        self.start()

    def start(self) -> None:
        over = time.monotonic() + 30
        while True:
            try:
                self.server = Server(self.index, port=self.port)
                break
            except OSError:  # A connection of another program can hold the port for a moment.
                if time.monotonic() > over:
                    raise
                time.sleep(0.01)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mortal]:
    monkeypatch.setitem(ENVIRONMENTS._functions, "asks_often", asks_often)
    made = Mortal()
    yield made
    made.kill()


def started(folder: Path, mortal: Mortal | Served, *more: str, resume: bool = False) -> Prepared:
    server = f"environment.server=http://127.0.0.1:{mortal.port}"
    return prepared(folder, *SETTINGS, server, *more, resume=resume)


def test_a_server_that_dies_20_times_costs_no_reward_and_no_run(
    tmp_path: Path, mortal: Mortal
) -> None:
    over = threading.Event()

    def reaper() -> None:
        for _ in range(20):
            mortal.kill()
            time.sleep(0.03)
            mortal.start()
            if over.wait(0.2):
                return

    # Whatever is lost, the model goes on calling as often.
    more = ("steps=6", "guards.silent_rewards=say", "optimizer.learning_rate=1e-9")
    run = started(tmp_path, mortal, *more)
    killer = threading.Thread(target=reaper)
    killer.start()
    lost = answered = 0
    failures = set()
    try:
        for step in range(6):
            if step == 5:  # A retry may bridge a short death; none bridges this one.
                over.set()
                killer.join()
                mortal.kill()
            scored = run.trainer.advance().scored
            for row, group in enumerate(scored.groups):
                for place, one in enumerate(group.completions):
                    lost += one.failure is not None
                    failures.add(one.failure)
                    answered += one.failure is None and one.values["calls"] > 0
                    assert bool(scored.scores.valid[row, place]) == (one.failure is None)
                    assert one.failure is None or scored.scores.total[row, place].isnan()
    finally:
        over.set()
        killer.join()
        mortal.start()
        run.close()
    assert lost and answered, failures
    rows = timeless(tmp_path)
    assert len(rows) == 6 and all(row["calls"] > 0 for row in rows[:5])
    assert any(row["answered_share"] < 1 for row in rows)


PARTLY = ("partial_rollouts.tokens_per_step=3", "partial_rollouts.old_tokens=mask")


@pytest.mark.parametrize("more", [(), PARTLY], ids=["whole", "partial"])
def test_a_resumed_run_asks_nothing_again_and_is_the_same_to_the_bit(
    more: tuple[str, ...], tmp_path: Path, mortal: Mortal
) -> None:
    run = started(tmp_path, mortal, *more)
    if not run.engine.exact_continuation:
        run.close()
        pytest.skip("needs the compiled kernels: which rows share a step depends on the replies")
    for _ in range(2):
        run.trainer.advance()
    run.trainer.save(wait=True)
    run.trainer.advance()
    wanted = {
        name: value.clone() for name, value in run.trainer.learners["policy"].trained().items()
    }
    rows = timeless(tmp_path)
    run.close()
    assert list((tmp_path / "journal").glob("replies-*.jsonl"))
    mortal.kill()
    again = started(tmp_path, mortal, *more, resume=True)
    try:
        again.trainer.advance()
    finally:
        again.close()
        mortal.start()
    assert timeless(tmp_path) == rows and rows[-1]["calls"] > 0
    found = again.trainer.learners["policy"].trained()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Served:
    """`groupwise serve-search` in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.corpus = folder / "corpus.jsonl"
        self.corpus.write_text(json.dumps({"title": "Paris", "text": "capital of France"}) + "\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Return when it listens."""
        command = [sys.executable, "-m", "groupwise", "serve-search", str(self.corpus)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert "1 passages at" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.verify
@pytest.mark.timeout(1800)  # it starts 21 processes that load torch, one after another
def test_serve_search_is_killed_in_20_steps_and_the_run_and_its_resumption_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed calls are journalled too, so the steps are repeated without any server."""
    monkeypatch.setitem(ENVIRONMENTS._functions, "asks_often", asks_often)
    served, rng = Served(tmp_path), random.Random(0)
    more = ("steps=20", "guards.silent_rewards=say", "guards.max_bad_steps=20", "group_size=8")
    run = started(tmp_path / "run", served, *more)
    lost = answered = steps_with_both = 0
    try:
        for step in range(20):
            killer = threading.Timer(rng.random() * 0.2, served.kill)
            killer.start()
            scored = run.trainer.advance().scored
            killer.join()
            failed = [c.failure is not None for g in scored.groups for c in g.completions]
            asked = [c.values["calls"] > 0 for g in scored.groups for c in g.completions]
            right = [a and not f for a, f in zip(asked, failed, strict=True)]
            lost, answered = lost + sum(failed), answered + sum(right)
            steps_with_both += any(failed) and any(right)
            assert scored.scores.valid.flatten().tolist() == [not one for one in failed]
            assert scored.scores.total.isnan().flatten().tolist() == failed
            if step == 9:
                run.trainer.save(wait=True)
            served.start()
        wanted = {name: one.clone() for name, one in run.trainer.policy.trained().items()}
    finally:
        served.kill()
        run.close()
    assert lost and answered and steps_with_both, (lost, answered, steps_with_both)
    rows = timeless(tmp_path / "run")
    again = started(tmp_path / "run", served, *more, resume=True)
    try:
        for _ in range(10):
            again.trainer.advance()
    finally:
        again.close()
    assert timeless(tmp_path / "run") == rows
    found = again.trainer.policy.trained()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
