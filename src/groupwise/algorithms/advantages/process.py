"""Advantages from a reward for every step of an answer."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.statistics import judged, standard_score


@ADVANTAGES.register
def step_zscore(
    rewards: Float[Tensor, "prompt group"],
    step_rewards: Float[Tensor, "prompt group time"],
    mask: Bool[Tensor, "prompt group time"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    *,
    ddof: int = 0,
    eps: float = 0.0,
) -> Float[Tensor, "prompt group time"]:
    """Process supervision: every token earns the normalised rewards of its own and all later steps.

        x̃_j = (x_j − mean(X)) / (std(X) + eps),   A_t = Σ_j x̃_j over the steps j that end at or
        after t

    X holds the rewards of all steps of all judged completions of the group.

    Args:
        rewards: [prompt, group]; only says which completions are judged.
        step_rewards: the reward of a step at its last token, NaN elsewhere and at steps that could
            not be judged.
        mask: True where the policy wrote the token; steps that end elsewhere do not count.
        valid: judged; None: every reward that is not NaN.
        ddof: 0 divides the variance by the number of steps, 1 by one less.
        eps: added to the standard deviation.

    Returns:
        [prompt, group, time]; 0 on tokens outside `mask`, behind the last step, on samples not
        judged, and where all steps of the group earn the same.

    Example:
        >>> nan = float("nan")
        >>> steps = torch.tensor([[[nan, 1.0, 0.0], [1.0, nan, 0.0]]])
        >>> step_zscore(torch.zeros(1, 2), steps, torch.ones(1, 2, 3, dtype=torch.bool))
        tensor([[[ 0.,  0., -1.],
                 [ 0., -1., -1.]]])

    Source: DeepSeekMath (2402.03300), section 4.1.3. The paper states neither ddof nor an epsilon.
    Elsewhere: no public trainer of the GRPO family computes it; verl and OpenRLHF feed process
        rewards to GAE or to REINFORCE returns, without normalising them within the group.
    """
    _, v = judged(rewards, valid)
    counted = mask & v[..., None] & ~torch.isnan(step_rewards)
    values = torch.where(counted, step_rewards, 0).to(rewards.dtype)
    scores = standard_score(values.flatten(1), counted.flatten(1), ddof=ddof, eps=eps)
    scores = scores.view(values.shape)
    later = scores.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & v[..., None], later, 0)
