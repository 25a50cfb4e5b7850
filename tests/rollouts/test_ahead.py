"""Whatever the latencies and failures of those who sample, batches are those of one process: each
written by the weights of k steps before, none older, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.algorithms.filters import FILTERS
from groupwise.distributed.cost import StepCost
from groupwise.errors import RunError
from groupwise.registry import spec
from groupwise.rewards import from_functions
from groupwise.rollouts.ahead import AheadSource, Thread
from groupwise.rollouts.background import Background
from groupwise.rollouts.source import RolloutSource
from groupwise.rollouts.stored import restored, stored
from groupwise.training.monitor.watchdog import Watchdog
from groupwise.types import Group, Request, Sampling, ScoredGroups, Stream
from simulated import DATA, Clock, SimulatedEngine, SlowJudge, World, beats_of, completed, reward

STEPS, PROMPTS = 7, 4
SPAN = Sampling(max_tokens=4)

Batches = list[list[tuple[Any, ...]]]


@dataclass(kw_only=True)
class Simulation:
    """A run whose updates only take time.

    Attributes:
        predicts: whether prompts of later batches are asked for early.
        rollbacks: steps after which the weights go back by two.
        resumes: steps after which the run is killed and goes on from its state.
    """

    ahead: int
    keep: str = "all"
    world: World | None = None
    predicts: bool = True
    rollbacks: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()
    steps: int = STEPS
    prompts: int = PROMPTS
    version: int = 0
    used: int = 0
    ages: list[int] = field(default_factory=list)

    def run(self) -> Batches:
        self.clock = Clock()
        self.engine = SimulatedEngine(self.world or World(), self.clock, ahead=self.ahead)
        source, found = self._source(), []
        for step in range(self.steps):
            scored = source.take(self.prompts, step=step)
            found.append(described(scored))
            self.used += scored.drawn
            self.ages += [self.version - v for v in versions(scored)]
            self.clock.sleep(self.world.update if self.world else 0.0)
            self.version += 1
            self.engine.publish(self.version)
            if step in self.rollbacks:
                self.version = max(0, self.version - 3)
                self.engine.publish(self.version)
            if step in self.resumes:
                saved = {k: v() if callable(v) else v for k, v in source.state().items()}
                source.close()
                source = self._source()
                source.restore(saved)
        source.close()
        return found

    def _source(self) -> AheadSource | RolloutSource:
        background = Background(self.engine) if self.world else None
        drawn = RolloutSource(
            DATA,
            [[1]] * len(DATA),
            engine=background or Direct(self),
            scorer=from_functions([reward]),
            keep=lambda data: FILTERS.bind(spec(self.keep))(dict(data)),
            group=3,
            sampling=SPAN,
            seed=5,
        )
        if not self.ahead:
            return drawn
        return AheadSource(
            drawn,
            ahead=self.ahead,
            steps=self.steps,
            version=lambda: self.version,
            background=background,
            predicts=self.predicts and self.keep == "all",
            runner=self.clock,
        )


class Direct(SimulatedEngine):
    """Writes at once, with the weights of the moment, as an engine beside its learner does."""

    def __init__(self, run: Simulation) -> None:
        self.run = run

    def generate(self, requests: Any, sampling: Any, limits: Any = None) -> Iterator[Group]:
        yield from (completed(request, version=self.run.version) for request in requests)


def described(scored: ScoredGroups) -> list[tuple[Any, ...]]:
    return [
        (g.prompt.id, tuple(g.stream), [c.text for c in g.completions], g.completions[0].versions)
        for g in scored.groups
    ]


def versions(scored: ScoredGroups) -> set[int]:
    return {v for g in scored.groups for c in g.completions for _, v in c.versions}


@cache
def in_turn(ahead: int, keep: str, rollbacks: tuple[int, ...] = ()) -> Batches:
    """The batches of one process."""
    return Simulation(ahead=ahead, keep=keep, rollbacks=rollbacks).run()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_batch_is_written_by_the_weights_of_k_steps_before(ahead: int) -> None:
    for step, batch in enumerate(in_turn(ahead, "all")):
        assert {spans for *_, spans in batch} == {((0, max(0, step - ahead)),)}


def any_schedule(number: int) -> Simulation:
    """A run that anything may befall."""
    chance = random.Random(number)
    ahead, keep = chance.choice([1, 2, 3]), chance.choice(["all", "spread"])
    world = World(
        seed=number,
        replicas=chance.choice([1, 2, 5]),
        slots=chance.choice([1, 3]),
        sigma=chance.choice([0.1, 1.0, 2.0]),
        longest=chance.choice([4.0, 50.0]),
        slow=chance.choice([1.0, 10.0]),
        failures=chance.choice([0.0, 0.0, 0.2]),
        update=chance.choice([0.0, 1.0, 20.0]),
    )
    return Simulation(
        ahead=ahead,
        keep=keep,
        world=world,
        rollbacks=(3,) if chance.random() < 0.2 else (),
        resumes=tuple(sorted(chance.sample(range(STEPS - 1), chance.choice([0, 0, 1, 2])))),
    )


def check_schedule(number: int) -> Simulation:
    run = any_schedule(number)
    assert run.run() == in_turn(run.ahead, run.keep, run.rollbacks), number
    assert min(run.ages) >= 0 and max(run.ages) <= run.ahead, number
    return run


def waste(runs: list[Simulation]) -> float:
    """The share of the groups written that no batch has drawn; of weights that were given up,
    nothing else can be done with them."""
    runs = [run for run in runs if not run.rollbacks]
    written = sum(run.engine.written for run in runs)
    return 1 - sum(run.used for run in runs) / written


def test_any_schedule_gives_the_batches_of_one_process() -> None:
    assert 0 <= waste([check_schedule(number) for number in range(24)]) <= 0.05


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_ten_thousand_schedules_give_the_batches_of_one_process() -> None:
    assert 0 <= waste([check_schedule(number) for number in range(10_000)]) <= 0.05


def seconds_per_step(
    ahead: int, *, update: float, predicts: bool = True, prompts: int = 16
) -> float:
    """Of a run whose longest completions take four times as long as the average."""
    run = Simulation(
        ahead=ahead,
        world=World(update=update, replicas=4, slots=4),
        predicts=predicts,
        steps=30,
        prompts=prompts,
    )
    run.run()
    return run.clock.now / run.steps


def test_sampling_ahead_is_fast_with_stragglers() -> None:
    """Against one after the other, where an update takes as long as sampling."""
    sampling = seconds_per_step(1, update=0.0, predicts=False)
    assert 2 * sampling / seconds_per_step(1, update=sampling) >= 1.3
    assert 2 * sampling / seconds_per_step(2, update=sampling) >= 1.6


@pytest.mark.parametrize(("prompts", "update"), [(16, 4.0), (128, 2.0), (128, 8.0), (128, 16.0)])
def test_the_plan_agrees_with_simulated_runs(prompts: int, update: float) -> None:
    """Within a fifth: 16 slots, a mean latency of 1 and a longest of 4. The plan knows no latency
    between the mean and the longest, and no wait for the prompts of a step."""
    plan = StepCost(
        sampling=4,
        learning=1,
        rows=4,
        bulk=prompts / 16,
        tail=4.0,
        train=update,
        weights=0.0,
        checkpoint=0.0,
    )
    one_by_one = seconds_per_step(1, update=0.0, predicts=False, prompts=prompts) + update
    assert one_by_one == pytest.approx(plan.synchronous, rel=0.2)
    beside = seconds_per_step(2, update=update, prompts=prompts)
    assert beside == pytest.approx(plan.asynchronous, rel=0.2)


class Hasty(Thread):
    """A thread on a clock that passes at once."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Observed(Hasty):
    """A clock that knows whether somebody waited for what was not yet so."""

    waited = False

    def wait(self, until: Callable[[], bool]) -> bool:
        self.waited = self.waited or not until()
        return super().wait(until)


