"""Advantages from a reward and the mean (or another simple baseline) of its group."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import (
    count,
    has_signal,
    judged,
    mean,
    outcome,
    require_positive,
    standard_score,
    warn_below_zero,
)
from groupwise.algorithms.properties import breaks


@ADVANTAGES.register
@breaks("zero_without_signal")
def raw(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"] | None = None
) -> Float[Tensor, "prompt group"]:
    """The reward itself: policy gradient without a baseline.

        A_i = r_i

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group]; 0 where not judged.

    Example:
        >>> raw(torch.tensor([[1.0, 0.0, float("nan")]]))
        tensor([[1., 0., 0.]])

    Source: REINFORCE (Williams 1992).
    """
    return judged(rewards, valid)[0]


@ADVANTAGES.register
@breaks("zero_without_signal")
def successes(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    correct: Float[Tensor, "prompt group"] | None = None,
) -> Float[Tensor, "prompt group"]:
    """Imitate the successes: each answer's share of the correctness of its group, times K.

        A_i = c_i / mean(c),   0 where mean(c) ≤ 0

    Args:
        rewards: [prompt, group], ≥ 0; used where `correct` is not defined.
        valid: judged; None: every reward that is not NaN.
        correct: raw correctness c, NaN where not defined.

    Returns:
        [prompt, group]; a group of n successes gives K/n to each of them and 0 to the others.

    Example:
        >>> successes(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        tensor([[2., 2., 0., 0.]])

    Source: rejection-sampling fine-tuning (RAFT, 2304.06767) with every success kept.
    """
    r, v = judged(rewards, valid)
    right = torch.where(v, outcome(r, correct), 0)
    average = mean(right, v)
    return torch.where(average > 0, right / torch.where(average > 0, average, 1), 0)


@ADVANTAGES.register
def centered(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"] | None = None
) -> Float[Tensor, "prompt group"]:
    """The reward minus the mean of its group.

        A_i = r_i − mean(r)

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group], summing to 0; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> centered(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])

    Source: Dr. GRPO (2503.20783); (K − 1)/K times `leave_one_out`.
    """
    r, v = judged(rewards, valid, least=2, name="centered")
    return torch.where(has_signal(r, v) & v, r - mean(r, v), 0)


@ADVANTAGES.register
def leave_one_out(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"] | None = None
) -> Float[Tensor, "prompt group"]:
    """The reward minus the mean of the other samples.

        A_i = r_i − mean_{j≠i} r_j = K/(K − 1) · (r_i − mean(r))

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group]; unbiased for the expected reward; 0 where not judged.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])

    Source: RLOO (2402.14740); Kool et al. 2019.
    Elsewhere: verl gives a group of one its raw reward; here it is refused, or 0 where all other
    samples of the group are not judged.
    """
    r, v = judged(rewards, valid, least=2, name="leave_one_out")
    size = count(v, r)
    scale = size / (size - 1).clamp(min=1)
    return torch.where(has_signal(r, v) & v, scale * (r - mean(r, v)), 0)


@ADVANTAGES.register
def zscore(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    ddof: int = 0,
    eps: float = 0.0,
    raw_singletons: bool = False,
) -> Float[Tensor, "prompt group"]:
    """The reward standardised within its group.

        A_i = (r_i − mean(r)) / (std(r) + eps)

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        ddof: 0 divides the variance by K, 1 by K − 1.
        eps: added to the standard deviation.
        raw_singletons: a group with one judged sample gets r/(1 + eps) rather than 0.

    Returns:
        [prompt, group], summing to 0; exactly 0 where not judged or the rewards are equal.

    Raises:
        UsageError: groups of fewer than 2, unless `raw_singletons`.

    Example:
        >>> zscore(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 1.7321, -0.5774, -0.5774, -0.5774]])

    Source: GRPO (2402.03300), which states neither ddof nor eps.
    Elsewhere: TRL ddof=1, eps=1e-4; verl ddof=1, eps=1e-6, singletons raw; OpenRLHF ddof=1,
    eps=1e-9. They divide groups of equal rewards by eps, which magnifies rounding noise.
    """
    r, v = judged(rewards, valid, least=1 if raw_singletons else 2, name="zscore")
    score = standard_score(r, v, ddof=ddof, eps=eps)
    if not raw_singletons:
        return score
    return torch.where((count(v, r) == 1) & v, r / (1 + eps), score)


@ADVANTAGES.register
def maxrl(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    eps: float = 1e-6,
) -> Float[Tensor, "prompt group"]:
    """The centred reward in units of the group's mean.

        A_i = (r_i − mean(r)) / (mean(r) + eps),   0 where mean(r) ≤ 0

    For 0/1 rewards exactly unbiased (at eps = 0) for Σ_{k=1}^{K−1} pass@k / k, a truncated
    series of log p: hard prompts weigh more.

    Args:
        rewards: [prompt, group], ≥ 0.
        valid: judged; None: every reward that is not NaN.
        eps: added to the mean.

    Returns:
        [prompt, group], summing to 0; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: groups of fewer than 2.

    Warns:
        RewardRangeWarning: a negative reward; the mean is then no scale.

    Example:
        >>> maxrl(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), eps=0.0)
        tensor([[ 1.,  1., -1., -1.]])

    Source: MaxRL (2602.02710), and its authors' code for eps.
    """
    r, v = judged(rewards, valid, least=2, name="maxrl")
    warn_below_zero(r, name="maxrl", remedy="shift rewards so that the lowest possible one is 0.")
    average = mean(r, v)
    usable = has_signal(r, v) & v & (average > 0)
    return torch.where(usable, (r - average) / torch.where(average > 0, average + eps, 1), 0)


@ADVANTAGES.register
def log_odds(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"] | None = None
) -> Float[Tensor, "prompt group"]:
    """The centred reward divided by the variance of a 0/1 reward with the same mean.

        A_i = (r_i − r̄) / (r̄ · (1 − r̄)),   0 where r̄ ≤ 0 or r̄ ≥ 1

    A plug-in estimate of the gradient of log(p / (1 − p)): very hard and very easy prompts weigh
    most. Experimental.

    Args:
        rewards: [prompt, group], in [0, 1].
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group], summing to 0; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: groups of fewer than 2.

    Warns:
        RewardRangeWarning: a negative reward.

    Example:
        >>> log_odds(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 4.0000, -1.3333, -1.3333, -1.3333]])

    Source: derivative of the logit of the success probability.
    """
    r, v = judged(rewards, valid, least=2, name="log_odds")
    warn_below_zero(r, name="log_odds", remedy="rescale rewards to lie in [0, 1].")
    average = mean(r, v)
    variance = average * (1 - average)
    usable = has_signal(r, v) & v & (variance > 0)
    return torch.where(usable, (r - average) / torch.where(variance > 0, variance, 1), 0)


@ADVANTAGES.register
def length_weighted(
    rewards: Float[Tensor, "prompt group"],
    lengths: Num[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
) -> Float[Tensor, "prompt group"]:
    """The reward minus the mean of its group weighted by answer length.

        A_i = r_i − Σ_j l_j r_j / Σ_j l_j

    The baseline of least variance when the squared norm of an answer's score grows with its length.

    Args:
        rewards: [prompt, group].
        lengths: l, tokens of each answer.
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> length_weighted(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[2, 4, 6, 8]]))
        tensor([[ 0.9000, -0.1000, -0.1000, -0.1000]])

    Source: OPO (2505.23585).
    """
    r, v = judged(rewards, valid, least=2, name="length_weighted")
    amount = torch.where(v, lengths.to(r.dtype), 0)
    baseline = (amount * r).sum(-1, keepdim=True) / amount.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(has_signal(r, v) & v, r - baseline, 0)


@ADVANTAGES.register
def soft_centered(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    tau: float = 0.5,
) -> Float[Tensor, "prompt group"]:
    """The reward minus the log-mean-exp of its group.

        A_i = r_i − tau · log mean_j exp(r_j / tau)

    The exact residual of mirror descent: tau · log Z estimated from the group. tau → ∞ gives
    `centered`.

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        tau: temperature in units of reward.

    Returns:
        [prompt, group]; 0 where not judged or the rewards are equal.

    Raises:
        UsageError: tau ≤ 0, or groups of fewer than 2.

    Example:
        >>> soft_centered(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor([[ 0.2831, -0.7169, -0.7169,  0.2831]])

    Source: Kimi k1.5 (2501.12599), section 2.3.2; the system itself uses the mean: `centered`.
    """
    require_positive("tau", tau)
    r, v = judged(rewards, valid, least=2, name="soft_centered")
    live = has_signal(r, v) & v
    scaled = torch.where(v, r / tau, -float("inf"))
    log_total = torch.logsumexp(scaled, -1, keepdim=True)
    return torch.where(live, r - tau * (log_total - count(v, r).clamp(min=1).log()), 0)
