"""Log-ratios: how much more likely a token, or an answer, has become since it was sampled."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.losses.masking import apply_mask, row_mean
from groupwise.registry import Registry

RATIOS = Registry("ratio", ("logp", "old_logp", "mask"))


@RATIOS.register
def token(
    logp: Float[Tensor, "batch time"],
    old_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The log-ratio of every token.

        log ρ_t = logp_t − old_logp_t

    Args:
        logp: under the policy, with gradient.
        old_logp: when the update began.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time]; 0 outside the mask.

    Example:
        >>> import torch
        >>> token(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]))
        tensor([[0.5000]])

    Source: PPO (1707.06347); GRPO (2402.03300).
    """
    return apply_mask(logp - old_logp, mask)


@RATIOS.register
def sequence(
    logp: Float[Tensor, "batch time"],
    old_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """The mean log-ratio of an answer, at each of its tokens.

        log s_i = (1/|o_i|) Σ_t (logp_t − old_logp_t)

    Args:
        logp: under the policy, with gradient.
        old_logp: when the update began.
        mask: True where the policy wrote the token.

    Returns:
        [batch, time]; the same on all tokens of a row, 0 outside the mask. With weights that are
        constant in a row the gradient is the sequence's, spread evenly over its tokens.

    Example:
        >>> import torch
        >>> logp, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.1]])
        >>> sequence(logp, old, torch.tensor([[True, True]]))
        tensor([[0.3000, 0.3000]])

    Source: GSPO (2507.18071), equation 7.
    Elsewhere: GSPO-token stops the gradient of the mean and lets it through the token alone; for
    advantages and weights constant in a row that is the same gradient.
    """
    return apply_mask(row_mean(logp - old_logp, mask).expand_as(logp), mask)
