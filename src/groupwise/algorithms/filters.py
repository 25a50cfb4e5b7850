"""Filters: which completions the loss may use. The statistics of a group are not affected.

Every filter drops completions that are not judged. A group of which nothing is kept is replaced
by another prompt's (dynamic sampling).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.registry import Registry

FILTERS = Registry("filter", ("rewards", "correct", "valid", "truncated"))


def _judged(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"] | None
) -> Bool[Tensor, "prompt group"]:
    known = ~torch.isnan(rewards)
    return known if valid is None else known & valid


@FILTERS.register
def all(
    rewards: Float[Tensor, "prompt group"], valid: Bool[Tensor, "prompt group"] | None = None
) -> Bool[Tensor, "prompt group"]:
    """Every judged completion.

        keep_i = valid_i

    Args:
        rewards: NaN where not judged.
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group].

    Example:
        >>> all(torch.tensor([[1.0, 1.0], [float("nan"), 0.0]]))
        tensor([[ True,  True],
                [False,  True]])

    Source: GRPO (2402.03300), which filters nothing.
    """
    return _judged(rewards, valid)


@FILTERS.register
def spread(
    rewards: Float[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
    correct: Float[Tensor, "prompt group"] | None = None,
) -> Bool[Tensor, "prompt group"]:
    """Groups whose answers are not all equally correct; the others are dropped whole.

        keep_i = valid_i  where  max_j c_j > min_j c_j  over the judged samples of the group

    c is the raw correctness where it is defined for all judged samples of a group, else the reward:
    a group that is right throughout teaches nothing, even if a length penalty tells its answers
    apart.

    Args:
        rewards: NaN where not judged.
        valid: judged; None: every reward that is not NaN.
        correct: raw correctness, NaN where not defined.

    Returns:
        [prompt, group].

    Example:
        >>> spread(torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])).all(1)
        tensor([False, False,  True])

    Source: DAPO (2503.14476), dynamic sampling.
    Elsewhere: verl filters on `acc` as here, and keeps groups of one.
    """
    v = _judged(rewards, valid)
    values = rewards
    if correct is not None:
        defined = (~torch.isnan(correct) | ~v).all(-1, keepdim=True)
        values = torch.where(defined, correct.to(rewards.dtype), rewards)
    highest = torch.where(v, values, -float("inf")).amax(-1, keepdim=True)
    lowest = torch.where(v, values, float("inf")).amin(-1, keepdim=True)
    # Equal up to rounding, as in the advantages.
    tolerance = max(1e-8, 8 * torch.finfo(values.dtype).eps)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1)
    return v & ((highest - lowest) > tolerance * scale)


@FILTERS.register
def not_truncated(
    rewards: Float[Tensor, "prompt group"],
    truncated: Bool[Tensor, "prompt group"],
    valid: Bool[Tensor, "prompt group"] | None = None,
) -> Bool[Tensor, "prompt group"]:
    """Completions that ended by themselves.

        keep_i = valid_i and not truncated_i

    Args:
        rewards: NaN where not judged.
        truncated: True where the generation budget ran out.
        valid: judged; None: every reward that is not NaN.

    Returns:
        [prompt, group].

    Example:
        >>> not_truncated(torch.tensor([[1.0, 0.0]]), torch.tensor([[False, True]]))
        tensor([[ True, False]])

    Source: DAPO (2503.14476), overlong filtering.
    """
    return _judged(rewards, valid) & ~truncated
