"""Advantages that use a critic: rewards beyond the predicted values."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import judged, require_positive, whiten
from groupwise.algorithms.properties import breaks
from groupwise.errors import UsageError

Injected = Literal["carry", "zero"]


@ADVANTAGES.register
@breaks("zero_without_signal")
def gae(
    rewards: Float[Tensor, "prompt group"],
    values: Float[Tensor, "prompt group time"],
    mask: Bool[Tensor, "prompt group time"] | Num[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    kl: Float[Tensor, "prompt group time"] | None = None,
    bootstrap: Float[Tensor, "prompt group"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    length_alpha: float | None = None,
    injected: Injected = "carry",
    whitened: bool = False,
) -> Float[Tensor, "prompt group time"]:
    """Generalised advantage estimation.

        δ_t = x_t + gamma · V_{t+1} − V_t,   A_t = δ_t + gamma · λ · A_{t+1}

    The reward is earned at the last token that the policy wrote: x_t = r·1[t last] − kl_t. V after
    the last token is `bootstrap`. Time counts the tokens that the policy wrote: V_{t+1} and A_{t+1}
    are carried over injected ones, so the length of a tool's reply changes nothing.

    Args:
        rewards: [prompt, group], earned at the last token that the policy wrote.
        values: V_t, predicted before the token is written.
        mask: True, or not 0, where the policy wrote the token.
        valid: judged; None: every reward that is not NaN.
        kl: penalty of each token, already multiplied by its coefficient; None for none.
        bootstrap: V after the last token, for answers that were truncated; 0 elsewhere. None is 0
            everywhere.
        gamma: discount per token, in [0, 1].
        lam: λ, in [0, 1].
        length_alpha: λ = max(0, 1 − 1 / (length_alpha · l)) for an answer of l tokens, in place of
            `lam`; 0 up to l = 1 / length_alpha.
        injected: "carry" as above; "zero" treats injected tokens as steps of value 0 and reward 0,
            for comparison.
        whitened: standardise over the tokens of the batch (Bessel's correction, eps 1e-8).

    Returns:
        [prompt, group, time]; 0 on tokens outside `mask` and on samples not judged.

    Raises:
        UsageError: gamma or lam outside [0, 1], length_alpha not positive, or shapes that differ.

    Example:
        >>> values = torch.tensor([[[0.2, 0.5, 0.7]]])
        >>> gae(torch.tensor([[1.0]]), values, torch.ones(1, 1, 3, dtype=torch.bool), lam=0.95)
        tensor([[[0.7607, 0.4850, 0.3000]]])

    Source: Schulman et al. 2016 (1506.02438), equations 11 to 16; `length_alpha`: VAPO
    (2504.05118), equation 9.
    Elsewhere: verl and NeMo RL carry values over masked tokens as here; OpenRLHF and
    Open-Reasoner-Zero take them for 0, which puts an error of ±V at each tool reply:
    injected="zero". OpenRLHF whitens without Bessel's correction.
    """
    _require_share("gamma", gamma)
    _require_share("lam", lam)
    r, v = judged(rewards, valid)
    _require_shapes(r, values, mask)
    counted = mask.bool() & v[..., None]
    decay = _lambda(counted, lam=lam, length_alpha=length_alpha).to(r.dtype)
    step = _token_rewards(r, counted, kl)
    value = torch.where(counted, values, 0).to(r.dtype)
    end = _last_position(counted)
    following = torch.zeros_like(r) if bootstrap is None else torch.where(v, bootstrap, 0).to(r)
    running = torch.zeros_like(r)
    advantages = torch.zeros_like(step)
    for t in reversed(range(mask.shape[-1])):
        now = counted[..., t] if injected == "carry" else v & (t <= end)
        delta = step[..., t] + gamma * following - value[..., t]
        running = torch.where(now, delta + gamma * decay * running, running)
        following = torch.where(now, value[..., t], following)
        advantages[..., t] = torch.where(counted[..., t], running, 0)
    return whiten(advantages, counted, ddof=1, eps=1e-8) if whitened else advantages


def value_targets(
    rewards: Float[Tensor, "prompt group"],
    values: Float[Tensor, "prompt group time"],
    mask: Bool[Tensor, "prompt group time"] | Num[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    kl: Float[Tensor, "prompt group time"] | None = None,
    bootstrap: Float[Tensor, "prompt group"] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    injected: Injected = "carry",
) -> Float[Tensor, "prompt group time"]:
    """The returns that a critic learns to predict.

        R_t = A_t + V_t,   A from `gae` with the critic's own λ

    With λ = 1 they are the Monte-Carlo returns and do not depend on `values`.

    Args:
        lam: λ of the value targets; the policy's may differ (VC-PPO, 2503.01491).
        rewards, values, mask, valid, kl, bootstrap, gamma, injected: as `gae` takes them.

    Returns:
        [prompt, group, time]; 0 on tokens outside `mask` and on samples not judged.

    Example:
        >>> values = torch.tensor([[[0.2, 0.5, 0.7]]])
        >>> mask = torch.ones(1, 1, 3, dtype=torch.bool)
        >>> value_targets(torch.tensor([[1.0]]), values, mask, lam=0.95)
        tensor([[[0.9607, 0.9850, 1.0000]]])

    Source: 1506.02438.
    """
    advantages = gae(
        rewards, values, mask, valid, kl, bootstrap, gamma=gamma, lam=lam, injected=injected
    )
    known = judged(rewards, valid)[1]
    return advantages + torch.where(mask.bool() & known[..., None], values, 0).to(advantages.dtype)


def _token_rewards(
    rewards: Float[Tensor, "prompt group"],
    counted: Bool[Tensor, "prompt group time"],
    kl: Float[Tensor, "prompt group time"] | None,
) -> Float[Tensor, "prompt group time"]:
    """The reward at the last counted token, less the penalty of every token."""
    position = torch.arange(counted.shape[-1], device=counted.device)
    last = position == _last_position(counted)[..., None]
    step = torch.where(last & counted, rewards[..., None], 0)
    return step if kl is None else step - torch.where(counted, kl, 0)


def _last_position(counted: Bool[Tensor, "prompt group time"]) -> Tensor:
    """Index of the last counted token; −1 where there is none."""
    position = torch.arange(counted.shape[-1], device=counted.device)
    return torch.where(counted, position, -1).amax(-1)


def _lambda(
    counted: Bool[Tensor, "prompt group time"], *, lam: float, length_alpha: float | None
) -> Float[Tensor, "prompt group"]:
    """λ of every answer."""
    length = counted.sum(-1).double()
    if length_alpha is None:
        return torch.full_like(length, lam)
    require_positive("length_alpha", length_alpha)
    return (1 - 1 / (length_alpha * length.clamp(min=1))).clamp(min=0)


def _require_shapes(rewards: Tensor, values: Tensor, mask: Tensor) -> None:
    """Shapes that differ could be broadcast, to the advantages of other completions."""
    if values.shape != mask.shape or values.ndim != 3 or values.shape[:2] != rewards.shape:
        raise UsageError(
            f"values {tuple(values.shape)}, mask {tuple(mask.shape)}: both must be [prompt, group, "
            f"time], with prompt and group as in rewards {tuple(rewards.shape)}."
        )


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"{name} = {value!r}: must be between 0 and 1.")
