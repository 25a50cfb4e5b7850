"""What TRL logs, by its names, from scored groups and the metrics of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.advantages import advantage_inputs
from groupwise.types import Completion, Metrics, Outputs, ScoredGroups
from groupwise.updates import assemble, sequences

EQUAL = 1e-8
"""A deviation up to which TRL calls the rewards of a group equal."""


def of_rollouts(scored: ScoredGroups, *, scale: str = "group") -> Metrics:
    """Lengths, rewards by function, and the share of rows without spread.

    Args:
        scale: the deviation that counts for that share: of the group, or of the "batch".

    Returns:
        Under TRL's names; NaN where a function said nothing. Calls of tools only where there are
        tools.
    """
    completions = [c for group in scored.groups for c in group.completions]
    lengths = torch.tensor([float(c.own_tokens) for c in completions])
    ended = lengths[torch.tensor([c.finish == "stop" for c in completions])]
    scores = scored.scores
    total = torch.where(scores.valid, scores.total, math.nan)
    spread = _std(total.flatten())[None] if scale == "batch" else _std(total)
    return {
        **_lengths("length", lengths),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        **_lengths("terminated_length", ended if len(ended) else torch.zeros(1)),
        **{
            name: value
            for label, values in scores.parts.items()
            for name, value in (
                (f"rewards/{label}/mean", float(values.nanmean())),
                (f"rewards/{label}/std", float(_std(values.flatten()))),
            )
        },
        "reward": float(total.nanmean()),
        "reward_std": float(_std(total.flatten())),
        "frac_reward_zero_std": float((spread.abs() <= EQUAL).float().mean()),
        **_calls(completions),
    }


def loss(scored: ScoredGroups, algorithm: BoundAlgorithm, *, reference: Tensor | None) -> float:
    """The loss of an optimizer step on these rollouts, right after they were sampled.

    Every ratio is 1, and the log-probabilities are those of the sampler, so nothing is computed
    again; the entropy of a bonus is estimated by them. A single completion has an advantage of 0.

    Args:
        reference: log-probabilities under the reference, of the shape of the tokens.
    """
    batch = replace(sequences(scored), ref_logp=reference)
    data = advantage_inputs(scored, batch)
    keep = algorithm.filter(data)
    alone = scored.scores.total.shape[1] < 2
    advantage = torch.zeros_like(scored.scores.total) if alone else algorithm.advantage(data)
    [step] = assemble(batch, advantage, algorithm.weighting, keep=keep)
    assert step.sampler_logp is not None  # engines always report them
    outputs = Outputs(logp=step.sampler_logp, entropy=-step.sampler_logp)
    return float((algorithm.objective(outputs, step) * step.weight).sum())


def _calls(completions: Sequence[Completion]) -> Metrics:
    """Calls per completion, and the share of them that raised."""
    if not any("calls" in one.values for one in completions):
        return {}
    called = sum(one.values.get("executed", 0.0) for one in completions)
    failed = sum(one.values.get("failed", 0.0) for one in completions)
    return {
        "tools/call_frequency": called / len(completions),
        "tools/failure_frequency": failed / called if called else 0.0,
    }


def of_update(metrics: Metrics, *, updates: int, clips: bool, bonus: float = 0.0) -> Metrics:
    """Figures of the optimizer steps, from the metrics of groupwise.

    Args:
        updates: optimizer steps that the metrics are of.
        clips: whether the surrogate clips ratios; on the first step nothing is cut yet.
        bonus: coefficient of the entropy bonus; with one, the loss without it is "policy_loss".
    """
    figures = {"step_time": metrics["seconds"] / updates, "entropy": metrics["entropy"]}
    if bonus:
        figures["entropy_coef"] = bonus
        figures["policy_loss"] = metrics["loss"] / updates + bonus * metrics["entropy"]
    figures |= {name: metrics[name] for name in ("kl", "aux_loss") if name in metrics}
    if clips:
        low, high = metrics.get("clip_low", 0.0), metrics.get("clip_high", 0.0)
        figures["clip_ratio/low_mean"], figures["clip_ratio/high_mean"] = low, high
        figures["clip_ratio/region_mean"] = low + high
    return figures


def tokens(scored: ScoredGroups) -> int:
    """Tokens of all rows, the prompt counted once per completion."""
    return sum(
        len(group.prompt_tokens) + len(completion.tokens)
        for group in scored.groups
        for completion in group.completions
    )


def averaged(window: Mapping[str, list[float]]) -> dict[str, float | None]:
    """The mean of what was noted under each name, without NaN; None where nothing is left."""
    means: dict[str, float | None] = {}
    for name, values in window.items():
        finite = [value for value in values if not math.isnan(value)]
        means[name] = sum(finite) / len(finite) if finite else None
    return means


def _lengths(name: str, values: Tensor) -> Metrics:
    kinds = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {f"completions/{kind}_{name}": float(value) for kind, value in kinds.items()}


def _std(values: Tensor) -> Tensor:
    """Deviation over the last axis with divisor n − 1, without NaN; NaN for fewer than two."""
    known = ~values.isnan()
    count = known.sum(-1)
    centred = torch.where(known, values - values.nanmean(-1, keepdim=True), 0)
    variance = (centred**2).sum(-1) / (count - 1).clamp(min=1)
    return torch.where(count > 1, variance.sqrt(), math.nan)