@pytest.mark.parametrize("keep", ["all", "spread"])
def test_a_thread_samples_what_one_process_samples(keep: str) -> None:
    run = Simulation(ahead=2, keep=keep, world=World(update=0.0))
    run.clock = Hasty()  # type: ignore[assignment]
    engine = run.engine = SimulatedEngine(World(), run.clock, ahead=2)
    source = run._source()
    assert isinstance(source, AheadSource)
    found = []
    for step in range(STEPS):
        found.append(described(source.take(PROMPTS, step=step)))
        run.version += 1
        engine.publish(run.version)
    source.close()
    assert found == in_turn(2, keep)
    assert run.clock.thread is not None and not run.clock.thread.is_alive()


def broken(change: Callable[[Group], Group]) -> AheadSource:
    run = Simulation(ahead=1, world=World())
    run.clock = Clock()
    run.engine = SimulatedEngine(World(), run.clock, ahead=1)
    write = run.engine.generate
    run.engine.generate = lambda *given: map(change, write(*given))  # type: ignore[method-assign]
    source = run._source()
    assert isinstance(source, AheadSource)
    return source


def test_a_group_of_other_weights_is_refused() -> None:
    def older(group: Group) -> Group:
        completions = tuple(replace(c, versions=((0, 7),)) for c in group.completions)
        return replace(group, completions=completions)

    with pytest.raises(RunError, match="by weights of version 0, and was by 7"):
        broken(older).take(PROMPTS, step=0)


