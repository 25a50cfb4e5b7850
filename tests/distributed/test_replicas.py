"""Replicas keep several versions of the weights: a cluster that samples ahead of the update draws
what one process draws."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cluster_runs import assert_survives, kill_driver, train_command
from groupwise.algorithms import bind
from groupwise.config import load
from groupwise.config.connect import configured_engine, load_configured
from groupwise.config.data import load_train, rendered
from groupwise.distributed.canary import LIMIT
from groupwise.distributed.cluster import connect_cluster
from groupwise.distributed.continuous import ContinuousEngine
from groupwise.distributed.lost import TransferError
from groupwise.distributed.replicas import ClusterEngine, Idle, Stored
from groupwise.errors import RunError
from groupwise.types import Group, Metrics, Prompt, Request, Sampling, Stream
from simulated import completed
from small_runs import settings, timeless

STEPS = 6


def test_the_earliest_step_gets_the_next_replica() -> None:
    idle, sampling, evaluation = Idle(2), object(), object()
    assert [idle.claim(sampling, 3), idle.claim(sampling, 3), idle.claim(sampling, 3)] == [
        0,
        1,
        None,
    ]
    assert idle.claim(evaluation, -1) is None
    idle.give_back([1])
    assert idle.claim(sampling, 3) is None, "an evaluation waits"
    assert idle.claim(evaluation, -1) == 1
    idle.give_back([0])
    assert idle.claim(sampling, 3) is None
    idle.stop_waiting(evaluation)
    assert idle.claim(sampling, 3) == 0


class Died(Exception):
    """As Ray's error of a lost actor."""


class Mortal:
    """A cluster in this process whose replicas die at some of their requests."""

    def __init__(self, dies: Callable[[int], bool]) -> None:
        self.dies, self.calls = dies, 0
        self.settings = SimpleNamespace(replicas=1, replica_cpus=1, replica_gpus=0)
        engine = SimpleNamespace(max_rows=1)
        self.config = SimpleNamespace(ahead=1, streaming=None, group_size=1, engine=engine)
        self.lost = (Died,)
        self.ray = SimpleNamespace(
            wait=lambda refs, **_: (refs[:1], refs[1:]), kill=lambda actor: None
        )

    def actor(self, kind: type, **_: Any) -> Any:
        answers = {"exact_continuation": lambda: True, "generate": self.generate}
        answers["publish"] = lambda *_: {}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=Later(call)) for name, call in answers.items()}
        )

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Group]:
        self.calls += 1
        if self.dies(self.calls):
            raise Died
        return [completed(request, version=0) for request in requests]

    def compare(self, actors: Any) -> None: ...

    def asked(self, actor: Any) -> Any: ...

    def answer(self, name: str, call: Any) -> Any:
        return call()

    def get(self, refs: Any) -> Any:
        return [ref() for ref in refs] if isinstance(refs, list) else refs()


