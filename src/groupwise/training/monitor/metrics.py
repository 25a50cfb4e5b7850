"""Metrics of a training step: pure functions of saved values, without gradients.

A metric over tokens covers the tokens that the mask keeps and that were computed; NaN stands for
"not computed" and is left out. A metric over nothing is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from groupwise.evaluation.details import calls_made
from groupwise.models.devices import peak_memory
from groupwise.training.monitor.answers import answer_metrics
from groupwise.types import Batch, Completion, Metrics, ScoredGroups, Scores, StepResult, Update

NAN = float("nan")


@runtime_checkable
class Clipping(Protocol):
    """An algorithm that knows its ratio and the band in which that has its full gradient."""

    @property
    def clip_band(self) -> tuple[float, float] | None:
        """Lowest and highest ratio with a full gradient; None where nothing is clipped."""
        ...

    def log_ratio(
        self,
        logp: Float[Tensor, "batch time"],
        old_logp: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
    ) -> Float[Tensor, "batch time"]:
        """The log-ratio that the surrogate sees at every token."""
        ...


def _mean(values: Float[Tensor, "*shape"]) -> float:
    return float(values.double().mean()) if values.numel() else NAN


def signal_share(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"]
) -> float:
    """Share of groups whose judged rewards are not all equal, over all groups.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> signal_share(rewards, torch.ones(2, 2, dtype=torch.bool))
        0.5
    """
    highest = torch.where(valid, rewards, -torch.inf).amax(-1)
    lowest = torch.where(valid, rewards, torch.inf).amin(-1)
    tolerance = max(1e-8, 8 * torch.finfo(rewards.dtype).eps)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1)
    return _mean(((highest - lowest) > tolerance * scale).double())


def advantage_shares(
    advantage: Float[Tensor, "prompt group *time"], valid: Bool[Tensor, "prompt group"]
) -> Metrics:
    """Shares of the judged completions with a positive, and with any, advantage.

    A completion with advantages per token counts by their sum (positive) or if one is not 0.

    Example:
        >>> advantage_shares(torch.tensor([[1.5, -0.5, 0.0, 0.0]]), torch.ones(1, 4) > 0)
        {'positive_share': 0.25, 'nonzero_share': 0.5}
    """
    rows = advantage[valid]
    whole = rows if rows.ndim == 1 else rows.sum(-1)
    some = rows != 0 if rows.ndim == 1 else (rows != 0).any(-1)
    return {
        "positive_share": _mean((whole > 0).double()),
        "nonzero_share": _mean(some.double()),
    }


def effective_samples(
    advantage: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"]
) -> float:
    """How many samples of a group carry its gradient: (Σ|A|)² / ΣA², mean over groups with any.

    Example:
        >>> effective_samples(torch.tensor([[1.0, -1.0, 0.0]]), torch.ones(1, 3) > 0)
        2.0
    """
    a = torch.where(valid, advantage, 0).double()
    squares = (a**2).sum(-1)
    live = squares > 0
    return _mean(a.abs().sum(-1)[live] ** 2 / squares[live])


def clip_shares(
    log_ratio: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    low: float,
    high: float,
) -> Metrics:
    """Shares of tokens whose gradient a clip at [low, high] cuts, below and above.

    A token is cut below where A < 0 and its ratio is under `low`, above where A > 0 and its ratio
    is over `high`; both are shares of all computed tokens.

    Example:
        >>> ratio, a = torch.tensor([0.5, 1.5, 1.5, 1.0]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
        >>> clip_shares(ratio.log(), a, torch.ones(4) > 0, low=0.8, high=1.2)
        {'clip_low': 0.25, 'clip_high': 0.25}
    """
    used = mask & ~torch.isnan(log_ratio)
    ratio, a = log_ratio[used].exp(), advantage[used]
    return {
        "clip_low": _mean(((a < 0) & (ratio < low)).double()),
        "clip_high": _mean(((a > 0) & (ratio > high)).double()),
    }


def divergence(
    sampled: Float[Tensor, "*shape"], other: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Metrics:
    """KL(sampled‖other) per token from tokens of `sampled`: k1 = mean x, k3 = mean(e^−x − 1 + x).

    Args:
        sampled: log-probabilities under the policy that wrote the tokens.
        other: log-probabilities of the same tokens under the other policy.
        mask: tokens to count; those not computed under both are left out.

    Returns:
        "k1" (can be negative) and "k3" (cannot), in nats; x = sampled − other.

    Example:
        >>> found = divergence(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([True]))
        >>> [round(value, 4) for value in found.values()]
        [0.5, 0.1065]
    """
    used = mask & ~torch.isnan(sampled) & ~torch.isnan(other)
    x = (sampled - other)[used].double()
    return {"k1": _mean(x), "k3": _mean(torch.expm1(-x) + x)}


def sampler_gap(
    old_logp: Float[Tensor, "*shape"],
    sampler_logp: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Metrics:
    """How far the learner's probabilities are from the engine's, per computed token.

        d = log π_learner − log π_sampler,   r = e^d,   ess = (Σ r)² / (n · Σ r²)

    Returns:
        "sampler_gap" and "sampler_gap_max" (mean and largest |d|) and "sampler_kl" (k3 estimate of
        KL(sampler‖learner)), in nats; "sampler_ratio_gap" and "sampler_ratio_gap_max" (mean and
        largest |r − 1|); "sampler_ess", the share of the tokens that would be left if each were
        weighted by r: 1 where both sides agree.

    Example:
        >>> found = sampler_gap(torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2) > 0)
        >>> [round(value, 4) for value in found.values()]
        [0.5, 1.0, 0.3591, 0.8591, 1.7183, 0.824]
    """
    used = mask & ~torch.isnan(old_logp) & ~torch.isnan(sampler_logp)
    d = (old_logp - sampler_logp)[used].double()
    gap, off = d.abs(), torch.expm1(d).abs()
    # Scaled so that the largest weight is 1: no square can overflow.
    scaled = torch.exp(d - d.max()) if d.numel() else d
    return {
        "sampler_gap": _mean(gap),
        "sampler_gap_max": float(gap.max()) if d.numel() else NAN,
        "sampler_kl": divergence(sampler_logp, old_logp, mask)["k3"],
        "sampler_ratio_gap": _mean(off),
        "sampler_ratio_gap_max": float(off.max()) if d.numel() else NAN,
        "sampler_ess": _mean(scaled) ** 2 / _mean(scaled**2),
    }


def token_age(age: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Metrics:
    """Optimizer steps between the policy that wrote a token and the one that learns from it.

    Returns:
        "token_age" and "token_age_max", mean and largest over the tokens that are learned from,
        and "old_share", the share of them that an earlier policy wrote.

    Example:
        >>> token_age(torch.tensor([2.0, 0.0, 0.0, 9.0]), torch.tensor([1, 1, 1, 0]) > 0)
        {'token_age': 0.6666666666666666, 'token_age_max': 2.0, 'old_share': 0.3333333333333333}
    """
    used = age[mask]
    return {
        "token_age": _mean(used),
        "token_age_max": float(used.max()) if used.numel() else NAN,
        "old_share": _mean((used > 0).double()),
    }


def gap_by_age(
    old_logp: Float[Tensor, "*shape"],
    sampler_logp: Float[Tensor, "*shape"],
    age: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
) -> Metrics:
    """How far the learner has moved from the policies that wrote older tokens.

    Returns:
        "kl_at_age.n" and "ess_at_age.n" for every age n > 0: "sampler_kl" and "sampler_ess" (see
        `sampler_gap`) of the tokens of that age.

    Example:
        >>> old, ages = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 2.0, 2.0])
        >>> found = gap_by_age(old, torch.zeros(3), ages, torch.ones(3) > 0)
        >>> {name: round(value, 4) for name, value in found.items()}
        {'kl_at_age.2': 0.3591, 'ess_at_age.2': 0.824}
    """
    metrics: Metrics = {}
    for each in age[mask].unique().tolist():
        if each:
            gap = sampler_gap(old_logp, sampler_logp, mask & (age == each))
            metrics[f"kl_at_age.{each:.0f}"] = gap["sampler_kl"]
            metrics[f"ess_at_age.{each:.0f}"] = gap["sampler_ess"]
    return metrics


def entropy(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> float:
    """Mean entropy per computed token, in nats.

    Example:
        >>> entropy(torch.tensor([0.5, 1.5, float("nan")]), torch.tensor([True, True, True]))
        1.0
    """
    return _mean(values[mask & ~torch.isnan(values)])


def lengths(tokens: Num[Tensor, "*shape"], truncated: Bool[Tensor, "*shape"]) -> Metrics:
    """Mean and largest length in tokens, and the share that ran out of budget, of all completions.

    Example:
        >>> lengths(torch.tensor([[2, 4]]), torch.tensor([[False, True]]))
        {'length': 3.0, 'length_max': 4.0, 'truncated_share': 0.5}
    """
    return {
        "length": _mean(tokens.double()),
        "length_max": float(tokens.max()) if tokens.numel() else NAN,
        "truncated_share": _mean(truncated.double()),
    }


def step_metrics(result: StepResult, *, algorithm: Clipping) -> Metrics:
    """The metrics of one training step, except for its costs.

    Args:
        result: the step.
        algorithm: for the band that clip shares refer to.

    Returns:
        Finite where there was anything to measure. Metrics that the step has no data for (a
        reference, old log-probabilities, a clip, an update of the policy) are absent. Metrics of
        further learners carry their name: "critic.loss", "critic.grad_norm", ….
    """
    scored, updates = result.scored, result.updates.get("policy", ())
    scores = scored.scores
    judged = scores.total[scores.valid]
    finishes = [[c.finish for c in group.completions] for group in scored.groups]
    written = torch.tensor([[c.own_tokens for c in group.completions] for group in scored.groups])
    right = scores.correct[scores.valid & ~torch.isnan(scores.correct)]
    every = [update for several in result.updates.values() for update in several]
    seconds = sum(scored.seconds.values()) + sum(sum(u.seconds.values()) for u in every)
    metrics: Metrics = {
        "reward": _mean(judged),
        "reward_std": float(judged.double().std(correction=0)) if judged.numel() else NAN,
        **({"accuracy": _mean(right)} if right.numel() else {}),
        "valid_share": _mean(scores.valid.double()),
        "signal_share": signal_share(scores.total, scores.valid),
        **advantage_shares(result.advantages, scores.valid),
        **lengths(written, torch.tensor([[f == "length" for f in row] for row in finishes])),
        **answer_metrics(scored),
        "drawn": float(scored.drawn),
        **({} if scored.unfinished is None else {"unfinished": float(scored.unfinished)}),
        **_of_updates(updates),
        "tokens": float(written.sum()),
        **tool_metrics([c for group in scored.groups for c in group.completions]),
        **accuracy_by_calls(scored),
        **({"tokens_per_second": float(written.sum()) / seconds} if seconds > 0 else {}),
        **_broken([c for group in scored.groups for c in group.completions]),
    }
    if result.advantages.ndim == 2:
        metrics["effective_samples"] = effective_samples(result.advantages, scores.valid)
    metrics.update({f"reward_{name}": _known(part) for name, part in scores.parts.items()})
    if updates:
        metrics |= _of_tokens(result.batches, updates, algorithm=algorithm)
    for name, several in result.updates.items():
        if name != "policy":
            metrics |= {f"{name}.{key}": value for key, value in _of_updates(several).items()}
    skipped = sum(not math.isfinite(update.grad_norm) for update in every)
    return {**metrics, **duplicates_and_correlation(scored), "skipped_updates": float(skipped)}


def _broken(completions: Sequence[Completion]) -> Metrics:
    """The share of completions whose probabilities were not finite, if there are any."""
    count = sum(c.finish == "error" and c.failure is None for c in completions)
    return {"broken_share": count / len(completions)} if count else {}


def tool_metrics(completions: Sequence[Completion]) -> Metrics:
    """What an environment counted, as means over completions; nothing without one.

    Returns:
        "calls"; "answered_share" of the calls: those neither failed, refused nor malformed;
        "injected" tokens; "seconds_per_call"; "tool_wait_seconds", those in which the completion
        waited, for a free worker as well; and what the environment counts besides, as "tool_found".
    """
    told = [c for c in completions if "calls" in c.values]
    if not told:
        return {}
    names = sorted({name for c in told for name in c.values})
    sums = {name: math.fsum(c.values.get(name, 0.0) for c in told) for name in names}
    unanswered = (
        sum(c.failure is not None for c in told)
        + sums.get("malformed", 0.0)
        + sums.get("refused", 0.0)
    )
    injected = sum(len(c.tokens) - c.own_tokens for c in told)
    calls, seconds = sums.pop("calls"), sums.pop("tool_seconds", 0.0)
    return {
        "calls": calls / len(told),
        "injected": injected / len(told),
        **{f"tool_{name}": total / len(told) for name, total in sums.items()},
        **({"answered_share": 1 - unanswered / calls} if calls else {}),
        **({"seconds_per_call": seconds / calls} if calls else {}),
    }


def accuracy_by_calls(scored: ScoredGroups) -> Metrics:
    """Accuracy of the judged completions by their number of calls; nothing without an environment.

    Returns:
        "accuracy_after_n_calls" for every number n that occurs; the largest, `MOST_CALLS`, stands
        for more as well.
    """
    correct = scored.scores.correct.masked_fill(~scored.scores.valid, NAN).flatten().tolist()
    completions = [c for group in scored.groups for c in group.completions]
    found: dict[int, list[float]] = {}
    for completion, right in zip(completions, correct, strict=True):
        if "calls" in completion.values and not math.isnan(right):
            found.setdefault(calls_made(completion), []).append(right)
    return {f"accuracy_after_{n}_calls": math.fsum(of) / len(of) for n, of in sorted(found.items())}


def _of_updates(updates: Sequence[Update]) -> Metrics:
    """Metrics of one learner's optimizer steps; none where it took none."""
    if not updates:
        return {}
    balances = [update.aux_loss for update in updates if update.aux_loss is not None]
    return {
        "loss": sum(update.loss for update in updates),
        "grad_norm": updates[-1].grad_norm,
        "learning_rate": updates[-1].learning_rate,
        "computed_share": _mean(torch.cat([update.computed for update in updates]).double()),
        **({"aux_loss": sum(balances) / len(balances)} if balances else {}),
    }


