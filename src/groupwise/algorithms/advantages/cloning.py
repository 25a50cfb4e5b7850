"""Advantages that clone right answers and push away wrong ones, each normalised by itself."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.baselines import leave_one_out
from groupwise.algorithms.advantages.statistics import judged, outcome, standard_score
from groupwise.algorithms.properties import breaks
from groupwise.errors import UsageError

Shaping = Literal["zscore", "leave_one_out"]


@ADVANTAGES.register
@breaks("prompts_independent")
def cloning(
    rewards: Float[Tensor, "prompt group"],
    mask: Bool[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    correct: Float[Tensor, "prompt group"] | None = None,
    *,
    shaping: Shaping = "zscore",
    weigh_right: bool = False,
    negative: float = 0.5,
) -> Float[Tensor, "prompt group"]:
    """Behaviour cloning of right answers, and a policy gradient for wrong ones.

        A⁺ = N / N⁺,   A⁻ = negative · (N / N⁻) · a,   a = shaped ±1 of right and wrong (a < 0)

    N counts the tokens of the batch, N⁺ those of right answers and N⁻ those of wrong ones. With
    `batch_token_mean` the loss of right answers is then the mean of −log π over their own tokens,
    and that of wrong ones a mean over theirs, whatever the share of right answers.

    Args:
        rewards: [prompt, group]; used where `correct` is not defined.
        mask: True where the policy wrote the token and the loss uses it.
        valid: judged; None: every reward that is not NaN.
        correct: raw correctness, NaN where not defined; above 0.5 is right.
        shaping: "zscore" divides the centred ±1 by the deviation of the group, "leave_one_out"
            takes off the mean of the other samples.
        weigh_right: right answers too are weighted by their shaped ±1, rare ones more.
        negative: η, the weight of wrong answers; at least 0.

    Returns:
        [prompt, group]; 0 where not judged and in groups that are all right or all wrong.

    Raises:
        UsageError: a negative weight, or groups of fewer than 2.

    Example:
        >>> mask = torch.ones(1, 4, 1, dtype=torch.bool)
        >>> cloning(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), mask)
        tensor([[ 4.0000, -0.3849, -0.3849, -0.3849]])

    Source: OREAL (2502.06781), total loss without its KL term. The paper leaves the shaping of
    wrong answers open, with the z-score as an example; η is that of the authors' code.
    Elsewhere: the authors' code (InternLM/OREAL) takes "leave_one_out" and sets `weigh_right`,
    which the paper does not have.
    """
    if not negative >= 0:
        raise UsageError(f"negative = {negative!r}: must be at least 0.")
    r, v = judged(rewards, valid, least=2, name="cloning")
    right = (outcome(r, correct) > 0.5) & v
    signs = torch.where(right, 1.0, -1.0).to(r.dtype)
    if shaping == "zscore":
        shaped = standard_score(signs, v, ddof=0)
    else:
        shaped = leave_one_out(signs, v)
    tokens = (mask & v[..., None]).sum(-1).to(r.dtype)
    positives = torch.where(right, tokens, 0).sum()
    of_right = tokens.sum() / positives.clamp(min=1)
    of_wrong = negative * tokens.sum() / (tokens.sum() - positives).clamp(min=1)
    gain = of_right * (shaped if weigh_right else (shaped != 0).to(r.dtype))
    return torch.where(right, gain, of_wrong * shaped)


@ADVANTAGES.register
@breaks("prompts_independent")
def token_cloning(
    rewards: Float[Tensor, "prompt group"],
    token_scores: Float[Tensor, "prompt group time"],
    mask: Bool[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    correct: Float[Tensor, "prompt group"] | None = None,
    *,
    shaping: Shaping = "zscore",
    weigh_right: bool = False,
    negative: float = 0.5,
) -> Float[Tensor, "prompt group time"]:
    """`cloning` with a weight for every token, from a token reward model.

        A_t = A · ω_t,   A from `cloning`, ω from `token_weights`

    Only tokens at which the model already expects the actual outcome count: the beginning of a
    wrong answer is not pushed away while it still looks right. While all scores are 0, so is A_t.

    Args:
        rewards: [prompt, group]; used where `correct` is not defined.
        token_scores: logits of the token reward model, read before each token.
        mask: True where the policy wrote the token and the loss uses it; others are stepped over.
        valid, correct, shaping, weigh_right, negative: as for `cloning`.

    Returns:
        [prompt, group, time]; 0 outside `mask` and where `cloning` is 0. The counts N, N⁺ and N⁻
        are of tokens, whatever their ω.

    Raises:
        UsageError: a negative weight, or groups of fewer than 2.

    Example:
        >>> scores = torch.tensor([[[1.0, 3.0], [1.0, -3.0]]])
        >>> token_cloning(torch.tensor([[1.0, 0.0]]), scores, torch.ones(1, 2, 2) > 0)
        tensor([[[ 0.9242,  1.5232],
                 [ 0.0000, -0.4621]]])

    Source: OREAL (2502.06781), total loss without its KL term.
    Elsewhere: as for `cloning`.
    """
    own = cloning(
        rewards,
        mask,
        valid,
        correct,
        shaping=shaping,
        weigh_right=weigh_right,
        negative=negative,
    )[..., None]
    weights = token_weights(token_scores.to(own.dtype), mask, own[..., 0] > 0)
    return torch.where(weights > 0, own * weights, 0)


def token_weights(
    token_scores: Float[Tensor, "*answers time"],
    mask: Bool[Tensor, "*answers time"],
    right: Bool[Tensor, "*answers"],
) -> Float[Tensor, "*answers time"]:
    """How strongly a token reward model expects the actual outcome, from the tokens it has read.

        s̄_t = mean of s_1 … s_t
        ω_t = max(0, 2 σ(s̄_t) − 1) for right answers,   max(0, 1 − 2 σ(s̄_t)) for wrong ones

    Args:
        token_scores: s, logits.
        mask: True at the tokens that count; others have no score.
        right: whether the answer is right.

    Returns:
        Between 0 and 1; 0 outside the mask.

    Example:
        >>> scores = torch.tensor([1.0, -0.5, 2.0, -3.0])
        >>> token_weights(scores.expand(2, 4), torch.ones(2, 4) > 0, torch.tensor([True, False]))
        tensor([[0.4621, 0.1244, 0.3941, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0624]])

    Source: OREAL (2502.06781), equations of ω⁺ and ω⁻; `threshold_rescale` at 0.5 in the authors'
    code. Elsewhere: that code can also give the weights to a share of the tokens, those with the
    highest probabilities (`topk_rescale`).
    """
    scores = torch.where(mask, token_scores, 0)
    running = scores.cumsum(-1) / mask.cumsum(-1).clamp(min=1)
    margin = 2 * torch.sigmoid(running) - 1
    signed = torch.where(right[..., None], margin, -margin)
    return torch.where(mask, signed.clamp(min=0), 0)