class Later:
    """Makes a call when its result is asked for."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Callable[[], Any]:
        return lambda: self.call(*given)


def answers_of(dies: Callable[[int], bool]) -> list[str]:
    engine = ClusterEngine(Mortal(dies), Stored(0, None))
    asked = [
        Request(prompt=Prompt(id=str(n), text="?"), tokens=[1], group=1, stream=Stream(0, n))
        for n in range(30)
    ]
    return [group.prompt.id for group in engine.generate(asked, Sampling())]


def test_a_long_run_may_lose_many_replicas_but_not_one_after_the_other() -> None:
    """One stream of requests lasts as long as a run that samples ahead."""
    assert answers_of(lambda number: number % 2 == 0) == [str(n) for n in range(30)]
    with pytest.raises(RunError, match="replica 0: was lost 11 times in a row"):
        answers_of(lambda number: number > 5)


def test_a_replica_that_always_dies_ends_the_run_though_another_answers() -> None:
    cluster = Mortal(lambda number: False)
    cluster.settings.replicas = 2
    made, actor = 0, cluster.actor

    def every_second_one_dies(kind: type, **given: Any) -> Any:
        nonlocal made
        made += 1
        one = actor(kind, **given)
        if made >= 2:  # the second replica, and all that replace it
            one.generate.remote = Later(dies)
        return one

    def dies(*_: Any) -> Any:
        raise Died

    cluster.actor = every_second_one_dies
    engine = ClusterEngine(cluster, Stored(0, None))
    asked = (
        Request(prompt=Prompt(id=str(n), text="?"), tokens=[1], group=1, stream=Stream(0, n))
        for n in range(10_000)
    )
    with pytest.raises(RunError, match="replica 1: was lost 11 times in a row"):
        list(engine.generate(asked, Sampling()))


class Loaded(Mortal):
    """A cluster in this process whose replicas sample only with weights."""

    def actor(self, kind: type, **_: Any) -> Any:
        made, has = super().actor(kind), list[Any]()

        def generate(requests: list[Request], sampling: Sampling) -> list[Group]:
            assert has, "a replica samples without the weights of the policy"
            return self.generate(requests, sampling)

        made.publish.remote = Later(lambda *given: has.append(given))
        made.generate.remote = Later(generate)
        return made


class Damaging(Mortal):
    """A cluster in this process whose transfers arrive damaged from the second on, so many times.

    Args:
        times: -1 is for ever.
    """

    def __init__(self, times: int) -> None:
        super().__init__(lambda _: False)
        self.times = times

    def actor(self, kind: type, **_: Any) -> Any:
        made, held = super().actor(kind), dict[str, int]()

        def publish(ref: object, version: int) -> Metrics:
            if version and self.times:
                self.times -= 1
                raise TransferError(f"version {version} arrived with different bytes.")
            held["version"] = version
            return {"seconds.weights": 0.0}

        def generate(requests: list[Request], sampling: Sampling) -> list[Group]:
            return [completed(request, version=held.pop("version")) for request in requests]

        made.publish.remote, made.generate.remote = Later(publish), Later(generate)
        return made


ASKED = [Request(prompt=Prompt(id="", text="?"), tokens=[1], group=1, stream=Stream(0, 0))]


def test_what_arrived_damaged_gives_no_completion() -> None:
    """`publish` does not wait for the transfer, and what follows does. The replica is replaced, and
    the run ends if that does not help."""
    engine = ClusterEngine(Damaging(1), Stored(0, None))
    assert len(list(engine.generate(ASKED, Sampling()))) == 1
    engine.publish(Stored(1, None))
    with pytest.warns(UserWarning, match="replica 0: version 1 arrived .* Another replica takes"):
        assert len(list(engine.generate(ASKED, Sampling()))) == 1

    engine = ClusterEngine(Damaging(-1), Stored(0, None))
    engine.publish(Stored(1, None))
    with pytest.warns(UserWarning, match="takes its"), pytest.raises(RunError, match="1 arrived"):
        next(iter(engine.generate(ASKED, Sampling())))


def test_a_damaged_transfer_to_a_replica_without_work_is_found_at_the_next_one() -> None:
    for streams in (False, True):
        engine = ClusterEngine(Damaging(-1), Stored(0, None))
        first = engine.replicas[0]
        whole = ContinuousEngine(engine) if streams else engine
        with pytest.warns(UserWarning, match="version 1 arrived") as warned:
            whole.publish(Stored(1, None))
            assert (engine.replicas[0] is first) is not streams, "completions are in progress"
            engine.settle()
        assert engine.replicas[0] is not first and len(warned) == 1


def test_a_replica_that_another_thread_replaces_samples_nothing_without_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream may replace one in the moment in which an evaluation gives it a request."""
    engine = ClusterEngine(Loaded(lambda _: False), Stored(0, None))

    def renew(*given: Any, own: Any = engine.renew) -> Any:
        found = own(*given)
        engine.replace(0, engine.replicas[0], Died())
        return found

    monkeypatch.setattr(engine, "renew", renew)
    request = Request(prompt=Prompt(id="0", text="?"), tokens=[1], group=1, stream=Stream(0, 0))
    assert len(list(engine.generate([request], Sampling()))) == 1


def run_settings(folder: Path, *more: str) -> list[str]:
    return settings(
        folder,
        f"steps={STEPS}",
        "sampling.max_tokens=32",
        "optimizer.learning_rate=1e-3",
        "checkpoint.every_steps=2",
        "evaluation.every_steps=3",
        "ahead=2",
        "algorithm.correction={name='tis'}",
        *more,
    )


def rows(folder: Path) -> list[dict]:
    return timeless(folder) if (folder / "metrics.jsonl").exists() else []


def unequal(one: Path, other: Path) -> list[str]:
    a, b = (load_file(str(each / "final" / "model.safetensors")) for each in (one, other))
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    command = train_command("word-problems", run_settings(folder))
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.cluster
@pytest.mark.parametrize("replicas, killed", [(1, False), (3, False), (2, True)])
def test_a_cluster_that_samples_ahead_draws_what_one_process_draws(
    alone: Path, tmp_path: Path, replicas: int, killed: bool
) -> None:
    """Also if a replica is killed."""
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    given = run_settings(folder, f"cluster.replicas={replicas}")
    command = train_command("word-problems-ray", given)
    assert_survives(command, "Replica" if killed else "", when=lambda: len(rows(folder)) >= 2)
    assert unequal(alone, folder) == []
    same = [name for name in rows(alone)[0] if "weights" not in name]
    for one, other in zip(rows(alone), rows(folder), strict=True):
        assert {n: one[n] for n in same if n in one} == {n: other[n] for n in same if n in one}


