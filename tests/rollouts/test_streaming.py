"""Whatever the latencies, failures and filters, no token is learned from that is older than the
bound, groups are learned from once and in the order of admission, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.algorithms.filters import FILTERS
from groupwise.errors import RunError, UsageError
from groupwise.registry import spec
from groupwise.rewards import from_functions
from groupwise.rollouts.ahead import Thread
from groupwise.rollouts.batch_journal import BatchJournal
from groupwise.rollouts.source import RolloutSource
from groupwise.rollouts.streaming import StreamingSource
from groupwise.types import Group, Sampling, ScoredGroups, Stream
from simulated import DATA, Clock, FlowingEngine, SlowJudge, World, beats_of, reward

STEPS, PROMPTS = 7, 4


@dataclass(kw_only=True)
class Simulation:
    """A run whose updates only take time.

    Attributes:
        resumes: steps after which the run is killed and goes on from the last checkpoint.
        every: steps between two checkpoints.
        journal: folder of the batches since the last checkpoint.
    """

    world: World
    max_staleness: int = 2
    keep: str = "all"
    resumes: tuple[int, ...] = ()
    every: int = 1
    journal: Path | None = None
    in_turn: bool = False
    steps: int = STEPS
    prompts: int = PROMPTS
    version: int = 0
    used: int = 0
    ages: list[int] = field(default_factory=list)
    taken: dict[int, ScoredGroups] = field(default_factory=dict)

    def run(self) -> list[ScoredGroups]:
        self.clock: Any = Clock()
        self.engine = FlowingEngine(self.world, self.clock)
        source, step, saved = self.source(), 0, None
        resumes = list(self.resumes)
        while step < self.steps:
            scored = source.take(self.prompts, step=step)
            if step in self.taken:
                assert named([self.taken[step]]) == named([scored]), "not what was journalled"
            else:
                self.taken[step] = scored
                self.used += scored.drawn
                self.ages += [step - v for v in versions(scored)]
            self.clock.sleep(self.world.update)
            self.version = step + 1
            self.engine.publish(self.version)
            if (step + 1) % self.every == 0:
                saved = step + 1, {k: v() for k, v in source.state().items()}
            step += 1
            if resumes and step > resumes[0]:
                resumes.pop(0)
                source.close()
                source = self.source()
                step = 0
                if saved is not None:
                    step, state = saved
                    source.restore(state)
                self.version = step
                self.engine.published.append((self.clock.now, step))
        source.close()
        return [self.taken[step] for step in range(self.steps)]

    def source(self) -> StreamingSource:
        drawn = RolloutSource(
            DATA,
            [[1]] * len(DATA),
            engine=self.engine,
            scorer=from_functions([reward]),
            keep=lambda data: FILTERS.bind(spec(self.keep))(dict(data)),
            group=3,
            sampling=Sampling(max_tokens=5),
            seed=5,
        )
        return StreamingSource(
            drawn,
            engine=self.engine,
            max_staleness=self.max_staleness,
            steps=self.steps,
            version=lambda: self.version,
            journal=None if self.journal is None else BatchJournal(self.journal),
            runner=None if self.in_turn else self.clock,
        )


def versions(scored: ScoredGroups) -> list[int]:
    return [v for g in scored.groups for c in g.completions for _, v in c.versions]


def named(batches: list[ScoredGroups]) -> list[list[tuple[Any, ...]]]:
    return [
        [
            (g.prompt.id, g.stream, g.completions[0].text, g.completions[0].versions)
            for g in b.groups
        ]
        for b in batches
    ]


def any_schedule(number: int, **more: Any) -> Simulation:
    """A run that anything may befall."""
    chance = random.Random(number)
    world = World(
        seed=number,
        replicas=chance.choice([1, 2, 5]),
        slots=chance.choice([1, 3]),
        sigma=chance.choice([0.1, 1.0, 2.0]),
        longest=chance.choice([4.0, 50.0]),
        slow=chance.choice([1.0, 10.0]),
        failures=chance.choice([0.0, 0.0, 0.2]),
        update=chance.choice([0.0, 1.0, 20.0]),
        lag=chance.choice([0.0, 0.0, 3.0, 100.0]),
    )
    return Simulation(
        max_staleness=chance.choice([1, 2, 5]),
        keep=chance.choice(["all", "spread"]),
        world=world,
        in_turn=chance.random() < 0.2,
        resumes=tuple(sorted(chance.sample(range(STEPS - 1), chance.choice([0, 0, 1, 2])))),
        **more,
    )


def check_schedule(number: int) -> Simulation:
    run = any_schedule(number)
    batches = run.run()
    assert min(run.ages) >= 0 and max(run.ages) <= run.max_staleness, number
    streams = [g.stream for b in batches for g in b.groups]
    assert streams == sorted(set(streams)), number
    assert all(len(b.groups) == PROMPTS for b in batches), number
    return run


def waste(runs: list[Simulation]) -> float:
    """The share of the groups written that the filter has not even seen, of runs that were not
    killed."""
    runs = [run for run in runs if not run.resumes]
    written = sum(run.engine.written for run in runs)
    return 1 - sum(run.used for run in runs) / written


def test_no_schedule_exceeds_the_bound() -> None:
    runs = [check_schedule(number) for number in range(60)]
    assert waste(runs) == 0
    assert max(age for run in runs for age in run.ages) == 5, "the bound is reached"


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_ten_thousand_schedules_do_not_exceed_the_bound() -> None:
    assert waste([check_schedule(number) for number in range(10_000)]) == 0


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("keep", ["all", "spread"])
def test_a_killed_run_learns_from_what_was_journalled(
    tmp_path: Path, keep: str, in_turn: bool
) -> None:
    """`run` compares each batch that is taken a second time with that of the first time."""
    run = any_schedule(3, journal=tmp_path / "journal", every=3)
    run = replace(run, resumes=(0, 4, 5), keep=keep, in_turn=in_turn)
    batches = run.run()
    assert max(run.ages) <= run.max_staleness
    streams = [g.stream for b in batches for g in b.groups]
    assert streams == sorted(set(streams))


def test_journalled_batches_of_other_settings_or_another_run_are_not_read(tmp_path: Path) -> None:
    one, other = BatchJournal(tmp_path, settings="a"), BatchJournal(tmp_path, settings="b")
    for step in (3, 4, 6):
        one.write(step, {"scored": step})
    assert one.read(3) == {"scored": 3} and other.read(3) is None and one.read(5) is None
    (tmp_path / "batch-000004.pt").write_bytes(b"cut off")
    assert one.read(4) is None
    one.forget(4)
    assert one.read(3) is None and one.read(6) is not None
    run = Simulation(world=World(), journal=tmp_path, steps=1)
    run.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-000000.pt"]


def test_weights_that_never_change_write_the_batches_of_a_run_in_turn() -> None:
    """The streams are those of a run that samples each batch for its step."""
    run = Simulation(world=World())
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    plain, source = run.source().source, run.source()
    for step in range(STEPS):
        wanted, found = (s.take(PROMPTS, step=step) for s in (plain, source))
        assert named([wanted]) == named([found])
    source.close()


def test_groups_beyond_a_tighter_bound_are_written_again() -> None:
    """A run is resumed with a lower bound than it was begun with."""
    run = Simulation(world=World(update=0.0), max_staleness=4, in_turn=True)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    for step in range(3):
        source.take(PROMPTS, step=step)
        run.version += 1
        run.engine.publish(run.version)
    state = {k: v() for k, v in source.state().items()}
    assert any(each["group"] for each in state["streaming"]["open"]), "written, not learned from"
    run.max_staleness = 1
    again = run.source()
    again.restore(state)
    batches = []
    for step in range(3, STEPS):
        batches.append(again.take(PROMPTS, step=step))
        assert min(versions(batches[-1])) >= step - 1
        run.version += 1
        run.engine.publish(run.version)
    assert again.stale > 0
    streams = [g.stream for b in batches for g in b.groups]
    assert len(streams) == len(set(streams))


def test_groups_written_again_do_not_end_a_batch_whose_rounds_are_used_up() -> None:
    """Every kept group has become too old, and the filter has dropped as many as it may."""
    run = Simulation(world=World(update=0.0), in_turn=True)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    source.take(PROMPTS, step=0)
    while len(source._kept) < PROMPTS:
        source._go_on(lambda: None)
    source._decided.groups = 10 * PROMPTS
    old, run.version = list(source._kept), 9
    run.engine.publish(9)
    batch = source.take(PROMPTS, step=9)
    assert source.stale >= PROMPTS and min(versions(batch)) == 9
    assert [g.stream for g in batch.groups] == [each.request.stream for each in old][:PROMPTS]


def test_an_engine_that_keeps_its_first_weights_is_refused() -> None:
    class Stubborn(FlowingEngine):
        def publish(self, weights: Any) -> dict[str, float]:
            return {}

    run = Simulation(world=World(), max_staleness=1)
    run.clock = Clock()
    run.engine = Stubborn(run.world, run.clock)
    source = run.source()
    with pytest.raises(RunError, match="twice; max_staleness = 1: the engine does not load"):
        for step in range(STEPS):
            run.version = step
            source.take(PROMPTS, step=step)
    source.close()


@pytest.mark.parametrize("in_turn", [True, False])
def test_an_error_of_the_engine_reaches_the_loop_and_the_state_can_be_saved(in_turn: bool) -> None:
    run = Simulation(world=World(failures=0.0), in_turn=in_turn)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source, write = run.source(), run.engine._written

    def fails(*given: Any, **more: Any) -> Group:
        if run.engine.written > 9:
            raise RunError("the replica's disk is full")
        return write(*given, **more)

    run.engine._written = fails  # type: ignore[method-assign]
    source.take(PROMPTS, step=0)
    before, step = source.state(), 1
    with pytest.raises(RunError, match="disk is full"):
        while step < STEPS:
            before = source.state()
            source.take(PROMPTS, step=step)
            step += 1
    source.restore(before)
    state = {k: v() for k, v in source.state().items()}
    run.engine._written = write  # type: ignore[method-assign]
    run.clock = run.engine.clock = Clock()
    again = run.source()
    again.restore(state)
    again.take(PROMPTS, step=step)
    again.close()


def test_a_filter_that_keeps_nothing_ends_the_run() -> None:
    run = Simulation(world=World(), in_turn=True)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    source.source.keep = lambda data: data["valid"] & False
    with pytest.raises(RunError, match="kept none of 4[0-9] groups in 10 rounds"):
        source.take(PROMPTS, step=0)


def test_a_state_of_another_kind_of_sampling_is_refused() -> None:
    run = Simulation(world=World(), in_turn=True)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    source.take(PROMPTS, step=0)
    with pytest.raises(UsageError, match="resume with the setting 'streaming'"):
        source.source.restore(source.state())


class Hasty(Thread):
    """A thread on a clock that passes at once."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_thread_samples_within_the_bound() -> None:
    run = Simulation(world=World(update=0.0))
    run.clock = Hasty()
    engine = run.engine = FlowingEngine(World(), run.clock)
    source = run.source()
    streams: list[Stream] = []
    for step in range(STEPS):
        scored = source.take(PROMPTS, step=step)
        streams += [g.stream for g in scored.groups]
        assert step - min(versions(scored)) <= 2
        run.version += 1
        engine.publish(run.version)
    source.close()
    assert streams == sorted(set(streams))
    assert run.clock.thread is not None and not run.clock.thread.is_alive()


