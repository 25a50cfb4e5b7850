"""The SoftRank family: advantages that weigh a group by softmax(z / tau).

Written with w = softmax(z / tau) over the group, z the standard score of the rewards, K the number
of judged samples, f(r) = Σ_j w_j r_j (a soft maximum) and r₋ᵢ the group without sample i.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import (
    count,
    has_signal,
    judged,
    others,
    require_positive,
    softmax,
    standard_score,
    warn_below_zero,
)
from groupwise.algorithms.properties import breaks

_SHIFT = (
    "subtract the smallest reward that can occur, so that rewards start at 0, "
    "or use softrank_zero_sum, which only looks at differences."
)


def _weights(
    rewards: Float[Tensor, "*lead group"],
    valid: Bool[Tensor, "*lead group"],
    *,
    tau: float,
    ddof: int,
    eps: float = 0.0,
) -> Float[Tensor, "*lead group"]:
    require_positive("tau", tau)
    return softmax(standard_score(rewards, valid, ddof=ddof, eps=eps) / tau, valid)


def _soft_maximum(
    rewards: Float[Tensor, "*lead group"],
    valid: Bool[Tensor, "*lead group"],
    *,
    tau: float,
    ddof: int,
    eps: float = 0.0,
) -> Float[Tensor, "*lead 1"]:
    weights = _weights(rewards, valid, tau=tau, ddof=ddof, eps=eps)
    return (weights * rewards).sum(-1, keepdim=True)


def _soft_maximum_of_others(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"],
    *,
    tau: float,
    ddof: int,
) -> Float[Tensor, "prompt group"]:
    rest, counted = others(rewards, valid)
    return _soft_maximum(rest, counted, tau=tau, ddof=ddof).squeeze(-1)


@ADVANTAGES.register
@breaks("zero_without_signal")
def softrank(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """SoftRank-GRPO: each reward times its softmax weight in the group.

        A_i = w_i · r_i,   w = softmax(z / tau),   z = (r − mean r) / std r

    The weights sum to 1, so advantages are about K times smaller than those of `zscore`. There is
    no baseline: with rewards ≥ 0 nothing is pushed down, and a group of equal rewards r gets r/K.

    Args:
        rewards: [prompt, group], ≥ 0.
        valid: judged; None: every reward that is not NaN.
        tau: temperature; → 0 gives r_max/#best to the best, → ∞ gives r_i/K.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group]; 0 where not judged.

    Raises:
        UsageError: tau ≤ 0.

    Warns:
        RewardRangeWarning: a negative reward; the best answer would be pushed down most.

    Example:
        >>> softrank(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor([[0.4910, 0.0000, 0.0000, 0.4910]])

    Source: SoftRank-GRPO, the equation of the per-sample advantage.
    Elsewhere: the authors' code hands Σ_j w_j r_j to all samples alike: `softrank_group`.
    """
    r, v = judged(rewards, valid)
    warn_below_zero(r, name="softrank", remedy=_SHIFT)
    return _weights(r, v, tau=tau, ddof=ddof) * r


@ADVANTAGES.register
@breaks("zero_without_signal")
def softrank_group(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
    eps: float = 0.0,
) -> Float[Tensor, "prompt group"]:
    """The soft maximum of the group, the same number for every sample.

        A_i = f(r) = Σ_j w_j r_j,   w = softmax(z / tau),   z = (r − mean r) / (std r + eps)

    An unbiased estimate of (1/K)·∇E[f(r)] that tells good from bad samples only by how f varies
    between groups. It is here to reproduce published code and learns very slowly.

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        tau: temperature of the softmax.
        ddof: 0 divides the variance by K, 1 by K − 1.
        eps: added to the standard deviation.

    Returns:
        [prompt, group], constant over the judged samples of a group.

    Raises:
        UsageError: tau ≤ 0.

    Example:
        >>> softrank_group(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor([[0.9820, 0.9820, 0.9820, 0.9820]])

    Source: SoftRank-GRPO, Algorithm 1 ("weighted sum").
    Elsewhere: the authors' code uses ddof=1, eps=1e-5.
    """
    r, v = judged(rewards, valid)
    return torch.where(v, _soft_maximum(r, v, tau=tau, ddof=ddof, eps=eps), 0)


@ADVANTAGES.register
def softrank_centered(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """K times `softrank`, minus its mean over the group.

        A_i = K w_i r_i − f(r)

    Sums to 0 over the group; biased by its own sample, as `centered` is.

    Args:
        rewards: [prompt, group], ≥ 0.
        valid: judged; None: every reward that is not NaN.
        tau: temperature; → ∞ gives r_i − mean r.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Warns:
        RewardRangeWarning: a negative reward inverts the order.

    Example:
        >>> softrank_centered(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        tensor([[ 0.9820,  0.9820, -0.9820, -0.9820]])

    Source: the baseline mean_j(K w_j r_j) subtracted from SoftRank-GRPO.
    """
    r, v = judged(rewards, valid, least=2, name="softrank_centered")
    warn_below_zero(r, name="softrank_centered", remedy=_SHIFT)
    contribution = _weights(r, v, tau=tau, ddof=ddof) * r
    advantage = count(v, r) * contribution - contribution.sum(-1, keepdim=True)
    return torch.where(has_signal(r, v) & v, advantage, 0)


@ADVANTAGES.register
def softrank_loo(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """K times `softrank`, minus the soft maximum of the other samples.

        A_i = K w_i r_i − f(r₋ᵢ)

    The baseline does not depend on sample i, so the expected gradient is that of K·softrank.

    Args:
        rewards: [prompt, group], ≥ 0.
        valid: judged; None: every reward that is not NaN.
        tau: temperature; → ∞ gives `leave_one_out`.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Warns:
        RewardRangeWarning: a negative reward inverts the order.

    Example:
        >>> softrank_loo(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 3.8850, -0.9721, -0.9721, -0.9721]])

    Source: leave-one-out baseline (Kool et al. 2019) for SoftRank-GRPO.
    """
    r, v = judged(rewards, valid, least=2, name="softrank_loo")
    warn_below_zero(r, name="softrank_loo", remedy=_SHIFT)
    weighted = count(v, r) * _weights(r, v, tau=tau, ddof=ddof) * r
    advantage = weighted - _soft_maximum_of_others(r, v, tau=tau, ddof=ddof)
    return torch.where(has_signal(r, v) & v, advantage, 0)


@ADVANTAGES.register
def softrank_zero_sum(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """The softmax weight against the uniform weight, at the scale of a z-score.

        A_i = tau · (K w_i − 1),   w = softmax(z / tau)

    Sums to 0, unchanged by shifting or scaling the rewards; tau → ∞ gives `zscore`, and for 0/1
    rewards A/tau → `maxrl` as tau → 0 (so it vanishes there: see `softrank_interpolated`).

    Args:
        rewards: [prompt, group], any range.
        valid: judged; None: every reward that is not NaN.
        tau: temperature and scale.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> softrank_zero_sum(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        tensor([[ 0.4820,  0.4820, -0.4820, -0.4820]])

    Source: first-order form of the soft-maximum gradient, in standardised rewards.
    """
    r, v = judged(rewards, valid, least=2, name="softrank_zero_sum")
    advantage = tau * (count(v, r) * _weights(r, v, tau=tau, ddof=ddof) - 1)
    return torch.where(has_signal(r, v) & v, advantage, 0)


@ADVANTAGES.register
def softrank_interpolated(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """From imitating the best answers (tau → 0) to z-scores (tau → ∞), never vanishing.

        A_i = max(tau, 1) · (K w_i − 1),   w = softmax(z / tau)

    tau → 0 gives K/#best · 1[best] − 1, which is `maxrl` for 0/1 rewards.

    Args:
        rewards: [prompt, group], any range.
        valid: judged; None: every reward that is not NaN.
        tau: temperature.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group], summing to 0; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> softrank_interpolated(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), tau=0.01)
        tensor([[ 3., -1., -1., -1.]])

    Source: `softrank_zero_sum` with a scale that does not go to 0 with tau.
    """
    r, v = judged(rewards, valid, least=2, name="softrank_interpolated")
    weights = _weights(r, v, tau=tau, ddof=ddof)
    advantage = max(tau, 1.0) * (count(v, r) * weights - 1)
    return torch.where(has_signal(r, v) & v, advantage, 0)


@ADVANTAGES.register
def softrank_two_sided(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """The softmax weights of the best against those of the worst.

        A_i = max(tau, 1) / 2 · K · (w⁺_i − w⁻_i),   w⁺ = softmax(z / tau),   w⁻ = softmax(−z / tau)

    Sums to 0, grows with the reward, changes its sign with the rewards', and does not see their
    shift or scale. tau → ∞ gives `zscore`; tau → 0 gives K/2 to the best and −K/2 to the worst,
    shared among ties, which is half of `log_odds` for 0/1 rewards.

    Args:
        rewards: [prompt, group], any range.
        valid: judged; None: every reward that is not NaN.
        tau: temperature.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> softrank_two_sided(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 1.9360, -0.6453, -0.6453, -0.6453]])

    Source: `softrank_interpolated` and its mirror image, each by half.
    """
    r, v = judged(rewards, valid, least=2, name="softrank_two_sided")
    best = _weights(r, v, tau=tau, ddof=ddof)
    worst = _weights(-r, v, tau=tau, ddof=ddof)
    advantage = max(tau, 1.0) / 2 * count(v, r) * (best - worst)
    return torch.where(has_signal(r, v) & v, advantage, 0)


@ADVANTAGES.register
def entropic(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
) -> Float[Tensor, "prompt group"]:
    """The softmax weight of the raw rewards against the uniform weight.

        A_i = tau · (K ω_i − 1),   ω = softmax(r / tau)

    Sums to 0 and is unchanged by a shift; a larger reward scale makes it sharper.

    Args:
        rewards: [prompt, group], any range.
        valid: judged; None: every reward that is not NaN.
        tau: temperature in units of reward; → ∞ gives `centered`.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> entropic(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        tensor([[ 0.3808,  0.3808, -0.3808, -0.3808]])

    Source: first-order form of `lse_loo` (entropic risk, exponential utility).
    """
    require_positive("tau", tau)
    r, v = judged(rewards, valid, least=2, name="entropic")
    advantage = tau * (count(v, r) * softmax(r / tau, v) - 1)
    return torch.where(has_signal(r, v) & v, advantage, 0)


@ADVANTAGES.register
def lse_loo(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
) -> Float[Tensor, "prompt group"]:
    """What a sample adds to the log-mean-exp of its group, leave-one-out.

        A_i = K · [F(r) − F(r₋ᵢ)],   F(r) = tau · log mean_j exp(r_j / tau)

    With (1/K)·Σ A_i ∇log π the gradient is exactly ∇E[F(r)], an increasing function of the reward.

    Args:
        rewards: [prompt, group], any range.
        valid: judged; None: every reward that is not NaN.
        tau: temperature in units of reward; → ∞ gives `leave_one_out`.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> lse_loo(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 1.9089, -0.3729, -0.3729, -0.3729]])

    Source: multi-sample objective with a leave-one-out baseline (VIMCO, Mnih & Rezende 2016).
    """
    require_positive("tau", tau)
    r, v = judged(rewards, valid, least=2, name="lse_loo")

    def log_mean_exp(values: Tensor, counted: Tensor) -> Tensor:
        # A finite stand-in for −inf: a group of none must not give NaN.
        scaled = torch.where(counted, values / tau, -math.inf)
        size = count(counted, values)
        total = torch.logsumexp(scaled, -1, keepdim=True)
        return torch.where(size > 0, tau * (total - size.clamp(min=1).log()), 0)

    whole, rest = log_mean_exp(r, v), log_mean_exp(*others(r, v)).squeeze(-1)
    return torch.where(has_signal(r, v) & v, count(v, r) * (whole - rest), 0)


@ADVANTAGES.register
def softbok_loo(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
    ddof: int = 0,
) -> Float[Tensor, "prompt group"]:
    """What a sample adds to the soft best-of-K of its group, leave-one-out.

        A_i = K · [f(r) − f(r₋ᵢ)]

    With (1/K)·Σ A_i ∇log π the gradient is exactly ∇E[f(r)]. Not an increasing function of the
    reward: the second best can get the lowest value.

    Args:
        rewards: [prompt, group], any range.
        valid: judged; None: every reward that is not NaN.
        tau: temperature; → ∞ gives `leave_one_out`, → 0 gives K·(best − second) to a single best.
        ddof: 0 divides the variance by K, 1 by K − 1.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> softbok_loo(torch.tensor([[4.0, 2.5, 1.0, 0.5]]))
        tensor([[ 5.4380, -0.4146, -0.0525, -0.2455]])

    Source: leave-one-out gradient of the soft best-of-K objective of `softrank_group`.
    """
    r, v = judged(rewards, valid, least=2, name="softbok_loo")
    whole = _soft_maximum(r, v, tau=tau, ddof=ddof)
    gain = count(v, r) * (whole - _soft_maximum_of_others(r, v, tau=tau, ddof=ddof))
    return torch.where(has_signal(r, v) & v, gain, 0)
