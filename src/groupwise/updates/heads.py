"""Heads: what is computed from the hidden states of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from groupwise.algorithms.losses.distillation import LogitsFunction
from groupwise.errors import UsageError
from groupwise.models import Backbone, score_layer
from groupwise.types import Outputs
from groupwise.updates.chunked import of_logits
from groupwise.updates.logprobs import Projection, logits_logprobs, token_logprobs

Read = Literal["before", "written", "after"]
"""A hidden state that a head reads: before each token the policy wrote, of the token itself, or
after the last token."""

Support = Callable[[slice, int], Bool[Tensor, "tokens vocab"]]
"""From a slice of the read states and the size of the vocabulary to the tokens that truncated
sampling could have drawn there."""


class Head(nn.Module, ABC):
    """Computes outputs from hidden states, and owns the parameters that this takes.

    Attributes:
        outputs: names of the `Outputs` it can compute.
        reads: the states it needs. Column t of its outputs is what was read before token t of a
            completion, or of the token itself with "written", which stands alone; with "after"
            there is one column more, and what was read after the last token stands at column
            `length`.
    """

    outputs: frozenset[str]
    reads: frozenset[Read] = frozenset({"before"})

    @abstractmethod
    def forward(
        self,
        states: Float[Tensor, "tokens hidden"],
        targets: Int[Tensor, "tokens"],
        *,
        names: Collection[str],
        support: Support | None = None,
    ) -> Outputs:
        """Outputs of the states that were asked for.

        Args:
            states: hidden states, one for each read.
            targets: the token that follows each state; 0 after the last one.
            names: of the outputs that are needed.
            support: for truncated sampling, which tokens could have been drawn.
        """


class LanguageModelHead(Head):
    """Log-probabilities and entropy under the model's own output projection, which may be tied to
    its embedding; it has no parameters of its own.

    Args:
        backbone: the model, whose projection is looked up at every use.
        temperature: of the sampler; log-probabilities are of the tempered distribution that was
            sampled from.
    """

    outputs = frozenset({"logp", "entropy"})

    def __init__(self, backbone: Backbone, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.backbone = backbone
        self.temperature = temperature

    def forward(
        self,
        states: Float[Tensor, "tokens hidden"],
        targets: Int[Tensor, "tokens"],
        *,
        names: Collection[str],
        support: Support | None = None,
        function: LogitsFunction | None = None,
    ) -> Outputs:
        """As `Head.forward`, without holding [tokens, vocab] at one time.

        Args:
            function: gives the output "of_logits", from logits over the whole vocabulary.
        """
        own = self.backbone.head
        projection = Projection(
            weight=own.weight,
            bias=own.bias,
            softcap=self.backbone.softcap,
            temperature=self.temperature,
            fp32_logits=self.backbone.fp32_logits,
            accumulate_into_grad=True,
        )
        vocab = len(own.weight)
        logp, entropy = token_logprobs(
            states,
            targets,
            projection,
            entropy="entropy" in names,
            support=None if support is None else lambda rows: support(rows, vocab),
        )
        found = None if function is None else of_logits(states, projection, function)
        return Outputs(logp=logp, entropy=entropy, of_logits=found)

    def from_logits(
        self,
        logits: Float[Tensor, "tokens vocab"],
        targets: Int[Tensor, "tokens"],
        *,
        names: Collection[str],
        support: Support | None = None,
        function: LogitsFunction | None = None,
    ) -> Outputs:
        """The same from finished logits, for models whose head is more than a projection."""
        allowed = None if support is None else support(slice(None), logits.shape[-1])
        logp, entropy = logits_logprobs(
            logits,
            targets,
            temperature=self.temperature,
            entropy="entropy" in names,
            support=allowed,
        )
        found = None
        if function is not None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            found = function(wide / self.temperature, slice(0, len(logits)))
        return Outputs(logp=logp, entropy=entropy, of_logits=found)


class Score(Head):
    """One number for each state, from the linear layer of a classifier.

        V = w · h + b

    A critic reads "before" each token the policy wrote, and "after" the last one where truncated
    answers are bootstrapped; a reward model reads "after" the last token; a token reward model
    reads "written" tokens. The layer is the model's own (`groupwise.models.load_scorer`), so what
    is trained is saved with the model. The product is computed in float32 at least.

    Args:
        model: a sequence or token classifier with one label, adapter included.
        reads: the states.

    Raises:
        UsageError: the model has no layer that gives one number, or "written" is read together
            with others.
    """

    outputs = frozenset({"values"})

    def __init__(self, model: Any, *, reads: Collection[Read]) -> None:
        super().__init__()
        self.reads = frozenset(reads)
        if "written" in self.reads and len(self.reads) > 1:
            raise UsageError(
                f"reads = {sorted(self.reads)}: the states of written tokens have columns of their "
                "own and are read alone."
            )
        score_layer(model)
        self.classifier = [model]  # In a list, for its parameters are not the head's.

    def forward(
        self,
        states: Float[Tensor, "tokens hidden"],
        targets: Int[Tensor, "tokens"],
        *,
        names: Collection[str],
        support: Support | None = None,
    ) -> Outputs:
        """As `Head.forward`."""
        layer = score_layer(self.classifier[0])
        wide = torch.promote_types(states.dtype, torch.float32)
        bias = None if layer.bias is None else layer.bias.to(wide)
        values = nn.functional.linear(states.to(wide), layer.weight.to(wide), bias)
        return Outputs(values=values.squeeze(-1))