def test_streaming_is_fast_with_stragglers() -> None:
    """Against one after the other, where an update takes as long as sampling."""

    def per_step(**more: Any) -> float:
        world = World(update=more.pop("update"), replicas=4, slots=4)
        run = Simulation(world=world, steps=30, prompts=16, **more)
        run.run()
        return run.clock.now / run.steps

    sampling = in_turn_seconds()
    assert 2 * sampling / per_step(update=sampling) >= 1.7


def in_turn_seconds() -> float:
    """Of sampling a batch, with nothing beside it."""
    run = Simulation(world=World(update=0.0, replicas=4, slots=4), steps=30, prompts=16)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source().source
    for step in range(run.steps):
        source.take(run.prompts, step=step)
    return run.clock.now / run.steps


def test_groups_written_again_while_verdicts_are_gathered_are_neither_lost_nor_repeated() -> None:
    run = Simulation(world=World(update=0.0))
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    source.take(PROMPTS, step=0)
    gather, changed = source.source.scorer.gather, []

    def meanwhile(tickets: Any) -> Any:
        if source._kept and not changed:
            changed.append(source._write_again([source._kept[0]], 1))
        return gather(tickets)

    source.source.scorer.gather = meanwhile  # pyright: ignore[reportAttributeAccessIssue]
    batches = [source.take(PROMPTS, step=step) for step in range(1, STEPS)]
    source.close()
    streams = sorted(g.stream for b in batches for g in b.groups)
    wanted = [Stream(5, step, 0, place) for step in range(1, STEPS) for place in range(PROMPTS)]
    assert changed and streams == wanted