def test_an_error_of_the_engine_reaches_the_loop() -> None:
    def fails(group: Group) -> Group:
        raise RunError("the replica's disk is full")

    with pytest.raises(RunError, match="disk is full"):
        broken(fails).take(PROMPTS, step=0)


@pytest.mark.parametrize("after", [6, 14, 18])
def test_what_is_complete_can_be_saved_after_sampling_has_failed(after: int) -> None:
    """A resumed run continues with the same prompts."""
    written = 0

    def fails(group: Group) -> Group:
        nonlocal written
        written += 1
        if written > after:
            raise RunError("the replica's disk is full")
        return group

    source, step = broken(fails), 0
    with pytest.raises(RunError, match="disk is full"):
        while True:
            before = source.state()
            source.take(PROMPTS, step=step)
            step += 1
    source.restore(before)
    saved = {k: v() if callable(v) else v for k, v in source.state().items()}
    run = Simulation(ahead=1, world=World(), version=step)
    run.clock = Clock()
    run.engine = SimulatedEngine(World(), run.clock, ahead=1)
    run.engine.kept.append(step)
    again = run._source()
    again.restore(saved)
    for later in range(step, STEPS):
        prompts = [name for name, *_ in described(again.take(PROMPTS, step=later))]
        assert prompts == [name for name, *_ in in_turn(1, "all")[later]]
    again.close()


def test_a_request_may_be_dropped_and_made_again_more_than_once() -> None:
    """Each of its answers is dropped when it comes, however late, and is then forgotten."""
    given: list[Request] = []

    class Slow(SimulatedEngine):
        """Writes each request with the weights that it was asked of."""

        def generate(self, requests: Any, sampling: Any, limits: Any = None) -> Iterator[Group]:
            yield from (completed(each, version=each.version or 0) for each in given)

    background = Background(Slow(World(), Clock(), ahead=2))
    request = Request(prompt=DATA[0], tokens=[1], group=1, stream=Stream(0, 3))
    for version in (5, 4, 3):
        made = [replace(request, version=version)]
        background._forget(made)
        background._ask(made, first=True)
        (asked,) = background._waiting
        background._waiting.clear()  # The engine has taken it.
        given.append(asked)
    background.begin(3, tuple)
    (group,) = background.generate([request], SPAN)
    assert group.completions[0].versions == ((0, 3),)
    assert background.dropped == 2 and not background._late


