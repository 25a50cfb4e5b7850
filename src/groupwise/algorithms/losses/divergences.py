"""Divergences: estimates of KL between the policy and the reference, one per sampled token.

With x = logp − ref_logp on tokens that the policy sampled. As a term of the loss the gradient
decides, not the value:

    estimator   value estimates   expected gradient as a loss
    k1 = x                KL(π‖π_ref)   0: useless, and refused there; right inside the reward
    k2 = x²/2             (biased)      ∇KL(π‖π_ref)
    k3 = e^−x − 1 + x     KL(π‖π_ref)   ∇KL(π_ref‖π), the other direction
    ρ·k3                  KL(π‖π_ref)   ∇KL(π‖π_ref), off-policy too
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.losses.masking import apply_mask, bounded_exp
from groupwise.registry import Registry

DIVERGENCES = Registry("divergence", ("logp", "ref_logp", "log_ratio", "mask"))


@DIVERGENCES.register
def none(logp: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """No divergence, and no reference model.

        k_t = 0

    Args:
        logp: under the policy.

    Returns:
        [batch, time] of zeros.

    Example:
        >>> none(torch.tensor([[-0.5]]))
        tensor([[0.]])

    Source: Dr. GRPO (2503.20783), DAPO (2503.14476).
    """
    return torch.zeros_like(logp)


@DIVERGENCES.register
def k1(
    logp: Float[Tensor, "batch time"],
    ref_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The plain log-ratio to the reference.

        k1_t = logp_t − ref_logp_t

    Unbiased, can be negative. For the reward only.

    Args:
        logp: under the policy.
        ref_logp: under the reference.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time]; 0 outside the mask.

    Example:
        >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return apply_mask(logp - ref_logp, mask)


@DIVERGENCES.register
def k2(
    logp: Float[Tensor, "batch time"],
    ref_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Half the squared log-ratio to the reference.

        k2_t = (logp_t − ref_logp_t)² / 2

    On-policy its expected gradient is exactly ∇KL(π‖π_ref).

    Args:
        logp: under the policy, with gradient.
        ref_logp: under the reference.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time] ≥ 0; 0 outside the mask.

    Example:
        >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.1250]])

    Source: Schulman 2020; gradient: 2506.09477.
    Elsewhere: verl calls it "mse".
    """
    return apply_mask(logp - ref_logp, mask) ** 2 / 2


@DIVERGENCES.register
def k3(
    logp: Float[Tensor, "batch time"],
    ref_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The positive unbiased estimate.

        k3_t = e^−x − 1 + x,   x = logp_t − ref_logp_t

    On-policy its expected gradient is ∇KL(π_ref‖π).

    Args:
        logp: under the policy, with gradient.
        ref_logp: under the reference.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time] ≥ 0; 0 outside the mask; e^−x is held within e^±20.

    Example:
        >>> k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.1065]])

    Source: Schulman 2020; GRPO (2402.03300), equation 4.
    Elsewhere: verl ("low_var_kl") also clamps the result to ±10, where the gradient ends.
    """
    x = apply_mask(logp - ref_logp, mask)
    return bounded_exp(-x) - 1 + x


@DIVERGENCES.register
def k3_weighted(
    logp: Float[Tensor, "batch time"],
    ref_logp: Float[Tensor, "batch time"],
    log_ratio: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """`k3` times the importance ratio.

        ρ_t·k3_t = ρ_t · (e^−x − 1 + x),   x = logp_t − ref_logp_t

    The gradient flows through ρ as well: its expectation is ∇KL(π‖π_ref), on old samples too.

    Args:
        logp: under the policy, with gradient.
        ref_logp: under the reference.
        log_ratio: log ρ, with gradient.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time] ≥ 0; 0 outside the mask.

    Example:
        >>> logp, ref, yes = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])
        >>> k3_weighted(logp, ref, torch.tensor([[2.0]]).log(), yes)
        tensor([[0.2131]])

    Source: DeepSeek-V3.2 (2512.02556), unbiased KL estimate.
    Elsewhere: TRL `use_bias_correction_kl`, on by default.
    """
    return bounded_exp(apply_mask(log_ratio, mask)) * k3(logp, ref_logp, mask)
