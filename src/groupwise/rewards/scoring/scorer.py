"""Scorers: what turns groups into `Scores`. In this process here; in worker processes in `pool`."""

from __future__ import annotations

import concurrent.futures
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack, runtime_checkable

import torch

from groupwise.errors import RewardError, UsageError
from groupwise.registry import FunctionSpec
from groupwise.rewards.base import GroupScore, Trait, traits
from groupwise.rewards.compose import combination
from groupwise.rewards.scoring.adapters import adapted, function_name, registered
from groupwise.rewards.scoring.pipeline import (
    Call,
    CallResult,
    Composition,
    RewardComponent,
    driven,
    judge_group,
    run,
)
from groupwise.rewards.scoring.waiting import WAITING, Waiting
from groupwise.types import Group, Scores, Status

if TYPE_CHECKING:
    from groupwise.rewards.scoring.pool import Start

Ticket = concurrent.futures.Future[GroupScore]
"""A group being scored; handed to `gather` of the scorer that gave it."""


@runtime_checkable
class Scorer(Protocol):
    """Scores groups as they finish; order is kept by the tickets."""

    def submit(self, group: Group) -> Ticket: ...

    def gather(self, tickets: Sequence[Ticket]) -> Scores: ...

    def close(self) -> None: ...

    def __enter__(self) -> Scorer: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One part of a reward as a recipe writes it.

    Attributes:
        name: of the registry.
        weight: handed to the combination.
        settings: keyword-only parameters of the reward.
        label: the name in logs; default the name of the reward.
        optional: None then means that the part does not apply, not that the completion cannot be
            judged.
        correct: whether its value is the raw correctness; None for the first verifier only.
    """

    name: str
    weight: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    optional: bool = False
    correct: bool | None = None


class RewardSpecLike(Protocol):
    """What a part of a recipe must have; the other attributes of `RewardSpec` may be missing."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


class ScorerOptions(TypedDict, total=False):
    """How the parts of a reward are combined and where they run.

    Attributes:
        combine: see `groupwise.rewards.compose.combination`.
        workers: worker processes; 0 scores in this process, without limits. Parts that hold a
            model (`own_worker`) have a process each either way.
        timeout_s: wall-clock limit for judging one completion.
        memory_mb: memory a worker may use on top of what it starts with.
        max_tokens: the budget of the sampler, for length rewards.
        start: starts the workers; on this machine by default.
    """

    combine: Any
    workers: int
    timeout_s: float
    memory_mb: int | None
    max_tokens: int | None
    start: Start | None


class InlineScorer:
    """Scores groups in this process, in the thread that submits them.

    For cheap rewards that are trusted to return: nothing can be interrupted here. An exception is
    the status `error` of that completion. Async rewards run concurrently on one event loop, and
    rewards that wait for a server in threads.

    Args:
        composition: the reward.
        timeout_s: limit for awaiting one call of an async reward.
    """

    def __init__(self, composition: Composition, *, timeout_s: float = 60.0) -> None:
        self.composition = composition
        self._judged = False
        first = composition.combination.stops_at_first
        self._waiting = Waiting(timeout_s=timeout_s, first=first)

    def submit(self, group: Group) -> Ticket:
        """Score a group; only verdicts of async rewards and servers may arrive later."""
        ticket: Ticket = concurrent.futures.Future()
        steps = judge_group(self.composition, group)
        try:
            stage = next(steps)
            while stage[0][0].place not in WAITING:
                stage = steps.send(self._run(*stage))
        except StopIteration as end:
            ticket.set_result(end.value)
        except Exception as error:
            ticket.set_exception(error)
        else:
            return self._waiting.start(driven(steps, self._results, stage))
        return ticket

    def _run(self, parts: Sequence[RewardComponent], calls: list[Call]) -> list[CallResult]:
        return [run(parts, call, first=self._waiting.first) for call in calls]

    async def _results(
        self, parts: Sequence[RewardComponent], calls: list[Call]
    ) -> list[CallResult]:
        if parts[0].place in WAITING:
            return await self._waiting.results(parts[0], calls)
        return self._run(parts, calls)

    def gather(self, tickets: Sequence[Ticket]) -> Scores:
        """The scores of the groups in the order of the tickets.

        Raises:
            RewardError: a reward broke its contract, or nothing at all could be judged so far.
        """
        scores, self._judged = gathered(tickets, judged=self._judged)
        return scores

    def close(self) -> None:
        """Stop the event loop, if there is one; calls and requests that wait are cancelled."""
        self._waiting.close()

    def __enter__(self) -> InlineScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gathered(tickets: Sequence[Ticket], *, judged: bool) -> tuple[Scores, bool]:
    """Wait for tickets; also whether any completion has been judged so far.

    Raises:
        RewardError: in the first batch not one completion could be judged.
    """
    scores = stack([ticket.result() for ticket in tickets])
    if judged or not tickets:
        return scores, judged
    if not bool(scores.valid.any()):
        reasons = "; ".join(m for m, _ in Counter(scores.errors).most_common(3))
        count = scores.valid.numel()
        raise RewardError(f"reward: none of {count} completions could be judged: {reasons}")
    return scores, True


