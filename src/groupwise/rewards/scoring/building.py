"""Builds the scorer of a recipe or of Python functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from groupwise.errors import UsageError
from groupwise.registry import FunctionSpec
from groupwise.rewards.base import Trait, traits
from groupwise.rewards.compose import combination
from groupwise.rewards.scoring.adapters import adapted, function_name, registered
from groupwise.rewards.scoring.pipeline import Composition, RewardComponent
from groupwise.rewards.scoring.pool import PoolScorer, Start
from groupwise.rewards.scoring.scorer import InlineScorer, Scorer
from groupwise.settings import RewardSettings


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


def build_scorer(parts: Sequence[RewardSettings], **options: Unpack[ScorerOptions]) -> Scorer:
    """The scorer of a recipe.

    Args:
        parts: the components; length rewards read what a verifier before them found.
        options: see `ScorerOptions`.

    Raises:
        UsageError: unknown rewards or settings, or correctness asked for before it is known.
    """
    components = []
    for part in parts:
        reward = registered(
            FunctionSpec(name=part.name, settings=part.settings), where=f"reward.{part.name}"
        )
        marked = traits(getattr(reward, "function", reward))
        verifies = Trait.VERIFIER in marked if part.correct is None else part.correct
        components.append(
            RewardComponent(
                label=part.label or part.name.rpartition(":")[2],
                reward=reward,
                weight=part.weight,
                verifies=verifies,
                optional=part.optional,
            )
        )
    return _scorer(components, [part.correct for part in parts], **options)


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
