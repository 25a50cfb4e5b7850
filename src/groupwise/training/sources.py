"""The source of the loop's batches, and the journals of earlier attempts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.algorithms import BoundAlgorithm
from groupwise.config import Config, free_to_change
from groupwise.config.connect import Connected
from groupwise.config.data import order_of
from groupwise.prompts.lazy import LazySequence
from groupwise.prompts.orders import PrioritisedOrder
from groupwise.prompts.templates import Rendered
from groupwise.rewards.journal import RewardJournal, StepFiles
from groupwise.rollouts.ahead import AheadSource, Thread
from groupwise.rollouts.background import Background
from groupwise.rollouts.batch_journal import BatchJournal
from groupwise.rollouts.limits import slots_for
from groupwise.rollouts.source import RolloutSource
from groupwise.rollouts.spans import Spans
from groupwise.rollouts.streaming import StreamingSource
from groupwise.rollouts.tools import ReplyJournal, ToolEngine
from groupwise.training.checkpoint.manager import Journal
from groupwise.types import Engine, Limits, Source, Watch


@dataclass(frozen=True, kw_only=True)
class Journals:
    """What was noted in the steps since the last checkpoint; None where nothing is.

    Attributes:
        verdicts: of rewards.
        replies: of the environment.
        batches: that were learned from.
        shared: replies that other processes write down.
    """

    verdicts: RewardJournal | None = None
    replies: ReplyJournal | None = None
    batches: BatchJournal | None = None
    shared: StepFiles | None = None

    @property
    def files(self) -> list[Journal]:
        """The journals as checkpoints know them."""
        by_step = [each.files for each in (self.verdicts, self.replies) if each is not None]
        others = (self.batches, self.shared)
        return [*by_step, *(each for each in others if each is not None)]


def make_journals(config: Config, engine: Engine, folder: Path) -> Journals:
    """The journals of a run; a tool engine is given that of replies. Where other processes sample,
    they have theirs (`distributed.replies`).

    Verdicts on completions that no other attempt would sample again are not noted: with
    `streaming`, whole batches are, unless no checkpoint would ever delete them.
    """
    if config.streaming is not None:
        if not config.checkpoint.every_steps and config.checkpoint.every_minutes is None:
            return Journals()
        settings = config.model_dump_json(exclude=_excluded())
        return Journals(batches=BatchJournal(folder, settings=settings))
    rewards = config.model_dump_json(include={"rewards", "combine"})
    verdicts = RewardJournal(folder, rewards=rewards)
    if config.environment is None:
        return Journals(verdicts=verdicts)
    if not isinstance(engine, ToolEngine):
        return Journals(verdicts=verdicts, shared=StepFiles(folder, prefix="replies"))
    engine.journal = ReplyJournal(folder, environment=config.environment.model_dump_json())
    return Journals(verdicts=verdicts, replies=engine.journal)


def _excluded() -> dict[str, Any]:
    """The settings that may change between two attempts, as pydantic excludes them."""
    excluded: dict[str, Any] = {}
    for path in sorted(free_to_change()):
        section, _, name = path.partition(".")
        if not name:
            excluded[section] = True
        elif excluded.setdefault(section, {}) is not True:
            excluded[section][name] = True
    return excluded


def make_source(
    config: Config,
    algorithm: BoundAlgorithm,
    connected: Connected,
    ready: Rendered,
    *,
    make: Callable[..., RolloutSource],
    journals: Journals,
    watch: Watch,
) -> tuple[RolloutSource, Source]:
    """The source that draws prompts, samples and scores, and the source of the loop: the same one,
    or a wrapper that runs it ahead of the update.

    Args:
        make: makes a source from what the algorithm and the loop add to it.
    """
    order = order_of(config, ready.prompts)
    budget = config.partial_rollouts and config.partial_rollouts.tokens_per_step
    given: dict[str, Any] = {"keep": algorithm.filter, "seed": config.seed, "order": order}
    given |= {"journal": journals.verdicts, "replies": journals.replies}
    given["tokens_per_step"] = budget
    background = None
    if config.cluster is not None and config.ahead:
        background = Background(connected.engine)
        given["engine"] = background
    drawn = make(**given)

    def version() -> int:
        return connected.learner.version

    if config.streaming is not None:
        streaming = StreamingSource(
            drawn,
            engine=_continuous(connected.engine),
            max_staleness=config.streaming.max_staleness,
            steps=config.steps,
            version=version,
            limits=_limits(config, connected, ready, staleness=config.streaming.max_staleness),
            journal=journals.batches,
            runner=None if config.cluster is None else Thread(),
            watch=watch,
        )
        return drawn, streaming
    if not config.ahead:
        return drawn, drawn
    ahead = AheadSource(
        drawn,
        ahead=config.ahead,
        steps=config.steps,
        version=version,
        background=background,
        predicts=algorithm.row.filter.name == "all" and not isinstance(order, PrioritisedOrder),
        watch=watch,
    )
    return drawn, ahead


def spans_of(config: Config, engine: Engine) -> Spans | None:
    """Collects the timeline of a run whose stages overlap or have processes of their own."""
    if not config.ahead and config.streaming is None and config.cluster is None:
        return None
    return getattr(engine, "spans", None) or Spans()


def _continuous(engine: Engine) -> Engine:
    """The engine; one with replicas is wrapped so that all of them stay busy."""
    from groupwise.distributed.continuous import ContinuousEngine
    from groupwise.distributed.replicas import ClusterEngine

    return ContinuousEngine(engine) if isinstance(engine, ClusterEngine) else engine


def _limits(config: Config, connected: Connected, ready: Rendered, *, staleness: int) -> Limits:
    """The largest shapes of requests that are not known in advance."""
    room = connected.policy.context - config.sampling.max_tokens
    longest = min(room, config.data.max_prompt_tokens or room)
    if not isinstance(ready.tokens, LazySequence):
        longest = max(map(len, ready.tokens))
    rows, group = config.engine.max_rows, config.group_size
    most = config.prompts_per_step * (staleness + 1)
    return Limits(
        prompt=longest,
        group=group,
        suffix=config.sampling.max_tokens,
        slots=slots_for(max_rows=rows, group=group, prompts=most),
    )
