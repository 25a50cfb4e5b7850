"""Signal and noise of gradient estimators on the same rollouts of one policy.

Nothing is trained. Rollouts and the gradients of all completions (`gradients`) are computed once;
each estimator is then linear algebra on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms import ALGORITHMS, BoundAlgorithm, bind
from groupwise.algorithms.advantages import ADVANTAGES, advantage_inputs
from groupwise.config import Config
from groupwise.config.connect import Reward, connect, make_scorer
from groupwise.config.data import load_train, rendered
from groupwise.errors import UsageError
from groupwise.experiments.gradients import InnerProducts, coefficients, inner_products
from groupwise.experiments.signal_to_noise import Signal, finite, signal
from groupwise.models import Policy
from groupwise.rollouts.source import RolloutSource, joined
from groupwise.training.monitor.metrics import advantage_shares, effective_samples
from groupwise.types import ScoredGroups
from groupwise.updates import TorchLearner, assemble, sequences

REFERENCE = "rloo"
"""Its advantages are unbiased for the gradient of the expected reward."""

BINS = (
    ("0", 0.0, 0.0),
    ("to 1/4", 0.0, 0.25),
    ("to 1/2", 0.25, 0.5),
    ("to 3/4", 0.5, 0.75),
    ("below 1", 0.75, 1.0),
    ("1", 1.0, 1.0),
)
"""Bins of pass rates: name, above, up to. Rewards do not differ in groups of rate 0 or 1."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One advantage or algorithm on the rollouts that all of them share.

    Attributes:
        whole: over all groups.
        by_pass_rate: over the groups of each bin of `BINS` that has any.
        constant: root-mean-square gradient of a group if every reward were 1, over that with the
            real rewards; exactly 0 for an estimator with a baseline.
        shift: likewise the change of the gradient if every reward were one higher.
        scale: likewise the gradient if every reward were doubled; 1 where it is not affected.
    """

    name: str
    whole: Signal
    by_pass_rate: Mapping[str, Signal]
    constant: float
    shift: float
    scale: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            **self.whole.as_dict(),
            "constant": finite(self.constant),
            "shift": finite(self.shift),
            "scale": finite(self.scale),
            "by_pass_rate": {name: s.as_dict() for name, s in self.by_pass_rate.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Variance:
    """Every estimator on the same rollouts.

    Attributes:
        estimators: best first, by `step_cosine`.
        left_out: reasons why others could not be measured, by name.
        step: groups of an optimizer step, P.
        group: completions of each.
        pass_rate: mean over the groups measured.
        reference: completions behind the reference gradient.
        agreement: cosine of the gradients of its two halves.
        parameters, exact: of the gradients; see `gradients.InnerProducts`.
    """

    estimators: tuple[Estimator, ...]
    left_out: Mapping[str, str]
    step: int
    group: int
    pass_rate: float
    reference: int
    agreement: float
    parameters: int
    exact: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {k: v for k, v in vars(self).items() if k not in ("estimators", "left_out")}
        return {
            **plain,
            "agreement": finite(self.agreement),
            "left_out": dict(self.left_out),
            "estimators": [each.as_dict() for each in self.estimators],
        }


def variance(
    config: Config,
    *,
    advantages: Sequence[str] = ("all",),
    algorithms: Sequence[str] = (),
    prompts: int = 64,
    batches: int = 16,
    policy: Policy | None = None,
    functions: Sequence[Reward] = (),
    heartbeat: Callable[[str], None] = lambda stage: None,
) -> Variance:
    """Measure estimators of the gradient at a fixed policy, all on the same rollouts.

    Args:
        config: model, prompts, rewards, sampling, and the sizes of a step.
        advantages: registered advantages, put into the configured algorithm one after the other;
            "all" stands for every one.
        algorithms: rows of the table, each with its own settings; "all" likewise.
        prompts: groups to measure on, rounded up to whole steps.
        batches: further steps of rollouts behind the reference, the gradient of the expected
            reward; they share nothing with the groups measured.
        policy, functions: a model and rewards in place of the configured ones.
        heartbeat: called regularly with the current stage.

    Returns:
        KL terms and entropy bonuses are left out: the policy is its own reference.

    Raises:
        UsageError: an unknown name, or fewer than two steps of the reference.
    """
    if batches < 2:
        raise UsageError(f"--batches = {batches}: must be at least 2, to see how far they agree.")
    chosen = _chosen(config, advantages, algorithms)
    plain = bind(REFERENCE)
    with ExitStack() as undo:
        scorer = undo.enter_context(make_scorer(config, functions))
        connected = connect(config, plain, policy=policy)
        undo.callback(connected.engine.close)
        learner = connected.learner
        if not isinstance(learner, TorchLearner):
            raise UsageError(
                "variance: runs in one process; start it without torchrun, and remove [cluster]."
            )
        ready = rendered(config, connected.policy, load_train(config))
        source = RolloutSource(
            ready.prompts,
            ready.tokens,
            engine=connected.engine,
            scorer=scorer,
            keep=plain.filter,
            group=config.group_size,
            sampling=config.sampling,
            seed=config.seed,
        )
        size = config.prompts_per_step
        heartbeat("rollouts")
        steps = [source.take(size, step=step) for step in range(max(1, -(-prompts // size)))]
        halves = _reference(learner, source, plain, batches, len(steps), size, heartbeat)
    judged, left_out = _judged(chosen, steps)
    whole = _concatenated(steps)
    found = inner_products(
        learner,
        sequences(whole),
        others=halves,
        each=lambda: heartbeat("gradients"),
    )
    return _measured(judged, left_out, whole, found, step=size, batches=batches)


def _chosen(
    config: Config, advantages: Sequence[str], algorithms: Sequence[str]
) -> dict[str, BoundAlgorithm | str]:
    """The estimators to measure by name; a reason where one cannot be set up."""
    chosen: dict[str, BoundAlgorithm | str] = {}
    own = bind(config.algorithm.name, config.algorithm.overrides()).row.advantage.name
    for name in ADVANTAGES.names() if "all" in advantages else advantages:
        ADVANTAGES.get(name)
        overrides = config.algorithm.overrides() | {"entropy": {"coefficient": 0.0}}
        if name != own:
            overrides |= {"advantage": {"name": name}}
        chosen[name] = _bound(config.algorithm.name, overrides)
    for name in ALGORITHMS.names() if "all" in algorithms else algorithms:
        ALGORITHMS.get(name)
        named = f"{name} (algorithm)" if name in chosen else name
        chosen[named] = _bound(name, {"entropy": {"coefficient": 0.0}})
    if not chosen:
        raise UsageError("--advantages: must name at least one estimator, or be 'all'.")
    return chosen


def _bound(name: str, overrides: Mapping[str, Mapping[str, Any]]) -> BoundAlgorithm | str:
    try:
        return bind(name, overrides)
    except UsageError as error:
        return str(error)


def _reference(
    learner: TorchLearner,
    source: RolloutSource,
    algorithm: BoundAlgorithm,
    batches: int,
    start: int,
    size: int,
    heartbeat: Callable[[str], None],
) -> list[Float[Tensor, "parameters"]]:
    """The ascent gradient of the expected reward from each half of new batches."""
    halves: list[Tensor] = [torch.zeros(()), torch.zeros(())]
    for number in range(batches):
        heartbeat("reference gradient")
        scored = source.take(size, step=start + number)
        batch = sequences(scored)
        [step] = assemble(
            batch, algorithm.advantage(advantage_inputs(scored, batch)), algorithm.weighting
        )
        halves[number % 2] = halves[number % 2] - learner.gradient(step, algorithm.objective)
    return halves


def _judged(
    chosen: Mapping[str, BoundAlgorithm | str], steps: Sequence[ScoredGroups]
) -> tuple[dict[str, list[np.ndarray]], dict[str, str]]:
    """The factor by which each estimator multiplies completions, with the rewards as they are, all
    1, one higher, and doubled; or the reason why it has none.
    """
    changes: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda r: r,
        lambda r: r * 0 + 1,
        lambda r: r + 1,
        lambda r: r * 2,
    )
    judged, left_out = {}, {}
    for name, algorithm in chosen.items():
        try:
            if isinstance(algorithm, str):
                raise UsageError(algorithm)
            judged[name] = [
                np.concatenate([coefficients(algorithm, _changed(step, change)) for step in steps])
                for change in changes
            ]
        except UsageError as error:
            left_out[name] = str(error)
    return judged, left_out


def _changed(scored: ScoredGroups, change: Callable[[Tensor], Tensor]) -> ScoredGroups:
    """The groups with other rewards, in total and in every part; correctness stays."""
    scores = scored.scores
    parts = {name: change(values) for name, values in scores.parts.items()}
    return replace(scored, scores=replace(scores, total=change(scores.total), parts=parts))


def _concatenated(steps: Sequence[ScoredGroups]) -> ScoredGroups:
    """All groups as those of one step."""
    return replace(
        steps[0],
        groups=tuple(group for step in steps for group in step.groups),
        scores=joined([step.scores for step in steps]),
        keep=torch.cat([step.keep for step in steps]),
    )


def _measured(
    judged: Mapping[str, Sequence[np.ndarray]],
    left_out: Mapping[str, str],
    whole: ScoredGroups,
    found: InnerProducts,
    *,
    step: int,
    batches: int,
) -> Variance:
    passed, valid = _pass_rates(whole), whole.scores.valid
    group = valid.shape[1]
    norm = math.sqrt(max(0.0, found.among.sum()))
    direction = found.others.sum(1) / norm if norm > 0 else found.others.sum(1) * math.nan
    estimators = [
        _estimator(name, given, found.scores, direction, valid, passed, step)
        for name, given in judged.items()
    ]
    first, second = np.diag(found.among)
    apart = math.sqrt(first * second)
    return Variance(
        estimators=tuple(sorted(estimators, key=_order)),
        left_out=left_out,
        step=step,
        group=group,
        pass_rate=float(np.nanmean(passed)),
        reference=batches * step * group,
        agreement=float(found.among[0, 1] / apart) if apart > 0 else math.nan,
        parameters=found.parameters,
        exact=found.exact,
    )


def _estimator(
    name: str,
    given: Sequence[np.ndarray],
    scores: np.ndarray,
    direction: np.ndarray,
    valid: Tensor,
    passed: np.ndarray,
    size: int,
) -> Estimator:
    real, constant, shifted, doubled = given
    gram, pull = _group_gram(real, scores), (real * direction.reshape(real.shape)).sum(1)
    power = float(np.trace(gram))

    def against(other: np.ndarray) -> float:
        return math.sqrt(_power(other, scores) / power) if power > 0 else math.nan

    def over(chosen: np.ndarray) -> Signal:
        found = signal(gram[np.ix_(chosen, chosen)], pull[chosen], step=size)
        used, shares = torch.from_numpy(real[chosen]), valid[chosen]
        told = advantage_shares(used, shares)
        return Signal(
            groups=len(chosen),
            squared_norm=found[0],
            trace=found[1],
            signal_to_noise=found[2],
            cosine=found[3],
            step_cosine=found[4],
            pull=float(pull[chosen].sum() / pull.sum()) if pull.any() else math.nan,
            positive=told["positive_share"],
            negative=told["nonzero_share"] - told["positive_share"],
            nonzero=told["nonzero_share"],
            effective_samples=effective_samples(used, shares),
        )

    bins = {label: np.flatnonzero(_within(passed, low, high)) for label, low, high in BINS}
    return Estimator(
        name=name,
        whole=over(np.arange(len(real))),
        by_pass_rate={label: over(chosen) for label, chosen in bins.items() if len(chosen)},
        constant=against(constant),
        shift=against(shifted - real),
        scale=against(doubled),
    )


def _group_gram(coefficient: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Inner products of the gradients of groups, from those of their completions."""
    prompts, group = coefficient.shape
    spread = np.zeros((prompts, prompts * group))
    for place in range(prompts):
        spread[place, place * group : (place + 1) * group] = coefficient[place]
    return spread @ scores @ spread.T


def _power(coefficient: np.ndarray, scores: np.ndarray) -> float:
    """Sum over groups of the squared norm of the gradient."""
    return max(0.0, float(np.trace(_group_gram(coefficient, scores)))) if coefficient.any() else 0.0


def _pass_rates(scored: ScoredGroups) -> np.ndarray:
    """Share of each group's judged completions that are right; of those with a positive reward
    where nothing says what is right."""
    scores = scored.scores
    right = torch.where(torch.isnan(scores.correct), (scores.total > 0).float(), scores.correct)
    right = torch.where(scores.valid, right, torch.nan)
    return right.double().nanmean(1).numpy()


def _within(passed: np.ndarray, low: float, high: float) -> np.ndarray:
    if low == high:
        return passed == low
    return (passed > low) & (passed <= high) & (passed < 1)


def _order(estimator: Estimator) -> tuple[bool, float]:
    cosine = estimator.whole.step_cosine.value
    return (math.isnan(cosine), -cosine)
