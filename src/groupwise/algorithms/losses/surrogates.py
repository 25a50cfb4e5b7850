"""Surrogates: the loss of every token from its log-ratio, log-probability and advantage.

ρ = exp(log-ratio), held within e^±20. On-policy (ρ = 1) every surrogate below has the gradient
−advantage with respect to logp, unless it says otherwise (`groupwise.algorithms.properties`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.losses.masking import (
    LARGEST_EXPONENT,
    apply_mask,
    bounded_exp,
    row_mean,
    row_sum,
)
from groupwise.algorithms.properties import breaks
from groupwise.errors import UsageError
from groupwise.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

SURROGATES = Registry("surrogate", ("log_ratio", "logp", "advantage", "mask"))


def clips_ratio(function: F) -> F:
    """Mark a surrogate whose settings low and high are the distances from 1 where the ratio is
    clipped; runs report how often that happens."""
    setattr(function, "clips_ratio", True)  # noqa: B010 (functions have no fields)
    return function


def _at_least_zero(name: str, value: float) -> None:
    if not value >= 0:
        raise UsageError(f"{name} = {value!r}: must be at least 0.")


def _above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise UsageError(f"{name} = {value!r}: must be greater than 0.")


@SURROGATES.register
def reinforce(
    logp: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The plain policy gradient.

        loss_t = −A_t · logp_t

    Args:
        logp: under the policy, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time]; 0 outside the mask. No ratio: on old samples the gradient is biased.

    Example:
        >>> reinforce(torch.tensor([[-0.5]]), torch.tensor([[2.0]]), torch.tensor([[True]]))
        tensor([[1.]])

    Source: Williams 1992.
    """
    return -apply_mask(advantage, mask) * apply_mask(logp, mask)