@pytest.mark.parametrize("in_turn", [True, False])
def test_verdicts_are_progress_of_a_wait(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a slow judge does not end the run while it judges."""
    monkeypatch.setattr("groupwise.rollouts.ahead.POLL_S", 0.005)
    run = Simulation(world=World(update=0.0), in_turn=in_turn)
    run.clock = Clock() if in_turn else Hasty()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    source.source.scorer = SlowJudge(source.source.scorer)  # pyright: ignore[reportAttributeAccessIssue]
    beats = beats_of(source, lambda: source.received)
    source.take(PROMPTS, step=0)
    source.close()
    written, heard = Counter(beats).most_common(1)[0]
    assert written >= PROMPTS and heard >= PROMPTS - 1


def test_an_error_of_a_reward_is_told_once() -> None:
    def fails(text: str) -> float:
        if int(text) % 7 == 0:
            raise ValueError(f"{text} is a multiple of 7")
        return float(int(text) % 2)

    run = Simulation(world=World(), in_turn=True)
    run.clock = Clock()
    run.engine = FlowingEngine(run.world, run.clock)
    source = run.source()
    source.source.scorer = from_functions([fails])
    batches = [source.take(PROMPTS, step=step) for step in range(STEPS)]
    texts = [c.text for b in batches for g in b.groups for c in g.completions]
    told = [error for b in batches for error in b.scores.errors]
    assert len(told) == sum(int(text) % 7 == 0 for text in texts) > 5
