"""Rewards that run on a cluster judge as the worker processes of one machine do."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import pool_rewards
from cluster_runs import assert_survives, processes, train_command
from groupwise.config import load
from groupwise.distributed.cluster import cluster_workers
from groupwise.distributed.connection import Cluster
from groupwise.errors import UsageError
from groupwise.rewards import Scorer, from_functions
from groupwise.rundir.files import read_lines
from groupwise.types import Completion, Group, Prompt, Scores
from small_runs import settings

pytestmark = pytest.mark.cluster
ray = pytest.importorskip("ray")


def group(*texts: str) -> Group:
    completions = tuple(
        Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
        for text in texts
    )
    prompt = Prompt(id="p", text="q", answer="5")
    return Group(prompt=prompt, prompt_tokens=[1], completions=completions)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes; the processes of the run fit on the second one only."""
    from ray.cluster_utils import Cluster as Nodes

    os.environ.setdefault("RAY_worker_niceness", "0")  # as `Cluster` sets it for one of its own
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes.add_node(num_cpus=4)
    given = [f"cluster.address={nodes.address}", "cluster.replicas=1", "cluster.scorers=2"]
    given.append(f"imports=['{pool_rewards.__file__}']")
    found = Cluster(load("word-problems-ray", settings(tmp_path_factory.mktemp("run"), *given)))
    try:
        yield found
    finally:
        found.close()
        nodes.shutdown()


Made = Callable[..., Scorer]


@pytest.fixture
def made(cluster: Cluster) -> Iterator[Made]:
    """A function that makes a scorer on the cluster; its processes end with the test."""
    started: list[Any] = []

    def start(setups: Any, count: int) -> Any:
        started.append(cluster_workers(cluster, setups, count))
        return started[-1]

    def make(*functions: Any, timeout_s: float = 2.0) -> Scorer:
        limits: Any = {"workers": 1, "timeout_s": timeout_s, "memory_mb": 64, "start": start}
        return from_functions(list(functions), **limits)

    yield make
    for actor in {a for each in started for workers in each.values() for a in workers.actors}:
        ray.kill(actor)


def actors_here() -> list[psutil.Process]:
    return processes(psutil.Process().pid, "ray::ScorerProcess")


def above(process: int) -> int:
    """The scorer process above a worker and its fork server."""
    return psutil.Process(process).parents()[1].pid


def assert_same(one: Scores, other: Scores) -> None:
    for a, b in ((one.total, other.total), *((one.parts[n], other.parts[n]) for n in one.parts)):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    assert (one.status, one.errors) == (other.status, other.errors)


def test_verdicts_and_messages_are_those_of_a_local_pool(made: Made) -> None:
    """For rewards that hang, crash, raise, run out of memory or see whole groups."""
    groups = [
        group("5", "4", "hang", "raise"),
        group("exit", "5", "stdout", "memory"),
        *(group(*(str(n % 7) + "x" * i for i in range(4))) for n in range(20)),
    ]
    functions = [pool_rewards.obedient, pool_rewards.whole]
    with from_functions(functions, workers=1, timeout_s=2.0, memory_mb=64) as local:
        expected = local.gather([local.submit(each) for each in groups])
    with made(*functions) as scorer:
        assert_same(scorer.gather([scorer.submit(each) for each in groups]), expected)


def test_processes_of_other_nodes_judge(cluster: Cluster, made: Made) -> None:
    with made(pool_rewards.process) as scorer:
        judged = scorer.gather([scorer.submit(group("a", "b")) for _ in range(8)]).total
        homes = {above(int(pid)) for pid in judged.flatten()}
        assert homes == {each.pid for each in actors_here()} and len(homes) == 2
        assert sorted(each["Resources"].get("CPU", 0) for each in ray.nodes()) == [0, 4]