def stack(groups: Sequence[GroupScore]) -> Scores:
    """Scores of groups of one size as tensors of [prompt, group].

    Raises:
        RewardError: groups of different sizes.
    """
    sizes = {len(group.total) for group in groups}
    if len(sizes) > 1:
        raise RewardError(f"groups of different sizes cannot be stacked: {sorted(sizes)}")
    width = sizes.pop() if sizes else 0
    labels = list(groups[0].parts) if groups else []

    def table(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.float32).reshape(len(groups), width)

    status = tuple(tuple(group.status) for group in groups)
    return Scores(
        total=table([group.total for group in groups]),
        correct=table([group.correct for group in groups]),
        parts={label: table([group.parts[label] for group in groups]) for label in labels},
        status=status,
        valid=table([[s is Status.OK for s in row] for row in status]).bool(),
        errors=tuple(m for group in groups for m in group.errors if m is not None),
        reasons=tuple(tuple(group.errors) for group in groups),
    )


def build_scorer(
    parts: Sequence[RewardSpecLike],
    **options: Unpack[ScorerOptions],
) -> Scorer:
    """The scorer of a recipe.

    Args:
        parts: rewards of the registry with weights and settings (a `RewardSpec`, or anything with
            its first three attributes); length rewards see what a verifier before them found.
        options: see `ScorerOptions`.

    Raises:
        UsageError: unknown rewards or settings, or correctness asked for before it is known.
    """
    components, chosen = [], []
    for part in parts:
        reward = registered(
            FunctionSpec(name=part.name, settings=part.settings), where=f"reward.{part.name}"
        )
        explicit = getattr(part, "correct", None)
        marked = traits(getattr(reward, "function", reward))
        verifies = Trait.VERIFIER in marked if explicit is None else explicit
        components.append(
            RewardComponent(
                label=getattr(part, "label", None) or part.name.rpartition(":")[2],
                reward=reward,
                weight=part.weight,
                verifies=verifies,
                optional=getattr(part, "optional", False),
            )
        )
        chosen.append(explicit)
    return _scorer(components, chosen, **options)


def from_functions(
    functions: Callable[..., Any] | str | Sequence[Callable[..., Any] | str],
    weights: Sequence[float] | None = None,
    **options: Unpack[ScorerOptions],
) -> Scorer:
    """The scorer of Python functions.

    Args:
        functions: one or several of: `f(group) -> list`, `f(text, answer, …) -> float | None` with
            names of data or columns, TRL's `f(completions, **columns) -> list`, names of
            registered rewards; sync or async. The value of the first one that is a verifier (mark
            your own with `groupwise.rewards.verifier`) is the raw correctness; of a single
            unmarked function the raw correctness is not known.
        weights: one per function; default 1.
        options: see `ScorerOptions`.

    Raises:
        UsageError: a function of no accepted form, or a wrong number of weights.
    """
    items = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    weights = [1.0] * len(items) if weights is None else list(weights)
    if len(weights) != len(items):
        raise UsageError(f"reward: {len(items)} functions, but {len(weights)} weights.")
    components = []
    for item, weight in zip(items, weights, strict=True):
        reward = registered(FunctionSpec(name=item)) if isinstance(item, str) else adapted(item)
        marked = traits(getattr(reward, "function", reward))
        label = item if isinstance(item, str) else function_name(item)
        verifies = Trait.VERIFIER in marked
        components.append(
            RewardComponent(label=label, reward=reward, weight=weight, verifies=verifies)
        )
    return _scorer(components, [None] * len(components), **options)