@SURROGATES.register
def importance(
    log_ratio: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The importance-weighted policy gradient, without clipping.

        loss_t = −ρ_t A_t

    Args:
        log_ratio: log ρ, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time]; 0 outside the mask.

    Example:
        >>> importance(torch.tensor([[0.0]]), torch.tensor([[2.0]]), torch.tensor([[True]]))
        tensor([[-2.]])

    Source: PPO (1707.06347), equation 6 (conservative policy iteration).
    """
    return -apply_mask(advantage, mask) * bounded_exp(apply_mask(log_ratio, mask))


@SURROGATES.register
@clips_ratio
def ppo_clip(
    log_ratio: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Float[Tensor, "batch time"]:
    """The clipped surrogate: no reward for moving the ratio beyond a band.

        loss_t = −min( ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t )

    Always min, for both signs of A: the gradient is cut only where the ratio has already moved too
    far in the direction that A asks for.

    Args:
        log_ratio: log ρ, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        low: width of the band below 1.
        high: width of the band above 1.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: a negative width.

    Example:
        >>> ratio = torch.tensor([[0.5, 1.5]]).log()
        >>> ppo_clip(ratio, torch.tensor([[-1.0, 1.0]]), torch.tensor([[True, True]]))
        tensor([[ 0.8000, -1.2000]])

    Source: PPO (1707.06347), equation 7; low ≠ high in DAPO (2503.14476).
    """
    _at_least_zero("low", low)
    _at_least_zero("high", high)
    a, ratio = apply_mask(advantage, mask), bounded_exp(apply_mask(log_ratio, mask))
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


@SURROGATES.register
@clips_ratio
def dual_clip(
    log_ratio: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.2,
    high: float = 0.2,
    bound: float = 3.0,
) -> Float[Tensor, "batch time"]:
    """`ppo_clip` with a bound on what a negative advantage can cost.

        loss_t = ppo_clip_t                      where A ≥ 0
        loss_t = min( ppo_clip_t, −bound · A )   where A < 0

    Args:
        log_ratio: log ρ, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        low: width of the band below 1.
        high: width of the band above 1.
        bound: largest ratio that still counts when A < 0, above 1.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: a negative width, or a bound of 1 or less.

    Example:
        >>> dual_clip(torch.tensor([[4.0]]).log(), torch.tensor([[-1.0]]), torch.tensor([[True]]))
        tensor([[3.]])

    Source: Ye et al. 2020 (1912.09729); two-sided clipping of INTELLECT-2 (2505.07291).
    Elsewhere: verl bound 3; DAPO's script 10; TRL `delta` clips ρ instead, which is the same.
    """
    if not bound > 1:
        raise UsageError(f"bound = {bound!r}: must be greater than 1.")
    loss = ppo_clip(log_ratio, advantage, mask, low=low, high=high)
    a = apply_mask(advantage, mask)
    return torch.where(a < 0, torch.minimum(loss, -bound * a), loss)


@SURROGATES.register
def cispo(
    log_ratio: Float[Tensor, "batch time"],
    logp: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    floor: float = 0.0,
    cap: float = 5.0,
) -> Float[Tensor, "batch time"]:
    """The policy gradient weighted by a clipped ratio, a constant: no token loses its gradient.

        loss_t = −sg[ clip(ρ_t, floor, cap) ] · A_t · logp_t

    Both bounds are ratios, not distances from 1. A cap below 1 would scale every gradient by it,
    on-policy ones too, so it is refused.

    Args:
        log_ratio: log ρ.
        logp: under the policy, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        floor: smallest weight, at most 1.
        cap: largest weight, at least 1.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: floor outside [0, 1], or cap below 1.

    Example:
        >>> one = torch.tensor([[1.0]])
        >>> cispo(torch.tensor([[8.0]]).log(), -one, one, torch.tensor([[True]]))
        tensor([[5.]])

    Source: CISPO, MiniMax-M1 (2506.13585); no floor and cap 5 from ScaleRL (2510.13786).
    Elsewhere: verl, slime and NeMo clip to 1 ± epsilon; TRL caps at its `epsilon_high`, whose
    default of 0.2 scales all gradients by 0.2.
    """
    if not 0 <= floor <= 1:
        raise UsageError(f"floor = {floor!r}: is a ratio and must lie in [0, 1].")
    if not cap >= 1:
        raise UsageError(f"cap = {cap!r}: is a ratio and must be at least 1 (1 + epsilon).")
    weight = bounded_exp(apply_mask(log_ratio, mask)).clamp(floor, cap).detach()
    return -weight * apply_mask(advantage, mask) * apply_mask(logp, mask)


@SURROGATES.register
def sapo(
    log_ratio: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    positive: float = 1.0,
    negative: float = 1.05,
) -> Float[Tensor, "batch time"]:
    """A soft gate in place of the clip.

        loss_t = −f(ρ_t) A_t,   f(ρ) = σ(τ (ρ − 1)) · 4/τ,   τ = positive where A > 0, else negative

    f has slope 1 at ρ = 1 and flattens smoothly on both sides, sooner for negative advantages.

    Args:
        log_ratio: log ρ, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        positive: τ where A > 0.
        negative: τ elsewhere.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: τ ≤ 0.

    Example:
        >>> sapo(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[True]]))
        tensor([[-2.]])

    Source: SAPO (2511.20347).
    """
    _above_zero("positive", positive)
    _above_zero("negative", negative)
    a, ratio = apply_mask(advantage, mask), bounded_exp(apply_mask(log_ratio, mask))
    tau = torch.where(a > 0, torch.full_like(a, positive), negative)
    return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * a


@SURROGATES.register
def gmpo(
    log_ratio: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.4,
    high: float = 0.4,
) -> Float[Tensor, "batch time"]:
    """The geometric mean of an answer's ratios, each clipped on the side that A asks for.

        loss_t = −A_t · exp( (1/|o|) Σ_s x_s )
        x = min(log ρ, high) where A ≥ 0, max(log ρ, −low) elsewhere

    Args:
        log_ratio: log ρ of every token, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        low: bound of −log ρ.
        high: bound of log ρ.

    Returns:
        [batch, time]; the loss of the sequence at each of its tokens (weigh with `sequence_mean`);
        0 outside the mask.

    Raises:
        UsageError: a negative bound.

    Example:
        >>> x, yes = torch.tensor([[0.1, -0.6, 0.9]]), torch.tensor([[True, True, True]])
        >>> gmpo(x, torch.ones(1, 3), yes)
        tensor([[-0.9672, -0.9672, -0.9672]])

    Source: GMPO (2507.20673).
    """
    _at_least_zero("low", low)
    _at_least_zero("high", high)
    a, x = apply_mask(advantage, mask), apply_mask(log_ratio, mask)
    clipped = torch.where(a >= 0, x.clamp(max=high), x.clamp(min=-low))
    return -a * bounded_exp(row_mean(clipped, mask))


@SURROGATES.register
@breaks("zero_at_zero_advantage")
def mirror_descent(
    log_ratio: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    tau: float = 0.5,
) -> Float[Tensor, "batch time"]:
    """The squared gap between the advantage and tau times the log-ratio of the whole answer.

        loss_t = (1/|o|) · (Ā − tau · x)² / (2 tau),   x = Σ_s log ρ_s,   Ā = mean_t A_t

    Summed over the tokens it is the loss of the sequence (weigh with `sequence_sum`). The factor
    1/(2 tau) makes its gradient −(Ā − tau x), hence −A on-policy. Off-policy it pulls the policy
    back even where A = 0.

    Args:
        log_ratio: log ρ of every token, with gradient.
        advantage: A, constant in a row.
        mask: True where the policy wrote the token.
        tau: strength of the pull to the policy that sampled.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: tau ≤ 0.

    Example:
        >>> x, yes = torch.tensor([[0.05, 0.05]]), torch.tensor([[True, True]])
        >>> mirror_descent(x, torch.full((1, 2), 0.5), yes)
        tensor([[0.1012, 0.1012]])

    Source: Kimi k1.5 (2501.12599), section 2.3.2.
    """
    _above_zero("tau", tau)
    gap = row_mean(advantage, mask) - tau * row_sum(log_ratio, mask)
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return apply_mask((gap**2 / (2 * tau * length)).expand_as(log_ratio), mask)


@SURROGATES.register
def dppo(
    log_ratio: Float[Tensor, "batch time"],
    logp: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> Float[Tensor, "batch time"]:
    """The policy gradient, cut where a token's probability (not its ratio) has moved too far.

        loss_t = −A_t · sg[ min(ρ_t, cap) · keep_t ] · logp_t
        keep: π − π_old ≤ high where A > 0,   π − π_old ≥ −low elsewhere

    Args:
        log_ratio: log ρ of every token.
        logp: log π, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        low: allowed fall of the probability.
        high: allowed rise of the probability.
        cap: largest ratio used as a weight.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: a negative distance or a cap below 1.

    Example:
        >>> old, new = torch.tensor([[0.2, 0.2]]).log(), torch.tensor([[0.35, 0.45]]).log()
        >>> dppo(new - old, new, torch.ones(1, 2), torch.tensor([[True, True]]))
        tensor([[1.8372, 0.0000]])

    Source: DPPO (2602.04879), total-variation form.
    """
    _at_least_zero("low", low)
    _at_least_zero("high", high)
    if not cap >= 1:
        raise UsageError(f"cap = {cap!r}: must be at least 1.")
    a, x, lp = apply_mask(advantage, mask), apply_mask(log_ratio, mask), apply_mask(logp, mask)
    moved = (lp.exp() - (lp - x).exp()).detach()
    keep = torch.where(a > 0, moved <= high, moved >= -low)
    weight = bounded_exp(x).clamp(max=cap).detach() * keep
    return -a * weight * lp


@SURROGATES.register
def vespo(
    log_ratio: Float[Tensor, "batch time"],
    logp: Float[Tensor, "batch time"],
    advantage: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Float[Tensor, "batch time"]:
    """The policy gradient weighted by a smooth function of the whole answer's ratio, a constant.

        loss_t = −sg[ φ(W) ] · A_t · logp_t,   φ(W) = W^k · e^{λ (1 − W)},   W = Π_s ρ_s

    φ is 1 on-policy, largest at W = k/λ, and falls towards 0 on both sides: nothing is clipped.
    (k, λ) = (power_positive, decay_positive) where A ≥ 0, else the negative ones.

    Args:
        log_ratio: log ρ of every token; W is held within 1e-8 and e^20.
        logp: under the policy, with gradient.
        advantage: A.
        mask: True where the policy wrote the token.
        power_positive: k where A ≥ 0: how fast answers that became less likely fade.
        decay_positive: λ where A ≥ 0: how fast answers that became more likely fade.
        power_negative: k elsewhere.
        decay_negative: λ elsewhere.

    Returns:
        [batch, time]; 0 outside the mask.

    Raises:
        UsageError: a negative power, or a decay of 0 or less.

    Example:
        >>> one = torch.tensor([[1.0]])
        >>> vespo(torch.tensor([[2.0]]).log(), -one, one, torch.tensor([[True]]))
        tensor([[0.1991]])

    Source: VESPO (2602.10693).
    Elsewhere: TRL `loss_type="vespo"`, the same.
    """
    for name, power in (("power_positive", power_positive), ("power_negative", power_negative)):
        _at_least_zero(name, power)
    for name, decay in (("decay_positive", decay_positive), ("decay_negative", decay_negative)):
        _above_zero(name, decay)
    a, x = apply_mask(advantage, mask), apply_mask(log_ratio, mask).detach()
    whole = row_sum(x.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT), mask)
    whole = whole.clamp(math.log(1e-8), LARGEST_EXPONENT)
    power = torch.where(a >= 0, torch.full_like(a, power_positive), power_negative)
    decay = torch.where(a >= 0, torch.full_like(a, decay_positive), decay_negative)
    weight = (power * whole + decay * (1 - whole.exp())).exp()
    return -weight * a * apply_mask(logp, mask)


@SURROGATES.register
@breaks("zero_at_zero_advantage", "on_policy_gradient")
def nll(
    logp: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """The negative log-likelihood: supervised learning, without an advantage.

        loss_t = −logp_t

    Args:
        logp: under the model, with gradient.
        mask: True on the tokens to be learned.

    Returns:
        [batch, time]; 0 outside the mask.

    Example:
        >>> nll(torch.tensor([[-0.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])

    Source: maximum likelihood; `reinforce` with A = 1.
    """
    return -apply_mask(logp, mask)