def _known(values: Float[Tensor, "*shape"]) -> float:
    return _mean(values[~torch.isnan(values)])


def _of_tokens(
    batches: Sequence[Batch], updates: Sequence[Update], *, algorithm: Clipping
) -> Metrics:
    """Metrics over the tokens of all optimizer steps of one training step."""

    def joined(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([v.detach().flatten().cpu() for v in values])

    pairs = list(zip(batches, updates, strict=True))
    mask = joined([batch.mask for batch in batches])
    logp = joined([update.logp for update in updates])
    old = joined([u.logp if b.old_logp is None else b.old_logp for b, u in pairs])
    exact = entropy(joined([update.entropy for update in updates]), mask)
    sampler = [b.sampler_logp for b in batches if b.sampler_logp is not None]
    # −logp of the sampled tokens estimates the entropy where the learner did not compute it; the
    # sampler's covers the rows that the update left out as well.
    drawn = joined(sampler) if len(sampler) == len(batches) else logp
    metrics: Metrics = {"entropy": entropy(-drawn, mask) if exact != exact else exact}
    ages = [batch.columns.get("age", torch.zeros(batch.mask.shape)) for batch in batches]
    age = joined(ages)
    if len(sampler) == len(batches):
        # Tokens of earlier policies differ by what has been learned since.
        present = mask & (age == 0)
        if present.any() or not mask.any():
            metrics.update(sampler_gap(old, drawn, present))
        metrics.update(gap_by_age(old, drawn, age, mask))
    if age.any():
        metrics |= token_age(age, mask)
    reference = [b.ref_logp for b in batches if b.ref_logp is not None]
    if len(reference) == len(batches):
        metrics["kl"] = divergence(old, joined(reference), mask)["k3"]
    ratios = [
        algorithm.log_ratio(u.logp, b.old_logp.to(u.logp), b.mask.to(u.logp.device))
        for b, u in pairs
        if b.old_logp is not None
    ]
    if len(ratios) == len(pairs):
        metrics["policy_kl"] = divergence(old, logp, mask)["k3"]
        if algorithm.clip_band is not None:
            low, high = algorithm.clip_band
            a = joined([batch.advantage for batch in batches])
            metrics.update(clip_shares(joined(ratios), a, mask, low=low, high=high))
    return metrics


def duplicates_and_correlation(scored: ScoredGroups) -> Metrics:
    """Metrics that only alerts use.

    Returns:
        "duplicate_share", the share of completions that repeat the tokens of an earlier one of
        their group, where groups that are entirely correct count none; "parts_correlation", the
        least correlation of two parts of the reward within groups, absent where fewer than two
        parts vary.
    """
    groups = scored.groups
    count = sum(len(group) for group in groups)
    repeated = [
        0 if right else len(group) - len({tuple(c.tokens) for c in group.completions})
        for group, right in zip(groups, _right_throughout(scored.scores), strict=True)
    ]
    metrics = {"duplicate_share": sum(repeated) / count}
    least = _least_correlation(list(scored.scores.parts.values()), scored.scores.valid)
    return metrics if least is None else {**metrics, "parts_correlation": least}


def _right_throughout(scores: Scores) -> list[bool]:
    """Whether every judged completion is known to be correct, by group."""
    right = (scores.correct == 1) | ~scores.valid
    return (right.all(1) & scores.valid.any(1)).tolist()


def _least_correlation(parts: Sequence[Tensor], valid: Tensor) -> float | None:
    known = valid
    for part in parts:
        known = known & ~torch.isnan(part)
    if len(parts) < 2 or not bool(known.any()):
        return None
    centred = []
    for part in parts:
        values = torch.where(known, part, 0).double()
        mean = values.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
        centred.append(torch.where(known, values - mean, 0).flatten())
    found = [
        float(a @ b / (a.norm() * b.norm()))
        for i, a in enumerate(centred)
        for b in centred[:i]
        if float(a.norm()) > 1e-9 and float(b.norm()) > 1e-9
    ]
    return min(found) if found else None


def step_costs(scored: ScoredGroups, updates: Sequence[Update], *, seconds: float) -> Metrics:
    """Seconds of the step by stage, and peak memory.

    Args:
        seconds: of the step as a whole.

    Returns:
        "seconds", "seconds.rollout", "seconds.reward", …, and "memory_mb" of the GPU, or of the
        process where there is none.
    """
    stages = dict(scored.seconds)
    for update in updates:
        for stage, spent in update.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + spent
    return {
        "seconds": seconds,
        **{f"seconds.{stage}": spent for stage, spent in stages.items()},
        "memory_mb": peak_memory(),
    }