def test_a_checkpoint_does_not_wait_for_batches_that_nobody_samples() -> None:
    """The run is closed while rewards are judged, and another batch had been begun."""
    run = Simulation(ahead=2, world=World(update=0.0))
    run.clock = Hasty()  # type: ignore[assignment]
    run.engine = SimulatedEngine(World(), run.clock, ahead=2)
    source = run._source()
    assert isinstance(source, AheadSource)
    judges, closed, take = threading.Event(), threading.Event(), source.source.take

    def late(count: int, *, step: int) -> ScoredGroups:
        scored = take(count, step=step)
        if step == 1:
            judges.set()
            closed.wait(timeout=30)
        return scored

    source.source.take = late  # type: ignore[method-assign]
    source.take(PROMPTS, step=0)
    snapshot, found = source.state()["ahead"], []
    assert judges.wait(timeout=30)
    threading.Timer(0.2, closed.set).start()
    source.close()

    def write() -> None:
        with pytest.raises(RunError, match="the run ended while a batch was still"):
            snapshot()
        found.append(True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(timeout=5)
    assert found


def test_a_checkpoint_does_not_wait_once_more_for_what_hung(tmp_path: Path) -> None:
    """A judge hangs; the batches before it are saved at once."""
    run = Simulation(ahead=2, world=World(update=0.0))
    clock = run.clock = Observed()  # type: ignore[assignment]
    run.engine = SimulatedEngine(World(), run.clock, ahead=2)
    source, released = run._source(), threading.Event()
    assert isinstance(source, AheadSource)
    take = source.source.take

    def hangs(count: int, *, step: int) -> ScoredGroups:
        if step == 2:
            released.wait(timeout=60)
        return take(count, step=step)

    source.source.take = hangs  # type: ignore[method-assign]
    dog = Watchdog(tmp_path, limit_s=0.3, stop=True, log=print)
    source.watch = dog.waiting
    for step in range(2):
        source.take(PROMPTS, step=step)
    before = source.state()
    with pytest.raises(RunError, match="for the batch of step 3"):
        source.take(PROMPTS, step=2)
    assert clock.waited
    source.restore(before)
    clock.waited = False
    saved = source.state()["ahead"]()
    assert not clock.waited and saved["begun"] == []
    released.set()
    source.close()
    dog.close()


def test_scored_groups_survive_a_checkpoint(tmp_path: Any) -> None:
    source = Simulation(ahead=0)
    source.clock, source.engine = Clock(), None  # type: ignore[assignment]
    drawn = source._source()
    assert isinstance(drawn, RolloutSource)
    scored = drawn.take(PROMPTS, step=0)
    torch.save(stored(scored, drawn), tmp_path / "state.pt")
    again = restored(torch.load(tmp_path / "state.pt", weights_only=True), drawn)
    assert again.groups == scored.groups and again.drawn == scored.drawn
    assert torch.equal(again.keep, scored.keep)
    for name in ("total", "correct", "valid"):
        a, b = getattr(again.scores, name), getattr(scored.scores, name)
        assert torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0)), name
    assert again.scores.status == scored.scores.status


def test_verdicts_are_progress_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a slow judge does not end the run while it judges."""
    monkeypatch.setattr("groupwise.rollouts.ahead.POLL_S", 0.005)
    run = Simulation(ahead=1, world=World(update=0.0))
    run.clock = Hasty()  # type: ignore[assignment]
    run.engine = SimulatedEngine(World(), run.clock, ahead=1)
    source = run._source()
    assert isinstance(source, AheadSource) and source.background is not None
    source.source.scorer = SlowJudge(source.source.scorer)  # type: ignore[assignment]
    background = source.background
    beats = beats_of(source, lambda: background.received)
    source.take(PROMPTS, step=0)
    source.close()
    _, heard = Counter(beats).most_common(1)[0]
    assert heard >= PROMPTS - 1
