"""The per-token loss of an algorithm, put together from its parts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.losses.masking import apply_mask
from groupwise.algorithms.properties import broken
from groupwise.errors import UsageError
from groupwise.registry import BoundFunction
from groupwise.types import Batch


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Surrogate times correction, plus divergence, minus entropy.

        loss_t = correction_t · surrogate_t + coefficient · divergence_t − entropy · H_t

    Attributes:
        ratio, surrogate, divergence, correction: registered functions with their settings fixed.
        coefficient: of the divergence as a term of the loss; 0 where there is none.
        entropy: coefficient of the entropy bonus.
    """

    ratio: BoundFunction
    surrogate: BoundFunction
    divergence: BoundFunction
    correction: BoundFunction
    coefficient: float = 0.0
    entropy: float = 0.0

    def __call__(
        self,
        logp: Float[Tensor, "batch time"],
        entropy: Float[Tensor, "batch time"] | None,
        batch: Batch,
    ) -> Float[Tensor, "batch time"]:
        """The loss of every token; 0 outside the mask of the batch.

        Args:
            logp: of the batch's tokens under the policy, with gradient.
            entropy: of the policy at each token, with gradient; None unless `needs_entropy`.
            batch: rows whole; `old_logp` None stands for `logp.detach()`.

        Raises:
            UsageError: the batch lacks log-probabilities that a part needs.
        """
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
        if self.needs_reference:
            loss = loss + self.coefficient * self.divergence(data)
        if self.needs_entropy:
            if entropy is None:
                raise UsageError("entropy: this objective has an entropy bonus and got no entropy.")
            loss = loss - self.entropy * apply_mask(entropy, batch.mask)
        return apply_mask(loss, batch.mask)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses `ref_logp`."""
        return self.coefficient != 0 and "ref_logp" in self.divergence.required

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss uses the entropy of the policy."""
        return self.entropy != 0

    @property
    def needs_sampler(self) -> bool:
        """Whether the loss uses `sampler_logp`."""
        return "sampler_logp" in self.correction.required

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a row whose advantages are all 0 has exactly no gradient."""
        inert = "zero_at_zero_advantage" not in broken(self.surrogate.function)
        return inert and not self.needs_reference and not self.needs_entropy
