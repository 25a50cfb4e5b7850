"""Corrections: weights for tokens that a sampler drew from slightly other probabilities.

With r_t = exp(old_logp_t − sampler_logp_t), the learner's probability against the sampler's. All
are constants (no gradient) that multiply the surrogate, and 1 outside the mask.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.losses.masking import apply_mask, bounded_exp, row_mean, row_sum
from groupwise.errors import UsageError
from groupwise.registry import Registry

CORRECTIONS = Registry("correction", ("old_logp", "sampler_logp", "mask"))


def _gap(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    return apply_mask((old_logp - sampler_logp).detach(), mask)


def _require_band(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise UsageError(f"low, high = {low!r}, {high!r}: must enclose 1, with low at least 0.")


def _require_cap(cap: float) -> None:
    if not cap >= 1:
        raise UsageError(f"cap = {cap!r}: must be at least 1.")


@CORRECTIONS.register
def none(old_logp: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """No correction.

        weight_t = 1

    Args:
        old_logp: under the learner, when the update began.

    Returns:
        [batch, time] of ones.

    Example:
        >>> none(torch.tensor([[-0.5]]))
        tensor([[1.]])

    Source: right where sampler and learner share one model and one set of kernels.
    """
    return torch.ones_like(old_logp)


@CORRECTIONS.register
def tis(
    old_logp: Float[Tensor, "batch time"],
    sampler_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    cap: float = 2.0,
) -> Float[Tensor, "batch time"]:
    """Truncated importance sampling, per token.

        weight_t = min(r_t, cap)

    Args:
        old_logp: under the learner, when the update began.
        sampler_logp: as the engine reported it.
        mask: True where the policy wrote the token.
        cap: largest weight.

    Returns:
        [batch, time] in (0, cap].

    Raises:
        UsageError: cap below 1.

    Example:
        >>> old, yes = torch.tensor([[0.3, 0.6]]).log(), torch.tensor([[True, True]])
        >>> tis(old, torch.tensor([[0.5, 0.1]]).log(), yes)
        tensor([[0.6000, 2.0000]])

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training".
    Elsewhere: TRL `token_truncate`, cap 3.
    """
    _require_cap(cap)
    return bounded_exp(_gap(old_logp, sampler_logp, mask)).clamp(max=cap)


@CORRECTIONS.register
def sequence_tis(
    old_logp: Float[Tensor, "batch time"],
    sampler_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    cap: float = 2.0,
) -> Float[Tensor, "batch time"]:
    """Truncated importance sampling of whole answers.

        weight_t = min(Π_s r_s, cap)

    Args:
        old_logp: under the learner, when the update began.
        sampler_logp: as the engine reported it.
        mask: True where the policy wrote the token.
        cap: largest weight.

    Returns:
        [batch, time] in (0, cap].

    Raises:
        UsageError: cap below 1.

    Example:
        >>> old, yes = torch.tensor([[0.3, 0.6]]).log(), torch.tensor([[True, True]])
        >>> sequence_tis(old, torch.tensor([[0.5, 0.4]]).log(), yes)
        tensor([[0.9000, 0.9000]])

    Source: the exact weight of a sequence, truncated. Elsewhere: TRL `sequence_truncate`, cap 3.
    """
    _require_cap(cap)
    whole = row_sum(_gap(old_logp, sampler_logp, mask), mask)
    return _on_tokens(bounded_exp(whole).clamp(max=cap), mask)


@CORRECTIONS.register
def icepop(
    old_logp: Float[Tensor, "batch time"],
    sampler_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Float[Tensor, "batch time"]:
    """The ratio inside a band; tokens outside it are dropped.

        weight_t = r_t where low ≤ r_t ≤ high, else 0

    Args:
        old_logp: under the learner, when the update began.
        sampler_logp: as the engine reported it.
        mask: True where the policy wrote the token.
        low: smallest ratio kept.
        high: largest ratio kept.

    Returns:
        [batch, time].

    Raises:
        UsageError: a band that does not enclose 1.

    Example:
        >>> old, yes = torch.tensor([[0.3, 0.6]]).log(), torch.tensor([[True, True]])
        >>> icepop(old, torch.tensor([[0.5, 0.1]]).log(), yes)
        tensor([[0.6000, 0.0000]])

    Source: IcePop (2510.18855).
    Elsewhere: TRL `token_mask` with low = 0, high = 3.
    """
    _require_band(low, high)
    ratio = bounded_exp(_gap(old_logp, sampler_logp, mask))
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)


@CORRECTIONS.register
def sequence_icepop(
    old_logp: Float[Tensor, "batch time"],
    sampler_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.0,
    high: float = 3.0,
) -> Float[Tensor, "batch time"]:
    """The ratio of the whole answer inside a band; answers outside it are dropped.

        weight_t = R where low ≤ R ≤ high, else 0,   R = Π_s r_s

    Args:
        old_logp: under the learner, when the update began.
        sampler_logp: as the engine reported it.
        mask: True where the policy wrote the token.
        low: smallest ratio kept.
        high: largest ratio kept.

    Returns:
        [batch, time].

    Raises:
        UsageError: a band that does not enclose 1.

    Example:
        >>> old, yes = torch.tensor([[0.3, 0.6]]).log(), torch.tensor([[True, True]])
        >>> sequence_icepop(old, torch.tensor([[0.5, 0.1]]).log(), yes)
        tensor([[0., 0.]])

    Source: TRL `sequence_mask`, its default with vLLM.
    """
    _require_band(low, high)
    ratio = bounded_exp(row_sum(_gap(old_logp, sampler_logp, mask), mask))
    return _on_tokens(torch.where((ratio >= low) & (ratio <= high), ratio, 0), mask)


@CORRECTIONS.register
def masked(
    old_logp: Float[Tensor, "batch time"],
    sampler_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Float[Tensor, "batch time"]:
    """Tokens whose ratio leaves a band are dropped, the others count fully.

        weight_t = 1 where low ≤ r_t ≤ high, else 0

    Args:
        old_logp: under the learner, when the update began.
        sampler_logp: as the engine reported it.
        mask: True where the policy wrote the token.
        low: smallest ratio kept.
        high: largest ratio kept.

    Returns:
        [batch, time] of 0 and 1.

    Raises:
        UsageError: a band that does not enclose 1.

    Example:
        >>> old, yes = torch.tensor([[0.3, 0.6]]).log(), torch.tensor([[True, True]])
        >>> masked(old, torch.tensor([[0.5, 0.1]]).log(), yes)
        tensor([[1., 0.]])

    Source: `icepop` without its weight.
    """
    _require_band(low, high)
    ratio = bounded_exp(_gap(old_logp, sampler_logp, mask))
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


@CORRECTIONS.register
def sequence_masked(
    old_logp: Float[Tensor, "batch time"],
    sampler_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    low: float = 0.999,
    high: float = 1.002,
) -> Float[Tensor, "batch time"]:
    """Answers whose geometric-mean ratio leaves a band are dropped, the others count fully.

        weight_t = 1 where low ≤ exp(mean_s log r_s) ≤ high, else 0

    Args:
        old_logp: under the learner, when the update began.
        sampler_logp: as the engine reported it.
        mask: True where the policy wrote the token.
        low: smallest ratio kept.
        high: largest ratio kept.

    Returns:
        [batch, time] of 0 and 1.

    Raises:
        UsageError: a band that does not enclose 1.

    Example:
        >>> gap, yes = torch.tensor([[1.001, 0.998, 1.004]]).log(), torch.ones(1, 3) > 0
        >>> sequence_masked(gap, torch.zeros(1, 3), yes)
        tensor([[1., 1., 1.]])

    Source: masked importance sampling of sequences (2512.23075).
    Elsewhere: SkyRL 0.99 to 1.01; NeMo and OpenRLHF `seq-mask-tis`.
    """
    _require_band(low, high)
    ratio = bounded_exp(row_mean(_gap(old_logp, sampler_logp, mask), mask))
    return _on_tokens(((ratio >= low) & (ratio <= high)).to(ratio.dtype), mask)


def _on_tokens(
    rows: Float[Tensor, "batch 1"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    return torch.where(mask, rows.expand(mask.shape), 1)
