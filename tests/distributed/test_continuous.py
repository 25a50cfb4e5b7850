"""Replicas that never drain: requests enter one by one, and weights change meanwhile."""

from __future__ import annotations

import copy
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster_runs import assert_survives, kill_driver, train_command
from groupwise.distributed.continuous import ContinuousEngine
from groupwise.distributed.replicas import ClusterEngine, Stored
from groupwise.distributed.writer import ContinuousWriter
from groupwise.errors import RunError
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts import GroupEngine
from groupwise.types import Group, Limits, Prompt, Request, Requests, Sampling, Stream
from simulated import FlowingEngine, World, completed
from small_runs import settings, timeless
from spans import largest_gap
from tiny_models import tiny_model, tiny_policy

LIMITS = Limits(prompt=12, group=3, suffix=40, slots=4)
SPAN = Sampling(max_tokens=40)


def requests(count: int) -> list[Request]:
    return [
        Request(
            prompt=Prompt(id=str(n), text="?"),
            tokens=list(range(3, 6 + n % 7)),
            group=2 + n % 2,
            stream=Stream(0, n),
        )
        for n in range(count)
    ]


def test_weights_are_taken_over_between_two_tokens() -> None:
    """While an evaluation is sampled in between, and with the weights of the version that drew each
    token."""
    policy = tiny_policy(tiny_model("llama"), ends=(5,))
    engine = GroupEngine(policy, max_rows=8)
    writer, weights, threads = ContinuousWriter(engine), [copy.deepcopy(policy.model).eval()], []

    def take_over() -> None:
        threads.append(threading.current_thread().name)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        weights.append(copy.deepcopy(policy.model).eval())
        engine.publish(PublishedWeights(version=len(weights) - 1, named={}))

    asked = requests(24)
    with ThreadPoolExecutor(8) as pool:
        groups = pool.map(lambda each: writer.write(each, SPAN, LIMITS), asked)
        evaluated = []
        for _ in range(6):
            time.sleep(0.02)
            writer.between_steps(take_over)
            others = [requests(24)[n] for n in (1, 2)]
            evaluated += writer.between_steps(lambda: list(engine.generate(others, SPAN)))  # noqa: B023
        found = list(groups)
    assert [g.stream for g in found] == [each.stream for each in asked]
    assert set(threads) == {"writing"}
    spans = [len(one.versions) for g in found for one in g.completions]
    assert max(spans) > 1 and all(len(c.versions) == 1 for g in evaluated for c in g.completions)
    assert largest_gap(weights, [*found, *evaluated]) <= 1e-4


def test_an_error_reaches_every_caller_and_the_next_one_is_answered() -> None:
    policy = tiny_policy(tiny_model("llama"), ends=(5,))

    class Fails(GroupEngine):
        fails = True

        def generate(self, requests: Requests, *given: Any, **more: Any) -> Iterator[Group]:
            if self.fails:
                next(iter(requests))
                raise RunError("no memory")
            yield from super().generate(requests, *given, **more)

    engine = Fails(policy, max_rows=8)
    writer = ContinuousWriter(engine)
    with pytest.raises(RunError, match="no memory"):
        writer.write(requests(1)[0], SPAN, LIMITS)
    with pytest.raises(ZeroDivisionError):
        writer.between_steps(lambda: 1 / 0)
    engine.fails = False
    assert writer.write(requests(2)[1], SPAN, LIMITS).stream == Stream(0, 1)


def test_nothing_is_begun_while_weights_are_taken_over() -> None:
    """Also by a replica that has written nothing yet."""
    publishing, begun = threading.Event(), threading.Event()

    class Noting(FlowingEngine):
        def generate(self, requests: Requests, *given: Any, **more: Any) -> Iterator[Group]:
            begun.set()
            yield from (completed(each, version=1) for each in requests if each is not None)

    def take_over() -> bool:
        publishing.set()
        return begun.wait(0.3)

    writer = ContinuousWriter(Noting(World(), None))
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(writer.between_steps, take_over)
        assert publishing.wait(20)
        group = pool.submit(writer.write, requests(1)[0], SPAN, LIMITS)
        assert not early.result(20)
        assert group.result(20).stream == Stream(0, 0) and begun.is_set()


def test_a_new_replica_is_given_nothing_before_it_has_its_weights() -> None:
    """Also where another thread, that of an evaluation, has sent them."""
    sent: list[object] = []
    arrived: set[object] = set()

    def publish(*_: Any) -> object:
        sent.append(object())
        if len(sent) == 1:
            arrived.update(sent)
        return sent[-1]

    remote = SimpleNamespace
    ray = remote(
        wait=lambda refs, **_: ([ref for ref in refs if ref in arrived], []),
        kill=lambda actor: None,
    )
    cluster: Any = remote(
        ray=ray,
        settings=remote(replicas=1, replica_cpus=1, replica_gpus=0),
        config=remote(ahead=0, streaming=2, group_size=1, engine=remote(max_rows=1)),
        actor=lambda *_, **__: remote(
            publish=remote(remote=publish), exact_continuation=remote(remote=lambda: True)
        ),
        compare=lambda _: None,
        get=lambda refs: refs,
        answer=lambda name, call: call,
        lost=(LookupError,),
        asked=lambda actor: object(),
    )
    engine = ClusterEngine(cluster, Stored(0, None))
    streaming = ContinuousEngine(engine)
    assert streaming._free() == 0
    engine.replace(0, engine.replicas[0], LookupError())
    engine.renew(0)
    assert len(sent) == 2 and streaming._free() is None
    arrived.update(sent)
    assert streaming._free() == 0 and len(sent) == 2


STEPS = 8


def run_settings(folder: Path) -> list[str]:
    return settings(
        folder,
        f"steps={STEPS}",
        "sampling.max_tokens=32",
        "optimizer.learning_rate=1e-3",
        "checkpoint.every_steps=3",
        "evaluation.every_steps=4",
        "streaming.max_staleness=2",
        "algorithm.correction={name='tis'}",
        "cluster.replicas=2",
    )


def done(folder: Path) -> int:
    return len(timeless(folder)) if (folder / "metrics.jsonl").exists() else 0


def check_run(folder: Path) -> None:
    rows = timeless(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row.get("token_age_max", 0.0) for row in rows) <= 2
    assert (folder / "final" / "model.safetensors").exists()
    assert not (folder / "journal").exists()


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["", "Replica", "LearnerRank"])
def test_a_cluster_streams_within_the_bound(tmp_path: Path, kind: str) -> None:
    """Also if a process is killed."""
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    command = train_command("word-problems-ray", run_settings(folder))
    assert_survives(command, kind, when=lambda: done(folder) >= 4)
    check_run(folder)


@pytest.mark.cluster
def test_a_killed_driver_learns_from_the_journalled_batches(tmp_path: Path) -> None:
    """The steps after the checkpoint have the figures that they had before the kill."""
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    command = train_command("word-problems-ray", run_settings(folder))
    kill_driver(command, when=lambda: done(folder) >= 5)
    first = timeless(folder)
    given = [each for each in run_settings(folder) if not each.startswith("output=")]
    again = train_command("word-problems-ray", given, "--resume", str(folder))
    subprocess.run(again, check=True, capture_output=True)
    check_run(folder)
    assert timeless(folder)[: len(first)] == first
