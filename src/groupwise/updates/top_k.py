"""The most likely tokens of a model at every place that the policy wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.algorithms.losses.distillation import top_outcomes
from groupwise.types import Batch
from groupwise.updates.grids import read_rows, support_of
from groupwise.updates.learner import TorchLearner
from groupwise.updates.packing import plan


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Distributions cut to their k most likely tokens; 0 where the policy wrote nothing.

    Attributes:
        ids: the tokens, most likely first.
        logp: their log-probabilities and, where k is less than the vocabulary, that of all others
            together.
        token: log-probability of the token that the policy wrote, among those that truncated
            sampling could draw.
    """

    ids: Int[Tensor, "batch time k"]
    logp: Float[Tensor, "batch time outcomes"]
    token: Float[Tensor, "batch time"]


def top_k(learner: TorchLearner, batch: Batch, *, k: int, vocab: int) -> TopK:
    """The k most likely tokens of a learner's model, over the whole tempered distribution.

    Args:
        learner: whose model is read.
        batch: the sequences; of its rows, those without a mask are 0.
        k: tokens at each place, at most `vocab`.
        vocab: ids from here on are left out: embeddings that only pad the matrix.

    Returns:
        In CPU memory, 8 · k bytes for each token.
    """
    reader, (rows, time) = learner.reader, batch.tokens.shape
    ids = torch.zeros(rows, time, k, dtype=torch.int32)
    logp = torch.zeros(rows, time, k + (k < vocab))
    token = torch.zeros(rows, time)

    def found(logits: Tensor, _: slice) -> Tensor:
        own = logits[:, :vocab]
        most = own.topk(k).indices
        # Ids are exact as float32 up to 2^24.
        return torch.cat([most.to(logits.dtype), top_outcomes(own, most)], dim=-1)

    with reader.evaluating():
        for part in plan(batch, read_rows(reader, batch), tokens=learner.tokens_per_microbatch):
            laid = reader.lay_out(batch, part)
            support = support_of(batch, part)
            outputs = reader(laid, names={"logp"}, support=support, function=found)
            at = laid.rows[laid.row.cpu()], laid.time.cpu()
            both = outputs["of_logits"].cpu()
            ids[at], logp[at] = both[:, :k].to(torch.int32), both[:, k:].float()
            token[at] = outputs["logp"].float().cpu()
    return TopK(ids=ids, logp=logp, token=token)
