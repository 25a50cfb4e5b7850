"""From scored groups to the batches of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.algorithms.losses.objective import STEP_TOKENS
from groupwise.errors import UsageError
from groupwise.types import Batch, Completion, ScoredGroups

Weighting = Callable[
    [Bool[Tensor, "batch time"], Int[Tensor, "batch"]], Float[Tensor, "batch time"]
]


def sequences(scored: ScoredGroups, *, excluded: bool = False, version: int | None = None) -> Batch:
    """One row per completion in the order prompt · group, with advantages and weights of 0.

    Rows that could not be judged, or that a filter excludes, keep their tokens but lose their mask,
    so nothing is computed from them.

    Args:
        scored: groups with their scores; none gives a batch without rows.
        excluded: whether rows that a filter excludes keep their mask: they are part of the
            statistics of their group, and so are penalties on their rewards.
        version: of the policy. If it did not write all tokens, the column "age" says how many
            optimizer steps older each token is; None leaves the column out.

    Raises:
        ValueError: a completion does not have a mask and a log-probability for each token.
    """
    completions = [completion for group in scored.groups for completion in group.completions]
    for one in completions:
        if not len(one.tokens) == len(one.mask) == len(one.logprobs):
            raise ValueError(
                f"a completion has {len(one.tokens)} tokens, {len(one.mask)} numbers in its mask "
                f"and {len(one.logprobs)} log-probabilities; there must be one per token."
            )
    length = torch.tensor([len(c.tokens) for c in completions], dtype=torch.long)
    shape = (len(completions), max(length.tolist(), default=0))
    written = torch.arange(shape[1]) < length[:, None]

    def grid(lists: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
        values = torch.zeros(shape, dtype=dtype)
        values[written] = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
        return values

    judged = scored.scores.valid
    used = (judged if excluded else judged & scored.keep).reshape(len(completions), 1)
    mask = grid((c.mask for c in completions), torch.bool) & used
    age = torch.zeros(shape)
    if version is not None:
        age = grid((token_ages(c, version) for c in completions), torch.float32)
    support = tuple(c.support for c in completions)
    sizes = torch.tensor([len(group) for group in scored.groups], dtype=torch.long)
    return Batch(
        prompts=tuple(
            torch.as_tensor(group.prompt_tokens, dtype=torch.long) for group in scored.groups
        ),
        group=torch.arange(len(sizes)).repeat_interleave(sizes),
        tokens=grid((c.tokens for c in completions), torch.long),
        length=length,
        mask=mask,
        advantage=torch.zeros(shape),
        weight=torch.zeros(shape),
        sampler_logp=grid((c.logprobs for c in completions), torch.float32),
        support=support if any(s is not None for s in support) else None,
        columns={"age": age} if bool(age.any()) else {},
    )


def token_ages(completion: Completion, version: int) -> list[int]:
    """How many optimizer steps older each token is than a version of the policy. A version that was
    rolled back counts by its distance.

    Example:
        >>> one = Completion(tokens=[5, 6, 7], mask=[True] * 3, logprobs=[0.0] * 3, text="abc",
        ...                  finish="stop", versions=((0, 2), (2, 3)))
        >>> token_ages(one, 3)
        [1, 1, 0]
    """
    starts = [start for start, _ in completion.versions[1:]]
    ages: list[int] = []
    for (_, written), end in zip(
        completion.versions, [*starts, len(completion.tokens)], strict=True
    ):
        ages += [abs(version - written)] * (end - len(ages))
    return ages


def assemble(
    batch: Batch,
    advantage: Float[Tensor, "prompt group *time"],
    weighting: Weighting,
    *,
    keep: Bool[Tensor, "prompt group"] | None = None,
    minibatches: int = 1,
    epochs: int = 1,
    seed: tuple[int, ...] = (0,),
    whole_groups: bool = False,
) -> list[Batch]:
    """The batches of the optimizer steps on one batch of rollouts, epoch after epoch.

    Weights are normalised over each step as a whole, before anything is split or skipped. With at
    least as many groups as minibatches, these hold whole groups, shuffled by `seed`; otherwise
    whole completions.

    Args:
        batch: the rows of `sequences`.
        advantage: per completion, or per token.
        weighting: from (mask, group) to the weight of every token.
        keep: the rows that the loss may use; None: all that have a mask.
        minibatches: optimizer steps per epoch.
        epochs: passes over the rollouts (μ).
        whole_groups: never split a group, because the objective judges groups.

    Raises:
        UsageError: groups have to stay whole and are fewer than the minibatches.
    """
    if whole_groups and minibatches > max(1, len(batch.prompts)):
        raise UsageError(
            f"update.minibatches = {minibatches}: the objective compares the completions of a "
            f"prompt, and there are {len(batch.prompts)} prompts; use at most that many."
        )
    rows, time = batch.tokens.shape
    if keep is not None:
        batch = replace(batch, mask=batch.mask & keep.flatten()[:, None])
    flat = advantage.flatten(0, 1)
    spread = flat[:, :time] if flat.ndim == 2 else flat[:, None].expand(rows, time)
    spread = torch.where(batch.mask, spread, 0).to(torch.float32)
    steps = []
    for epoch in range(epochs):
        for part in _split(batch, minibatches, seed=(*seed, epoch)):
            own = batch.rows(part)
            count = own.mask.sum().float().expand(len(own.mask))
            steps.append(
                replace(
                    own,
                    advantage=spread[part, : own.tokens.shape[1]],
                    weight=weighting(own.mask, own.group).float(),
                    columns={**own.columns, STEP_TOKENS: count},
                )
            )
    return steps


def _split(batch: Batch, parts: int, *, seed: tuple[int, ...]) -> list[Int[Tensor, "_"]]:
    if parts == 1:
        return [torch.arange(len(batch.tokens))]
    generator = np.random.default_rng(seed)
    if parts <= len(batch.prompts):
        order = torch.from_numpy(generator.permutation(len(batch.prompts))).tensor_split(parts)
        return [torch.isin(batch.group, groups).nonzero().squeeze(-1) for groups in order]
    order = torch.from_numpy(generator.permutation(len(batch.tokens))).tensor_split(parts)
    return [rows.sort().values for rows in order]
