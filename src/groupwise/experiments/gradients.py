"""Gradients of many estimators from one backward pass per completion.

With s = ∇ log π(completion | prompt), the gradient that any estimator takes from a group is a sum
Σ coefficient · s over its completions, as long as the coefficient is the same for all tokens of a
completion. So norms, inner products and cosines of all estimators follow from the inner products
of the s alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.advantages import advantage_inputs
from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import UsageError
from groupwise.types import Batch, Outputs, ScoredGroups
from groupwise.updates import TorchLearner, assemble, sequences

MEMORY_BYTES = 4 * 2**30
"""Memory for the gradients of all completions; longer ones are projected."""

CHUNK = 2**16
"""Entries multiplied at once in float32; their sums are float64."""


@dataclass(frozen=True, kw_only=True)
class InnerProducts:
    """Inner products of the gradients of log π of completions, and with other vectors.

    Attributes:
        scores: of every two completions.
        others: of every completion with each of the other vectors.
        among: of every two of the other vectors.
        parameters: number of parameters.
        exact: whether whole gradients were multiplied, not projections.
    """

    scores: Float[np.ndarray, "batch batch"]
    others: Float[np.ndarray, "batch other"]
    among: Float[np.ndarray, "other other"]
    parameters: int
    exact: bool


def inner_products(
    learner: TorchLearner,
    batch: Batch,
    *,
    others: Sequence[Float[Tensor, "parameters"]] = (),
    each: Callable[[], None] = lambda: None,
) -> InnerProducts:
    """The inner products of s_i = ∇ Σ_t log π(token t of completion i), for every row of a batch.

    Args:
        learner: holds the model, which does not change.
        batch: completions; equal ones of a prompt are computed once, fully masked ones are 0.
        others: further vectors over the same parameters.
        each: called before every backward pass.

    Returns:
        Exact up to float32 rounding of the gradients, as long as all of them fit `MEMORY_BYTES`.
        Longer gradients are projected to as many numbers as fit, by adding up entries with random
        signs; an inner product is then off by about √(2 / numbers) of the product of the norms.

    Source: the linearity of the gradient; Charikar et al. 2002 for the projection.
    """
    distinct: dict[tuple[int, tuple[int, ...]], int] = {}
    place, first = [], []
    tokens, length, group = batch.tokens.tolist(), batch.length.tolist(), batch.group.tolist()
    for row in range(len(tokens)):
        key = group[row], tuple(tokens[row][: length[row]]) if batch.mask[row].any() else ()
        if key not in distinct:
            first.append(row)
        place.append(distinct.setdefault(key, len(distinct)))
    parameters = sum(p.numel() for p in learner.trained().values())
    size = min(parameters, MEMORY_BYTES // (4 * (len(first) + len(others))))
    shorten = _CountSketch.of(parameters, size)
    vectors = torch.zeros(len(first) + len(others), size)
    for index, row in enumerate(first):
        each()
        one = batch.rows(torch.tensor([row]))
        one = replace(one, weight=one.mask.float())
        vectors[index] = shorten(learner.gradient(one, _LOG_LIKELIHOOD))
    for index, vector in enumerate(others):
        vectors[len(first) + index] = shorten(vector)
    gram = np.zeros((len(vectors), len(vectors)))
    for part in vectors.split(CHUNK, dim=1):
        gram += (part @ part.T).numpy()
    own, rest = np.array(place), np.arange(len(first), len(vectors))
    return InnerProducts(
        scores=gram[np.ix_(own, own)],
        others=gram[np.ix_(own, rest)],
        among=gram[np.ix_(rest, rest)],
        parameters=parameters,
        exact=size == parameters,
    )


def coefficients(
    algorithm: BoundAlgorithm, scored: ScoredGroups
) -> Float[np.ndarray, "prompt group"]:
    """What an algorithm multiplies each completion's ∇ log π by, on-policy, in an ascent direction.

        c_i = −P · ∂loss/∂(log π of any token of completion i)

    The mean over the P groups of Σ_i c_i s_i is then the gradient of the step. The policy is its
    own reference, so KL terms vanish; an entropy bonus has to be switched off.

    Args:
        algorithm: the algorithm.
        scored: the groups of one optimizer step, with their rewards.

    Raises:
        UsageError: the data lacks something that the algorithm needs, or tokens of one completion
            get different coefficients, which inner products of whole completions cannot answer.

    Source: the chain rule. RLOO with rewards (1, 0) has advantages ±1 and weights ½, so ±½.
    """
    batch = sequences(scored, excluded=True)
    shape = scored.scores.total.shape
    kl = torch.zeros(*shape, batch.tokens.shape[1])
    data = {**advantage_inputs(scored, batch), "kl": kl}
    [step] = assemble(
        batch, algorithm.advantage(data), algorithm.weighting, keep=algorithm.filter(data)
    )
    assert batch.sampler_logp is not None  # rollouts of this process always have them
    logp = torch.where(step.mask, batch.sampler_logp, 0).requires_grad_()
    same = logp.detach()
    step = replace(step, ref_logp=same, sampler_logp=same)
    losses = algorithm.objective(Outputs(logp=logp), step)
    (slope,) = torch.autograd.grad((losses * step.weight).sum(), logp, allow_unused=True)
    slope = torch.zeros_like(logp) if slope is None else torch.where(step.mask, slope, 0)
    rows = slope.double().sum(1) / step.mask.sum(1).clamp(min=1)
    uneven = torch.where(step.mask, (slope - rows[:, None]).abs(), 0).amax()
    if uneven > 1e-5 * slope.abs().amax():
        raise UsageError(
            "this algorithm weights the tokens of a completion differently, which is not measured."
        )
    return -len(scored.groups) * rows.view(shape).numpy()


_LOG_LIKELIHOOD = FunctionObjective(loss=lambda outputs, batch: outputs["logp"])
"""The objective whose gradient is the sum of ∇ log π over all tokens."""


@dataclass(frozen=True, kw_only=True)
class _CountSketch:
    """Count sketch: every entry is added, with a random sign, to a random index."""

    size: int
    place: Int[Tensor, "parameters"] | None
    sign: Float[Tensor, "parameters"] | None

    @classmethod
    def of(cls, length: int, size: int) -> _CountSketch:
        if size == length:
            return cls(size=size, place=None, sign=None)
        generator = torch.Generator().manual_seed(0)
        sign = 2.0 * torch.randint(0, 2, (length,), generator=generator, dtype=torch.int8) - 1
        place = torch.randint(0, size, (length,), generator=generator)
        return cls(size=size, place=place, sign=sign)

    def __call__(self, vector: Float[Tensor, "parameters"]) -> Float[Tensor, "size"]:
        vector = vector.detach().cpu().float()
        if self.place is None or self.sign is None:
            return vector
        return torch.zeros(self.size).index_add_(0, self.place, self.sign * vector)
