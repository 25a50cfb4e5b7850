"""Advantages that reward the best answer of a group: pass@k and max@k objectives."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import (
    count,
    has_signal,
    judged,
    others,
    outcome,
    std,
)
from groupwise.errors import UsageError


@ADVANTAGES.register
def leader_minus_second(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    divide_by_std: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, "prompt group"]:
    """Only the best answer of a group counts, by its lead over the second.

        A_best = r_max − r_second,   0 for the others

    K times this is the unbiased gradient of E[max of the group].

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        divide_by_std: divide by std(r) + eps of the group.
        ddof: with `divide_by_std`: 0 divides the variance by K, 1 by K − 1.
        eps: with `divide_by_std`: added to the standard deviation.

    Returns:
        [prompt, group]; 0 in groups whose best reward is shared.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> leader_minus_second(torch.tensor([[0.9, 0.6, 0.3, 0.0]]))
        tensor([[0.3000, 0.0000, 0.0000, 0.0000]])

    Source: 2503.19595 (leave-one-out pass@k gradient at k = K).
    Elsewhere: verl `grpo_passk`, with divide_by_std=True.
    """
    r, v = judged(rewards, valid, least=2, name="leader_minus_second")
    ranked = torch.where(v, r, -float("inf")).topk(2, dim=-1)
    lead = (ranked.values[:, :1] - ranked.values[:, 1:]).expand_as(r)
    place = torch.arange(r.shape[-1], device=r.device) == ranked.indices[:, :1]
    advantage = torch.where(place & has_signal(r, v) & v, lead, 0)
    if not divide_by_std:
        return advantage
    spread = std(r, v, ddof=ddof) + eps
    return advantage / torch.where(spread > 0, spread, 1)


@ADVANTAGES.register
def pass_at_k_gradient(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    k: int = 4,
    baseline: Literal["leave_one_out", "none"] = "leave_one_out",
) -> Float[Tensor, "prompt group"]:
    """Unbiased gradient of the best of k out of the group: pass@k for 0/1 rewards.

        A_i = K · [F(r) − F(r₋ᵢ)],   F = mean over the k-subsets of their maximum

    `baseline = "none"` leaves only the subsets that contain i, A_i = K·F(r) − (K − k)·F(r₋ᵢ):
    the same expected gradient with more variance, and not 0 where all rewards are equal.

    Args:
        rewards: [prompt, group]; any real rewards, 0/1 for pass@k.
        valid: judged; None: every reward that is not NaN.
        k: size of the subsets, less than the group.
        baseline: "leave_one_out" as above, "none" for subsets that contain the sample.

    Returns:
        [prompt, group]; 0 where not judged or the group has k judged samples or fewer, and with
        the leave-one-out baseline where the rewards are equal.

    Raises:
        UsageError: k < 1, or groups of k or fewer.

    Example:
        >>> pass_at_k_gradient(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), k=2)
        tensor([[ 2.0000, -0.6667, -0.6667, -0.6667]])

    Source: PKPO (2505.15201), equations for binary and continuous rewards, times K.
    """
    if k < 1:
        raise UsageError(f"k = {k}: must be at least 1.")
    r, v = judged(rewards, valid, least=k + 1, name=f"pass_at_k_gradient with k = {k}")
    size = count(v, r)
    whole, rest = _best_of(r, v, k=k), _best_of(*others(r, v), k=k).squeeze(-1)
    usable = v & (size > k)
    if baseline == "none":
        return torch.where(usable, size * whole - (size - k) * rest, 0)
    return torch.where(usable & has_signal(r, v), size * (whole - rest), 0)


def _best_of(
    values: Float[Tensor, "*lead group"], valid: Bool[Tensor, "*lead group"], *, k: int
) -> Float[Tensor, "*lead 1"]:
    """Expected maximum of k values drawn without replacement: Σ_i C(i−1, k−1)/C(n, k) · r_(i)."""
    ordered = torch.where(valid, values, -float("inf")).sort(dim=-1).values
    present = torch.isfinite(ordered)
    below = present.cumsum(-1).to(values.dtype) - 1
    size = count(valid, values)
    # C(below, k−1) / C(n, k) = k/n · Π_{j<k−1} (below − j)/(n − 1 − j)
    share = (k / size.clamp(min=1)) * torch.ones_like(ordered)
    for j in range(k - 1):
        share = share * ((below - j).clamp(min=0) / (size - 1 - j).clamp(min=1))
    return torch.where(present, share * torch.where(present, ordered, 0), 0).sum(-1, keepdim=True)


@ADVANTAGES.register
def pass_at_k_training(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    correct: Float[Tensor, "prompt group"] | None = None,
    *,
    k: int = 4,
) -> Float[Tensor, "prompt group"]:
    """Standardised pass@k of the k-subsets a sample belongs to, for right and wrong answers.

        R̄ = 1 − C(N⁻, k)/C(N, k),   σ = sqrt(R̄ (1 − R̄))
        A⁺ = (1 − R̄)/σ,   A⁻ = (1 − R̄ − C(N⁻ − 1, k − 1)/C(N − 1, k − 1))/σ

    Args:
        rewards: [prompt, group]; used where `correct` is not defined.
        valid: judged; None: every reward that is not NaN.
        correct: raw correctness, NaN where not defined; above 0.5 is right.
        k: size of the subsets, at most the group.

    Returns:
        [prompt, group], summing to 0; 0 where not judged or σ = 0.

    Raises:
        UsageError: k < 1, or groups smaller than k or 2.

    Example:
        >>> pass_at_k_training(torch.tensor([[1.0, 0.0, 0.0]]), k=2)
        tensor([[ 0.7071, -0.3536, -0.3536]])

    Source: Pass@k Training (2508.10751), analytical form.
    Elsewhere: the authors' code adds 1e-6 to σ.
    """
    if k < 1:
        raise UsageError(f"k = {k}: must be at least 1.")
    r, v = judged(rewards, valid, least=max(k, 2), name=f"pass_at_k_training with k = {k}")
    right = (outcome(r, correct) > 0.5) & v
    size, wrong = count(v, r), count(v & ~right, r)
    all_wrong = _ratio_of_binomials(wrong, size, k)
    mean_reward = 1 - all_wrong
    deviation = (mean_reward * all_wrong).sqrt()
    negative = all_wrong - _ratio_of_binomials(wrong - 1, size - 1, k - 1)
    usable = (deviation > 0) & v & (size >= k)
    score = torch.where(right, all_wrong, negative) / torch.where(deviation > 0, deviation, 1)
    return torch.where(usable, score, 0)


def _ratio_of_binomials(
    few: Float[Tensor, "prompt 1"], many: Float[Tensor, "prompt 1"], k: int
) -> Float[Tensor, "prompt 1"]:
    """C(few, k) / C(many, k); 0 where few < k."""
    ratio = torch.ones_like(few)
    for j in range(k):
        ratio = ratio * (few - j).clamp(min=0) / (many - j).clamp(min=1)
    return ratio
