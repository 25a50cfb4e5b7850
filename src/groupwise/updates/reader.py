"""The module through which a learner reads its model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from groupwise.algorithms.losses.distillation import LogitsFunction
from groupwise.kernels import active
from groupwise.models import Backbone, groupwise_attention, unsupported
from groupwise.types import Batch, Outputs
from groupwise.updates.heads import Head, LanguageModelHead, Support
from groupwise.updates.packing import Pack, pack, support_mask
from groupwise.updates.unpacked import Padded, pad


class Reader(nn.Module):
    """A model and a head. All weights are read in `forward`, so that one module can be sharded.

    Args:
        model: a causal language model or a classifier, adapter included.
        head: what is computed from its hidden states; None: log-probabilities.
        temperature: of the sampler, for log-probabilities.

    Attributes:
        packs: whether completions of one prompt share its computation; otherwise whole sequences
            are padded.
    """

    def __init__(self, model: Any, *, head: Head | None = None, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.backbone = Backbone.of(model)
        self.head = head or LanguageModelHead(self.backbone, temperature=temperature)
        # An adapter on the head is not in the matrix that a projection multiplies by.
        plain = not isinstance(self.head, LanguageModelHead) or self.backbone.plain_head
        self.packs = plain and unsupported(model) is None
        self._kernels = active().training_layers(model)

    def forward(
        self,
        laid: Pack | Padded,
        *,
        names: Collection[str],
        support: Sequence[Sequence[Sequence[int]] | None] | None = None,
        function: LogitsFunction | None = None,
    ) -> Outputs:
        """Outputs for every state that the head reads in a microbatch.

        Args:
            laid: the microbatch.
            names: of the outputs.
            support: of every row of the microbatch, the tokens that truncated sampling could draw.
            function: of the logits of those states, for the output "of_logits".
        """
        allowed = None if support is None else _support(laid, support)
        more: dict[str, Any] = {"names": names, "support": allowed}
        if function is not None:
            more["function"] = function
        if isinstance(laid, Pack):
            hidden = self.backbone.hidden(laid.tokens, laid.positions, laid.attend)
            states = hidden.index_select(0, laid.source)
            return self.head(states, laid.target, **more)
        given = {"input_ids": laid.tokens, "attention_mask": laid.seen.long(), "use_cache": False}
        at = laid.row, laid.source
        if isinstance(self.head, LanguageModelHead):
            logits = self.backbone.model(**given).logits[at]
            return self.head.from_logits(logits, laid.target, **more)
        states = self.backbone.decoder(**given).last_hidden_state[at]
        return self.head(states, laid.target, **more)

    def lay_out(self, batch: Batch, rows: Tensor) -> Pack | Padded:
        """Rows of a batch in the form that the model can be given."""
        form = pack if self.packs else pad
        return form(batch, rows, device=self.backbone.device, reads=self.head.reads)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the model's checkpoint; those of the head start with
        "head."."""
        own = {f"head.{name}": p for name, p in self.head.named_parameters()}
        return dict(self.model.named_parameters()) | own

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Route attention and supported layers through the kernels. A backward pass needs this too:
        gradient checkpointing runs the layers again there."""
        attention = groupwise_attention(self.backbone.model) if self.packs else nullcontext()
        with attention, self._kernels:
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, kernels on, all modules in evaluation mode; modes are restored."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad(), self.computing():
                yield
        finally:
            for module, training in modes.items():
                module.training = training


def _support(laid: Pack | Padded, sets: Sequence[Sequence[Sequence[int]] | None]) -> Support:
    """The tokens that truncated sampling could have drawn, for a slice of the read states."""

    def allowed(rows: slice, vocab: int) -> Bool[Tensor, "tokens vocab"]:
        mask = support_mask(sets, laid.row[rows], laid.time[rows], vocab=vocab)
        return mask.to(laid.row.device)

    return allowed
