"""Statistics of groups over the samples that count: mean, deviation, score, softmax, leave-one-out.

All work on the last axis, keep it (size 1) where they reduce, and take a boolean `valid` of the
same shape as the values.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from groupwise.errors import UsageError, warn


class RewardRangeWarning(UserWarning):
    """Rewards lie outside the range for which an advantage means what its name says."""


def judged(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None,
    *,
    least: int = 1,
    name: str = "advantage",
) -> tuple[Float[Tensor, "prompt group"], Bool[Tensor, "prompt group"]]:
    """Rewards with 0 where a sample is not judged, and where it is.

    Args:
        rewards: NaN also marks a sample as not judged.
        valid: judged; None leaves it to NaN.
        least: the smallest group size for which the caller is defined.
        name: of the caller, for the message.

    Raises:
        UsageError: no tensor with two axes of floating-point numbers, or groups smaller than
            `least`.
    """
    if not isinstance(rewards, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"rewards = {type(rewards).__name__}: {name} takes tensors; use torch.tensor(rewards)."
        )
    if rewards.ndim != 2 or not rewards.is_floating_point():
        raise UsageError(
            f"rewards = {tuple(rewards.shape)} {rewards.dtype}: {name} takes floating-point "
            "rewards of shape [prompt, group]; a single group is rewards[None]."
        )
    if rewards.shape[-1] < least:
        raise UsageError(
            f"group = {rewards.shape[-1]}: {name} compares the samples of a prompt, "
            f"so it needs at least {least} of them."
        )
    known = ~torch.isnan(rewards)
    valid = known if valid is None else valid & known
    return torch.where(valid, rewards, 0), valid


def count(valid: Bool[Tensor, "*lead group"], like: Tensor) -> Float[Tensor, "*lead 1"]:
    """K: the number of judged samples, in the dtype of `like`."""
    return valid.sum(-1, keepdim=True).to(like.dtype)


def mean(
    values: Float[Tensor, "*lead group"], valid: Bool[Tensor, "*lead group"]
) -> Float[Tensor, "*lead 1"]:
    """Mean over the judged samples; 0 where there is none."""
    total = torch.where(valid, values, 0).sum(-1, keepdim=True)
    return total / count(valid, values).clamp(min=1)


def std(
    values: Float[Tensor, "*lead group"], valid: Bool[Tensor, "*lead group"], *, ddof: int
) -> Float[Tensor, "*lead 1"]:
    """Standard deviation over the judged samples, dividing by K − ddof; 0 for a single sample."""
    deviation = torch.where(valid, values - mean(values, valid), 0)
    degrees = (count(valid, values) - ddof).clamp(min=1)
    return ((deviation**2).sum(-1, keepdim=True) / degrees).sqrt()


def has_signal(
    values: Float[Tensor, "*lead group"], valid: Bool[Tensor, "*lead group"]
) -> Bool[Tensor, "*lead 1"]:
    """Whether the judged values of a group differ by more than rounding.

    The range must exceed 1e-8 · max(1, |mean|), or 8 units in the last place of a coarser dtype:
    an absolute epsilon would either turn rounding noise into full-sized advantages or shrink
    honest small differences.
    """
    if values.shape[-1] == 0:
        return valid.new_zeros((*valid.shape[:-1], 1))
    tolerance = max(1e-8, 8 * torch.finfo(values.dtype).eps)
    infinity = float("inf")
    highest = torch.where(valid, values, -infinity).amax(-1, keepdim=True)
    lowest = torch.where(valid, values, infinity).amin(-1, keepdim=True)
    scale = mean(values, valid).abs().clamp(min=1)
    return (highest - lowest) > tolerance * scale


def standard_score(
    values: Float[Tensor, "*lead group"],
    valid: Bool[Tensor, "*lead group"],
    *,
    ddof: int,
    eps: float = 0.0,
) -> Float[Tensor, "*lead group"]:
    """(value − mean) / (std + eps) over the judged samples; 0 in groups without signal."""
    live = has_signal(values, valid) & valid
    deviation = torch.where(live, values - mean(values, valid), 0)
    spread = std(values, valid, ddof=ddof) + eps
    return deviation / torch.where(spread > 0, spread, 1)


def softmax(
    values: Float[Tensor, "*lead group"], valid: Bool[Tensor, "*lead group"]
) -> Float[Tensor, "*lead group"]:
    """Softmax over the judged samples; 0 elsewhere."""
    filled = torch.where(valid, values, -float("inf"))
    return torch.where(valid, torch.softmax(filled, -1), 0)


def others(
    values: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"]
) -> tuple[Float[Tensor, "prompt group group"], Bool[Tensor, "prompt group group"]]:
    """For every sample i (middle axis) the group without i: its values and what counts of them."""
    size = values.shape[-1]
    apart = ~torch.eye(size, dtype=torch.bool, device=values.device)
    return values[:, None, :].expand(-1, size, -1), valid[:, None, :] & apart


def outcome(
    rewards: Float[Tensor, "prompt group"], correct: Float[Tensor, "prompt group"] | None
) -> Float[Tensor, "prompt group"]:
    """Raw correctness where it is defined, the reward elsewhere."""
    if correct is None:
        return rewards
    return torch.where(torch.isnan(correct), rewards, correct.to(rewards.dtype))


def whiten(
    values: Float[Tensor, "*shape"],
    amount: Num[Tensor, "*shape"] | Bool[Tensor, "*shape"],
    *,
    ddof: int,
    eps: float,
) -> Float[Tensor, "*shape"]:
    """(value − mean) / sqrt(variance + eps) over the whole tensor.

    `amount` says how often each value counts. 0 where it is 0, and everywhere when the counted
    values do not differ by more than rounding.
    """
    amount = amount.to(values.dtype)
    counted = amount > 0
    values = torch.where(counted, values, 0)
    total = amount.sum()
    centre = (amount * values).sum() / total.clamp(min=1)
    deviation = torch.where(counted, values - centre, 0)
    variance = (amount * deviation**2).sum() / (total - ddof).clamp(min=1)
    live = has_signal(values.reshape(-1), counted.reshape(-1))
    return torch.where(live, deviation / (variance + eps).sqrt(), 0)


def warn_below_zero(rewards: Float[Tensor, "prompt group"], *, name: str, remedy: str) -> None:
    """Warn once per call when a reward is negative."""
    if bool((rewards < 0).any()):
        warn(
            f"{name}: a reward is below 0, where this advantage no longer orders the answers; "
            f"{remedy}",
            RewardRangeWarning,
        )


def require_positive(name: str, value: float) -> None:
    """Refuse a setting that must be greater than 0."""
    if not value > 0:
        raise UsageError(f"{name} = {value!r}: must be greater than 0.")
