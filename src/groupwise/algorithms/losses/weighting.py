"""Weightings: how the token losses of a step add up, as one weight per token.

`loss = Σ weight · token_loss`. Weights are made once from the whole batch of an optimizer step, so
that splitting it over microbatches or machines only reorders a sum. N counts the rows and P the
prompts that have any token left in the mask; |o_i| is the number of those tokens in row i. With
`empty_rows` N counts every row, so that a batch of which rows are masked has a smaller loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.errors import UsageError
from groupwise.registry import Registry

WEIGHTINGS = Registry("weighting", ("mask", "group"))


def _spread(
    share: Float[Tensor, "batch 1"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """A row's share of the loss on each of its tokens, in float32 from float64 arithmetic."""
    return torch.where(mask, share, 0).float()


def _lengths(mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch 1"]:
    return mask.sum(-1, keepdim=True).double()


def _rows(mask: Bool[Tensor, "batch time"], *, empty: bool) -> Float[Tensor, ""]:
    if empty:
        return torch.tensor(max(len(mask), 1), dtype=torch.float64, device=mask.device)
    return mask.any(-1).sum().double().clamp(min=1)


@WEIGHTINGS.register
def sequence_mean(
    mask: Bool[Tensor, "batch time"], *, empty_rows: bool = False
) -> Float[Tensor, "batch time"]:
    """The mean over the tokens of each answer, then the mean over answers.

        weight = 1 / (N · |o_i|)

    A token of a long answer counts less than one of a short answer.

    Args:
        mask: True where the policy wrote the token and it counts.
        empty_rows: whether rows without any token count in N.

    Returns:
        float32 [batch, time], summing to 1 (less with rows that are empty and counted); all 0 for
        an empty mask.

    Example:
        >>> sequence_mean(torch.tensor([[True, True], [True, False]]))
        tensor([[0.2500, 0.2500],
                [0.5000, 0.0000]])

    Source: GRPO (2402.03300), GSPO (2507.18071).
    Elsewhere: verl `seq-mean-token-mean`; TRL `loss_type="grpo"` counts empty rows.
    """
    return _spread(1 / (_rows(mask, empty=empty_rows) * _lengths(mask).clamp(min=1)), mask)


@WEIGHTINGS.register
def group_token_mean(
    mask: Bool[Tensor, "batch time"], group: Int[Tensor, "batch"]
) -> Float[Tensor, "batch time"]:
    """The mean over all tokens of a prompt's answers, then the mean over prompts.

        weight = 1 / (P · Σ_{j in the group of i} |o_j|)

    Args:
        mask: True where the policy wrote the token and it counts.
        group: index of each row's prompt.

    Returns:
        float32 [batch, time], summing to 1; all 0 for an empty mask.

    Example:
        >>> group_token_mean(torch.tensor([[True, True], [True, True]]), torch.tensor([0, 1]))
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])

    Source: SoftRank-GRPO; DAPO (2503.14476) as its equation is written.
    """
    lengths = _lengths(mask).squeeze(-1)
    _, place = torch.unique(group, return_inverse=True)
    tokens = lengths.new_zeros(int(place.max()) + 1 if len(place) else 0)
    tokens = tokens.index_add(0, place, lengths)
    prompts = (tokens > 0).sum().clamp(min=1)
    return _spread((1 / (prompts * tokens[place].clamp(min=1)))[:, None], mask)


@WEIGHTINGS.register
def batch_token_mean(mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """The mean over all tokens of the batch.

        weight = 1 / Σ_j |o_j|

    Every token counts the same, so long answers weigh more than short ones.

    Args:
        mask: True where the policy wrote the token and it counts.

    Returns:
        float32 [batch, time], summing to 1; all 0 for an empty mask.

    Example:
        >>> batch_token_mean(torch.tensor([[True, True], [True, True]]))
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])

    Source: the authors' code of DAPO (2503.14476).
    Elsewhere: verl `token-mean`, TRL `loss_type="dapo"`; TRL "bnpo" divides within a microbatch.
    """
    total = mask.sum().double().clamp(min=1)
    return _spread((1 / total).expand(len(mask), 1), mask)


@WEIGHTINGS.register
def constant_length(
    mask: Bool[Tensor, "batch time"], *, length: int, empty_rows: bool = False
) -> Float[Tensor, "batch time"]:
    """The sum over the tokens of each answer divided by one constant, then the mean over answers.

        weight = 1 / (N · length)

    A token counts the same in every answer of every batch.

    Args:
        mask: True where the policy wrote the token and it counts.
        length: the generation budget in tokens; it sets the scale of the loss.
        empty_rows: whether rows without any token count in N.

    Returns:
        float32 [batch, time]; all 0 for an empty mask.

    Raises:
        UsageError: length below 1.

    Example:
        >>> constant_length(torch.tensor([[True, True], [True, False]]), length=5)
        tensor([[0.1000, 0.1000],
                [0.1000, 0.0000]])

    Source: Dr. GRPO (2503.20783), with length = 3000 in its code.
    Elsewhere: verl divides by the padded width of the batch unless told otherwise.
    """
    if length < 1:
        raise UsageError(f"length = {length!r}: must be at least 1.")
    return _spread((1 / (_rows(mask, empty=empty_rows) * length)).expand(len(mask), 1), mask)


@WEIGHTINGS.register
def sequence_sum(
    mask: Bool[Tensor, "batch time"], *, empty_rows: bool = False
) -> Float[Tensor, "batch time"]:
    """The sum over the tokens of each answer, then the mean over answers.

        weight = 1 / N

    Args:
        mask: True where the policy wrote the token and it counts.
        empty_rows: whether rows without any token count in N.

    Returns:
        float32 [batch, time]; all 0 for an empty mask.

    Example:
        >>> sequence_sum(torch.tensor([[True, True], [True, False]]))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.0000]])

    Source: REINFORCE on whole answers; RLOO (2402.14740).
    Elsewhere: verl `seq-mean-token-sum`; TRL `loss_type="luspo"`, which counts empty rows.
    """
    return _spread((1 / _rows(mask, empty=empty_rows)).expand(len(mask), 1), mask)


@WEIGHTINGS.register
def token_sum(mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """The sum over all tokens of the batch.

        weight = 1

    Args:
        mask: True where the policy wrote the token and it counts.

    Returns:
        float32 [batch, time] of 0 and 1.

    Example:
        >>> token_sum(torch.tensor([[True, False]]))
        tensor([[1., 0.]])

    Source: an unnormalised log-likelihood. Elsewhere: verl `token-sum`.
    """
    return mask.float()
