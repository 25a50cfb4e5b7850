"""Distillation by the divergence between the distributions of a teacher and a student."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.algorithms.losses.masking import apply_mask
from groupwise.algorithms.losses.objective import PolicyObjective
from groupwise.errors import UsageError
from groupwise.types import Batch, Granularity, Outputs

LogitsFunction = Callable[[Float[Tensor, "chunk vocab"], slice], Float[Tensor, "chunk *rest"]]
"""From logits, divided by the temperature, of a slice of the tokens to what is computed of each."""


def generalized_jsd(
    student: Float[Tensor, "tokens outcomes"],
    teacher: Float[Tensor, "tokens outcomes"],
    *,
    beta: float,
) -> Float[Tensor, "tokens"]:
    """The generalised Jensen-Shannon divergence of two distributions.

        D_β = β KL(T‖M) + (1 − β) KL(S‖M),   M = β T + (1 − β) S
        D_0 = KL(T‖S),   D_1 = KL(S‖T)

    D_β / β tends to D_0 as β → 0, and D_β / (1 − β) to D_1 as β → 1: next to its ends D_β is small,
    and the ends themselves are the KL divergences.

    Args:
        student: log S of every outcome, with gradient.
        teacher: log T.
        beta: 0 is the forward KL, which covers all that the teacher does; 1 the reverse KL, which
            keeps to what it does most.

    Returns:
        In nats; at least 0 up to rounding.

    Raises:
        UsageError: β outside [0, 1].

    Example:
        >>> student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
        >>> [round(generalized_jsd(student, teacher, beta=b).item(), 4) for b in (0.0, 0.5, 1.0)]
        [0.3681, 0.1017, 0.5108]

    Source: GKD (2306.13649), equation 1.
    Elsewhere: TRL's `generalized_jsd_loss`, the same. DistiLLM's weight is 1 − β, and its and
    torchtune's forward KL leaves out the teacher's entropy, which has no gradient. The paper writes
    D_β with the ends as limits of D_β / β.
    """
    if not 0 <= beta <= 1:
        raise UsageError(f"beta = {beta!r}: must lie in [0, 1].")
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(
    first: Float[Tensor, "tokens outcomes"], second: Float[Tensor, "tokens outcomes"]
) -> Float[Tensor, "tokens"]:
    """KL(first‖second) of log-probabilities."""
    return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)


def top_outcomes(
    logits: Float[Tensor, "tokens vocab"], ids: Int[Tensor, "tokens k"]
) -> Float[Tensor, "tokens outcomes"]:
    """Log-probabilities of some tokens and, as one more outcome, of all others together.

    Returns:
        [tokens, k + 1]; [tokens, k] where k is the whole vocabulary.

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> top_outcomes(logits, torch.tensor([[0]])).exp()
        tensor([[0.5000, 0.5000]])
    """
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, ids)
    if ids.shape[-1] == logits.shape[-1]:
        return own
    rest = logs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([own, rest], dim=-1)


@dataclass(frozen=True, kw_only=True)
class DistillationObjective:
    """The loss of a policy plus its divergence from a teacher at every token.

        loss_t = policy_t + D_β(teacher, student)_t

    The outcomes of D are the teacher's k most likely tokens and all others together: at most the
    divergence over the vocabulary, and equal to it where k is the vocabulary. There is no gradient
    through the choice of the tokens before. Batches have the columns "teacher_ids"
    [batch, time, k] and "teacher_logp" [batch, time, outcomes].

    Attributes:
        policy: of the advantages.
        beta: see `generalized_jsd`.

    Source: GKD (2306.13649) on the student's samples.
    Elsewhere: TRL's DistillationTrainer and verl too add an outcome for the rest of the vocabulary;
    NeMo RL leaves the rest out, so that its sum can be negative.
    """

    policy: PolicyObjective
    beta: float

    granularity: Granularity = "token"
    skips_zero_advantage: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """What the policy's loss reads, and the divergence."""
        return self.policy.needs | {"of_logits"}

    def on_logits(
        self, batch: Batch, row: Int[Tensor, "tokens"], time: Int[Tensor, "tokens"]
    ) -> LogitsFunction:
        """The divergence at some tokens, from their logits."""
        ids = batch.columns["teacher_ids"][row, time].long()
        teacher = batch.columns["teacher_logp"][row, time]

        def divergence(logits: Tensor, rows: slice) -> Tensor:
            own = top_outcomes(logits, ids[rows].to(logits.device))
            return generalized_jsd(own, teacher[rows].to(own), beta=self.beta)

        return divergence

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch time"]:
        return self.policy(outputs, batch) + apply_mask(outputs["of_logits"], batch.mask)
