"""The per-token loss of an algorithm, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.losses.masking import apply_mask
from groupwise.algorithms.losses.outcomes import outcome_cross_entropy
from groupwise.algorithms.properties import broken
from groupwise.errors import UsageError
from groupwise.registry import BoundFunction
from groupwise.types import Batch, Granularity, Outputs

STEP_TOKENS = "step_tokens"
"""Column of a batch, per row: tokens in the mask of the whole optimizer step. A microbatch holds
some of its rows and cannot count them."""


@dataclass(frozen=True, kw_only=True)
class FunctionObjective:
    """An objective made of one function.

    Attributes:
        loss: the loss of each token, or of each row, from the outputs of the model and the batch.
        needs, granularity, skips_zero_advantage: as `Objective` explains.
    """

    loss: Callable[[Outputs, Batch], Float[Tensor, "batch *time"]]
    needs: frozenset[str] = frozenset({"logp"})
    granularity: Granularity = "token"
    skips_zero_advantage: bool = False

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch *time"]:
        return self.loss(outputs, batch)


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The loss of a critic: of its values and the columns "returns" and "old_values" of the batch.

    Attributes:
        loss: a registered value loss with its settings fixed.
        needs, granularity, skips_zero_advantage: as `Objective` explains.
    """

    loss: BoundFunction
    needs: frozenset[str] = frozenset({"values"})
    granularity: Granularity = "token"
    skips_zero_advantage: bool = False

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch time"]:
        values = outputs["values"][:, : batch.mask.shape[1]]
        old = batch.columns.get("old_values", values.detach())
        data = {"values": values, "old_values": old, "returns": batch.columns["returns"]}
        return self.loss({**data, "mask": batch.mask})


@dataclass(frozen=True, kw_only=True)
class OutcomeObjective:
    """The loss of a token reward model: of its scores and the column "outcome" of the batch.

    Attributes:
        needs, granularity, skips_zero_advantage: as `Objective` explains.
    """

    needs: frozenset[str] = frozenset({"values"})
    granularity: Granularity = "row"
    skips_zero_advantage: bool = False

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch"]:
        return outcome_cross_entropy(outputs["values"], batch.columns["outcome"], batch.mask)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Surrogate times correction, plus divergence, minus entropy.

        loss_t = correction_t · surrogate_t + coefficient · divergence_t − entropy · s_t · H_t

    s_t is 1 where the bonus is weighted like the loss. Where it is the mean entropy of the tokens
    of the step, s_t = 1 / (weight_t · tokens), so that Σ weight_t · s_t · H_t is that mean.

    Attributes:
        ratio, surrogate, divergence, correction: registered functions with their settings fixed.
        coefficient: of the divergence as a term of the loss; 0 where there is none.
        entropy: coefficient of the entropy bonus.
        entropy_over: what the bonus is weighted by, as in `Algorithm`.
    """

    ratio: BoundFunction
    surrogate: BoundFunction
    divergence: BoundFunction
    correction: BoundFunction
    coefficient: float = 0.0
    entropy: float = 0.0
    entropy_over: Literal["loss", "tokens"] = "loss"

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch time"]:
        """The loss of every token; 0 outside the mask of the batch.

        Args:
            outputs: of the policy for the batch's tokens, with gradient.
            batch: whole rows; `old_logp` None stands for `logp.detach()`.

        Raises:
            UsageError: outputs or batch lack something in `needs`.
        """
        logp = outputs["logp"]
        old = logp.detach() if batch.old_logp is None else batch.old_logp
        data = {
            "logp": logp,
            "old_logp": old,
            "sampler_logp": batch.sampler_logp,
            "ref_logp": batch.ref_logp,
            "advantage": batch.advantage,
            "mask": batch.mask,
        }
        data["log_ratio"] = self.ratio(data)
        loss = self.correction(data) * self.surrogate(data)
        if "ref_logp" in self.needs:
            loss = loss + self.coefficient * self.divergence(data)
        if "entropy" in self.needs:
            loss = loss - self.entropy * self._bonus(outputs["entropy"], batch)
        return apply_mask(loss, batch.mask)

    def _bonus(
        self, entropy: Float[Tensor, "batch time"], batch: Batch
    ) -> Float[Tensor, "batch time"]:
        """s_t · H_t."""
        if self.entropy_over == "loss":
            return apply_mask(entropy, batch.mask)
        if STEP_TOKENS not in batch.columns:
            raise UsageError(
                f"{STEP_TOKENS}: the entropy bonus needs it; make batches by assemble."
            )
        weighted = batch.mask & (batch.weight != 0)
        scale = 1 / (batch.weight * batch.columns[STEP_TOKENS][:, None])
        return apply_mask(entropy, weighted) * apply_mask(scale, weighted)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the outputs and of the log-probabilities in the batch that the loss reads."""
        used = {
            "logp": True,
            "entropy": self.entropy != 0,
            "ref_logp": self.coefficient != 0 and "ref_logp" in self.divergence.required,
            "sampler_logp": "sampler_logp" in self.correction.required,
        }
        return frozenset(name for name, reads in used.items() if reads)

    @property
    def granularity(self) -> Granularity:
        """Every token has a loss of its own, also where a ratio is of the whole row."""
        return "token"

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a row whose advantages are all 0 has exactly no gradient."""
        inert = "zero_at_zero_advantage" not in broken(self.surrogate.function)
        return inert and self.needs.isdisjoint({"ref_logp", "entropy"})
