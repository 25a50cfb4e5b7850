"""Advantages that use statistics of the whole batch as well as of the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import (
    has_signal,
    judged,
    mean,
    standard_score,
    std,
    whiten,
)
from groupwise.algorithms.properties import breaks
from groupwise.errors import UsageError, suggest


@ADVANTAGES.register
@breaks("prompts_independent")
def batch_zscore(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    ddof: int = 0,
    eps: float = 0.0,
) -> Float[Tensor, "prompt group"]:
    """The reward minus the mean of its group, in units of the whole batch's deviation.

        A_i = (r_i − mean_group(r)) / (std_batch(r) + eps)

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        ddof: 0 divides the variance by the number of samples, 1 by one less.
        eps: added to the standard deviation.

    Returns:
        [prompt, group]; 0 where not judged or the rewards of the group are equal.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> batch_zscore(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
        tensor([[ 1.5000, -0.5000, -0.5000, -0.5000],
                [ 0.5000,  0.5000,  0.5000, -1.5000]])

    Source: Lite PPO (2508.08221).
    Elsewhere: TRL `scale_rewards="batch"` uses ddof=1, eps=1e-4.
    """
    r, v = judged(rewards, valid, least=2, name="batch_zscore")
    spread = std(r.reshape(-1), v.reshape(-1), ddof=ddof) + eps
    deviation = torch.where(has_signal(r, v) & v, r - mean(r, v), 0)
    return deviation / torch.where(spread > 0, spread, 1)


@ADVANTAGES.register
@breaks("zero_without_signal", "prompts_independent")
def centered_whitened(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    lengths: Num[Tensor, "prompt group"] | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Float[Tensor, "prompt group"]:
    """The reward minus the mean of its group, then standardised over the tokens of the batch.

        c_i = r_i − mean_group(r);   A_i = (c_i − mean_batch(c)) / sqrt(var_batch(c) + eps)

    In the statistics of the batch a sample counts once per token.

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        lengths: tokens of each answer; None counts every sample once.
        ddof: 0 divides the variance by the number of tokens, 1 by one less.
        eps: added to the variance.

    Returns:
        [prompt, group]; 0 where not judged, and everywhere if no group has any signal.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> centered_whitened(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
        tensor([[ 1.6202, -0.5401, -0.5401, -0.5401],
                [ 0.5401,  0.5401,  0.5401, -1.6202]])

    Source: REINFORCE++ with baseline (2501.03262).
    """
    r, v = judged(rewards, valid, least=2, name="centered_whitened")
    middle = torch.where(has_signal(r, v) & v, r - mean(r, v), 0)
    amount = v if lengths is None else torch.where(v, lengths, 0)
    return whiten(middle, amount, ddof=ddof, eps=eps)


@ADVANTAGES.register
@breaks("zero_without_signal", "prompts_independent")
def discounted_whitened(
    rewards: Float[Tensor, "prompt group"],
    mask: Bool[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    kl: Float[Tensor, "prompt group time"] | None = None,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Float[Tensor, "prompt group time"]:
    """Discounted return of every token, standardised over the tokens of the batch.

        G_t = Σ_{s≥t} gamma^(s−t) x_s,   x_s = r·1[s last] − kl_s
        A_t = (G_t − mean) / sqrt(var + eps)

    Time counts the tokens that the policy wrote; injected ones are stepped over.

    Args:
        rewards: [prompt, group], earned at the last token that the policy wrote.
        mask: True where the policy wrote the token.
        valid: judged; None: every reward that is not NaN.
        kl: penalty of each token, already multiplied by its coefficient; None for none.
        gamma: discount per token.
        ddof: 0 divides the variance by the number of tokens, 1 by one less.
        eps: added to the variance.

    Returns:
        [prompt, group, time]; 0 on tokens outside `mask` and on samples not judged.

    Example:
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
        >>> discounted_whitened(rewards, torch.ones(2, 4, 1, dtype=torch.bool))[0, :, 0]
        tensor([ 0.9354, -0.9354, -0.9354, -0.9354])

    Source: REINFORCE++ (2501.03262), equations 5 to 7.
    Elsewhere: verl resets the return at every masked token, so reward does not flow back across
    injected text.
    """
    r, v = judged(rewards, valid)
    counted = mask & v[..., None]
    position = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(counted, position, -1).amax(-1, keepdim=True)
    step = torch.where((position == last) & counted, r[..., None], 0)
    if kl is not None:
        step = step - torch.where(counted, kl, 0)
    running = torch.zeros_like(r)
    returns = torch.zeros_like(step)
    for t in reversed(range(mask.shape[-1])):
        running = torch.where(counted[..., t], step[..., t] + gamma * running, running)
        returns[..., t] = running
    return whiten(returns, counted, ddof=ddof, eps=eps)


@ADVANTAGES.register
@breaks("prompts_independent")
def signal_scaled(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    counting: Literal["groups", "rewards"] = "groups",
) -> Float[Tensor, "prompt group"]:
    """The centred reward, scaled up by the share of the batch that carries a signal.

        A_i = alpha · (r_i − mean(r)),   alpha = #groups / #groups with unequal rewards

    Args:
        rewards: [prompt, group].
        valid: judged; None: every reward that is not NaN.
        counting: "groups" as above; "rewards" takes alpha = #samples / #samples with reward ≠ 0.

    Returns:
        [prompt, group]; 0 where not judged or the rewards of the group are equal.

    Raises:
        UsageError: groups of fewer than 2.

    Example:
        >>> signal_scaled(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([[ 1., -1.],
                [ 0.,  0.]])

    Source: GPG (2504.02546).
    Elsewhere: verl counts non-zero rewards: counting="rewards".
    """
    r, v = judged(rewards, valid, least=2, name="signal_scaled")
    live = has_signal(r, v)
    if counting == "groups":
        total, carrying = v.any(-1).sum(), live.sum()
    else:
        total, carrying = v.sum(), ((r != 0) & v).sum()
    alpha = total.to(r.dtype) / carrying.clamp(min=1)
    return torch.where(live & v, alpha * (r - mean(r, v)), 0)


@ADVANTAGES.register
@breaks("zero_without_signal", "prompts_independent")
def parts_zscore(
    parts: Mapping[str, Float[Tensor, "prompt group"]],
    valid: Bool[Tensor, "prompt group"] | None = None,
    lengths: Num[Tensor, "prompt group"] | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    counting: Literal["tokens", "completions"] = "tokens",
) -> Float[Tensor, "prompt group"]:
    """Every part of the reward standardised in its group, summed, then whitened over the batch.

        s_i = Σ_p weight_p · (r_p,i − mean(r_p)) / (std(r_p) + eps)
        A_i = (s_i − mean(s)) / sqrt(var(s) + 1e-8)

    So a part with a small range counts as much as one with a large range. Where a part did not
    apply (NaN) it adds 0.

    Args:
        parts: [prompt, group] by name, before weighting.
        valid: judged; None: every sample for which some part applied.
        lengths: tokens of each answer, how often it counts in the batch; None counts each once.
        weights: by name; parts that are not named weigh 1.
        ddof: 0 divides variances by the number of samples, 1 by one less.
        eps: added to the standard deviation of a part in its group.
        counting: "tokens" as above; "completions" counts each answer once.

    Returns:
        [prompt, group]; 0 where not judged, and everywhere if nothing differs.

    Raises:
        UsageError: no parts, a weight for an unknown part, or groups of fewer than 2.

    Example:
        >>> accuracy = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> form = torch.tensor([[0.1, 0.1, 0.0, 0.0]])
        >>> parts_zscore({"accuracy": accuracy, "format": form})
        tensor([[ 1.3321,  0.2061, -0.7691, -0.7691]])

    Source: GDPO (2601.05242).
    Elsewhere: TRL `normalize_then_sum` uses 1e-4 twice and counting="completions"; verl 1e-6 and
    tokens.
    """
    for name in weights or {}:
        if name not in parts:
            raise UsageError(f"weights.{name}: no such part of the reward; {suggest(name, parts)}")
    if not parts:
        raise UsageError("parts: parts_zscore needs a reward that is made of named parts.")
    applied = torch.stack([~torch.isnan(values) for values in parts.values()]).any(0)
    valid = applied if valid is None else valid & applied
    total = torch.zeros_like(next(iter(parts.values())))
    for name, values in parts.items():
        r, v = judged(values, valid, least=2, name="parts_zscore")
        weight = 1.0 if weights is None else weights.get(name, 1.0)
        total = total + weight * standard_score(r, v, ddof=ddof, eps=eps)
    amount = valid
    if lengths is not None and counting == "tokens":
        amount = torch.where(valid, lengths, 0)
    return whiten(total, amount, ddof=ddof, eps=1e-8)