def test_a_killed_scorer_is_replaced_and_asked_again(made: Made, tmp_path: Path) -> None:
    """Both processes are killed while they judge."""
    path = tmp_path / "there"
    with made(pool_rewards.until, timeout_s=60.0) as scorer:
        tickets = [scorer.submit(group(str(path), str(path))) for _ in range(4)]
        time.sleep(3.0)
        killed = actors_here()
        below = [child for each in killed for child in each.children(recursive=True)]
        assert len(killed) == 2 and len(below) == 4, "each has a fork server and a worker"
        for each in killed:
            each.kill()
        path.touch()
        assert scorer.gather(tickets).total.tolist() == [[1.0, 1.0]] * 4
        assert psutil.wait_procs([*killed, *below], timeout=30)[1] == []


def test_a_scorer_that_dies_every_time_is_not_asked_for_ever(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.distributed.scorers.ATTEMPTS", 1)
    with made(pool_rewards.obedient, timeout_s=60.0) as scorer:
        scorer.gather([scorer.submit(group("5"))])
        ticket = scorer.submit(group("hang", "5"))
        time.sleep(1.0)
        for each in actors_here():
            each.kill()
        lost = scorer.gather([ticket])
        assert scorer.gather([scorer.submit(group("5", "5"))]).total.tolist() == [[1.0, 1.0]]
    assert bool(lost.total.isnan().all())
    assert lost.errors == ("obedient: scorer 0 was lost 1 times",) * 2


def test_a_scorer_that_stands_still_is_replaced(
    cluster: Cluster, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = cluster.config.distributed.model_copy(update={"timeout_minutes": 0.05})
    with made(pool_rewards.obedient, timeout_s=60.0) as scorer:
        scorer.gather([scorer.submit(group("5"))])
        for each in actors_here():
            each.suspend()
        with monkeypatch.context() as patient:
            config = cluster.config.model_copy(update={"distributed": limited})
            patient.setattr(cluster, "config", config)
            ticket = scorer.submit(group("5"))
            time.sleep(8.0)
        assert scorer.gather([ticket]).total.tolist() == [[1.0]]


def test_rewards_with_a_model_are_made_ready_on_the_cluster(made: Made) -> None:
    model = functools.partial(pool_rewards.with_a_model, word="takes long")
    with made(model) as scorer:
        assert scorer.gather([scorer.submit(group("a", "b"))]).total.tolist() == [[1.0, 1.0]]
    with pytest.raises(UsageError, match="word = 'refuse': must be another"):
        made(functools.partial(pool_rewards.with_a_model, word="refuse"))


OWN = """
import math, psutil
from groupwise.rewards import REWARDS

@REWARDS.register
def wave(text: str) -> float:
    names = [" ".join(each.cmdline()) for each in psutil.Process().parents()]
    if not any("ray::ScorerProcess" in name for name in names) and {elsewhere}:
        raise RuntimeError("judged by the driver")
    return math.sin(len(text))
"""


def test_a_run_with_imported_rewards_is_that_of_one_process(tmp_path: Path) -> None:
    """Also if a scorer is killed."""
    folders = tmp_path / "alone", tmp_path / "cluster"
    for folder, recipe, elsewhere in zip(
        folders, ("word-problems", "word-problems-ray"), (False, True), strict=True
    ):
        own = tmp_path / f"own_{folder.name}.py"
        own.write_text(OWN.format(elsewhere=elsewhere))
        given = settings(
            folder,
            "steps=4",
            "sampling.max_tokens=32",
            "rewards=[{name='wave'}]",
            f"imports=['{own}']",
            *(["cluster.replicas=1", "cluster.scorers=2"] if elsewhere else []),
        )
        rows = folder / "metrics.jsonl"
        assert_survives(
            train_command(recipe, given),
            "ScorerProcess" if elsewhere else "",
            when=lambda rows=rows: rows.exists() and len(list(read_lines(rows))) >= 1,
        )
    one, other = (load_file(str(f / "final" / "model.safetensors")) for f in folders)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