def _scorer(
    parts: Sequence[RewardComponent],
    chosen: Sequence[bool | None],
    *,
    combine: Any = "weighted_sum",
    workers: int = 0,
    timeout_s: float = 10.0,
    memory_mb: int | None = 1024,
    max_tokens: int | None = None,
    start: Start | None = None,
) -> Scorer:
    composition = Composition(
        parts=tuple(_settled(parts, chosen)),
        combination=combination(combine),
        max_tokens=max_tokens,
    )
    if workers == 0 and all(part.place != "own_worker" for part in composition.parts):
        return InlineScorer(composition, timeout_s=max(timeout_s, 60.0))
    from groupwise.rewards.scoring.pool import PoolScorer

    return PoolScorer(
        composition, workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, start=start
    )


def _settled(
    parts: Sequence[RewardComponent], chosen: Sequence[bool | None]
) -> list[RewardComponent]:
    """Check that labels are unique, and that at most one part defines correctness, before any part
    that needs it.
    """
    if not parts:
        raise UsageError("reward.parts: must name at least one reward.")
    explicit = [i for i, flag in enumerate(chosen) if flag]
    if len(explicit) > 1:
        raise UsageError("reward.parts: only one part can define correctness.")
    verifiers = explicit or [i for i, part in enumerate(parts) if part.verifies]
    source = verifiers[0] if verifiers else None
    counts: Counter[str] = Counter()
    settled = []
    for i, part in enumerate(parts):
        wants = {"correct", "corrects"} & (
            getattr(part.reward, "required", frozenset()) or frozenset()
        )
        if wants and (source is None or source >= i):
            raise UsageError(
                f"reward {part.label}: needs raw correctness, so a verifier must come before it."
            )
        counts[part.label] += 1
        label = part.label if counts[part.label] == 1 else f"{part.label}_{counts[part.label]}"
        settled.append(replace(part, label=label, verifies=i == source))
    return settled


def reward_alert(history: Sequence[Scores], *, batches: int = 3) -> str | None:
    """Why a run should stop because of the rewards of its first batches; None to continue.

    Args:
        history: scores of the first batches, oldest first.
        batches: how many to wait for before "all zero" and "all equal" count.

    Returns:
        A sentence: most completions could not be judged, all rewards are 0, or all are the same.
    """
    seen = list(history[:batches])
    status = Counter(s for scores in seen for row in scores.status for s in row)
    judged, count = status[Status.OK], sum(status.values())
    if count and judged < count / 2:
        failed = ", ".join(f"{n} {s.value}" for s, n in status.most_common() if s is not Status.OK)
        errors = [message for scores in seen for message in scores.errors]
        often = f" Most often: {Counter(errors).most_common(1)[0][0]}" if errors else ""
        return f"only {judged} of {count} completions could be judged ({failed}).{often}"
    if len(seen) < batches:
        return None
    totals = torch.cat([scores.total[scores.valid] for scores in seen])
    low, high = float(totals.min()), float(totals.max())
    if not math.isclose(low, high, rel_tol=1e-6, abs_tol=1e-9):
        return None
    what = "is 0" if low == 0 else f"is {low:g}, the same for every completion"
    return (
        f"every reward of the first {batches} batches {what}, so there is nothing to learn from. "
        "`groupwise reward try` shows what each component scores for the reference answers."
    )