DAMAGE = """
from dataclasses import replace
from pathlib import Path
from groupwise.distributed import actors


def damaged(model, weights, *, version, accept=actors.accept):
    if version == 3 and not (done := Path(__file__).with_suffix(".done")).exists():
        done.touch()
        name, tensor = next(iter(weights.named.items()))
        weights = replace(weights, named={**weights.named, name: tensor + 1})
    accept(model, weights, version=version)


actors.accept = damaged
"""


@pytest.mark.cluster
@pytest.mark.parametrize("streaming", [False, True])
def test_weights_that_arrive_damaged_once_cost_a_replica(
    alone: Path, tmp_path: Path, streaming: bool
) -> None:
    pytest.importorskip("ray")
    folder, module = tmp_path / "run", tmp_path / "damage.py"
    module.write_text(DAMAGE)
    more = ["ahead=0", "streaming.max_staleness=2"] if streaming else []
    given = run_settings(folder, "cluster.replicas=2", *more)
    command = train_command("word-problems-ray", given, "--import", str(module))
    said = " ".join(assert_survives(command, "", when=lambda: len(rows(folder)) >= 2).split())
    assert "arrived with different bytes from those published. Another replica takes" in said
    assert len(rows(folder)) == STEPS
    if not streaming:
        assert unequal(alone, folder) == []


@pytest.mark.cluster
def test_a_killed_driver_is_resumed_in_one_process(alone: Path, tmp_path: Path) -> None:
    """With the batches that were in flight at the checkpoint."""
    pytest.importorskip("ray")
    folder = tmp_path / "run"
    command = train_command("word-problems-ray", run_settings(folder))
    kill_driver(command, when=lambda: len(rows(folder)) >= 4)
    given = [each for each in run_settings(folder) if not each.startswith("output=")]
    again = train_command("word-problems", given, "--resume", str(folder))
    subprocess.run(again, check=True, capture_output=True)
    assert unequal(alone, folder) == []


@pytest.mark.cluster
def test_ten_thousand_completions_of_replicas_are_those_of_one_engine(tmp_path: Path) -> None:
    """Tokens, log-probabilities and text; the prompts go to whichever replica is free."""
    pytest.importorskip("ray")
    given = settings(tmp_path / "run", "cluster.replicas=3", "data.limit=1250")
    given.append("sampling.max_tokens=48")
    config = load("word-problems-ray", given)
    policy = load_configured(config)
    train = rendered(config, policy, load_train(config)[:1250])
    asked = [
        Request(prompt=prompt, tokens=tokens, group=8, stream=Stream(0, place))
        for place, (prompt, tokens) in enumerate(zip(train.prompts, train.tokens, strict=True))
    ]
    alone = written(configured_engine(config, policy).generate(iter(asked), config.sampling))
    engine = connect_cluster(config, bind(config.algorithm.name), policy=policy).engine
    try:
        spread = written(engine.generate(iter(asked), config.sampling))
    finally:
        engine.close()
    differing = [key for key in alone if alone[key] != spread[key]]
    tokens = sum(len(tokens) for tokens, *_ in alone.values())
    print(f"{len(differing)} of {len(alone)} completions and {tokens} tokens differ")
    assert len(alone) == len(spread) == 10_000 and differing == []


def written(groups: Iterable[Group]) -> dict[tuple[Stream, int], tuple[Any, ...]]:
    """The completions of some groups by stream and sample."""
    return {
        (group.stream, sample): (tuple(each.tokens), tuple(each.logprobs), each.text)
        for group in groups
        for sample, each in enumerate(group.completions)
    }


@pytest.mark.verify
@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_a_thousand_clean_transfers_through_the_object_store_raise_no_alarm(tmp_path: Path) -> None:
    """Digests and the canary at each; any alarm would be an error of `publish`."""
    pytest.importorskip("ray")
    config = load("word-problems-ray", settings(tmp_path / "run", "cluster.replicas=1"))
    policy = load_configured(config)
    connected = connect_cluster(config, bind(config.algorithm.name), policy=policy)
    learner, engine, gaps = connected.learner, connected.engine, list[float]()
    try:
        weights = {name: each.clone() for name, each in learner.trained().items()}
        for number in range(1000):
            torch.manual_seed(number)
            for each in weights.values():
                each.add_(1e-4 * torch.randn_like(each))
            learner.set_trained(weights)
            engine.publish(learner.publish())
            _, call = engine.holds[0]
            gaps.append(engine.cluster.get(call)["canary_gap"])
    finally:
        engine.close()
    print(f"largest gap of {len(gaps)} transfers: {max(gaps):.2g} nats")
    assert len(gaps) == 1000 and max(gaps) < LIMIT / 10
