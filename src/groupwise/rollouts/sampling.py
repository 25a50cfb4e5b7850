"""From logits to tokens: inverse-CDF sampling, and log-probabilities of what was sampled from."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.kernels import active, inverse_cdf
from groupwise.types import Sampling


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """Tokens, their log-probabilities, and under truncation which tokens could have been drawn."""

    tokens: Int[Tensor, "rows"]
    logp: Float[Tensor, "rows"]
    support: Bool[Tensor, "rows vocab"] | None


def kept_ids(support: Bool[Tensor, "rows vocab"]) -> list[array[int]]:
    """The token ids that a row could have drawn, for each row: four bytes each, fetched from the
    device at once."""
    rows, ids = support.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(support)).tolist()
    parts = ids.to("cpu", torch.int32).split(counts)
    return [array("i", part.numpy().tobytes()) for part in parts]


def distribution(
    logits: Float[Tensor, "rows vocab"], sampling: Sampling
) -> tuple[Float[Tensor, "rows vocab"], Bool[Tensor, "rows vocab"] | None]:
    """Probabilities after temperature and truncation, and the kept set (None when nothing is cut).

    Truncation follows the usual order: temperature, top-k, top-p, min-p, each applied to what the
    one before left; the most probable token is always kept. Ties at the edge of top-k and top-p are
    resolved towards keeping.

    Elsewhere: vLLM and transformers use the same order; both renormalise, as is done here.
    """
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    probs = torch.softmax(logits, -1)
    if not truncates(sampling):
        return probs, None
    kept = torch.ones_like(probs, dtype=torch.bool)
    if 0 < sampling.top_k < probs.shape[-1]:
        kept &= probs >= probs.topk(sampling.top_k, -1).values[:, -1:]
    if sampling.top_p < 1.0:
        left = torch.where(kept, probs, 0)
        ordered = left.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        inside = before < sampling.top_p * ordered.sum(-1, keepdim=True)
        edge = torch.where(inside, ordered, float("inf")).amin(-1, keepdim=True)
        kept &= probs >= edge
    if sampling.min_p > 0.0:
        kept &= probs >= sampling.min_p * probs.amax(-1, keepdim=True)
    probs = torch.where(kept, probs, 0)
    return probs / probs.sum(-1, keepdim=True), kept


def truncates(sampling: Sampling) -> bool:
    """Whether tokens are drawn from a part of the vocabulary only; greedy decoding does not say
    from which."""
    cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return cuts and sampling.temperature > 0.0


def draw(
    logits: Float[Tensor, "rows vocab"], uniform: Float[Tensor, "rows"], sampling: Sampling
) -> SampledTokens:
    """One token per row: the first whose cumulative probability exceeds the row's uniform number.

    Greedy decoding (`temperature = 0`) takes the largest logit and reports its log-probability at
    temperature 1.

    Returns:
        tokens of positive probability, and log-probabilities of the distribution they were drawn
        from.
    """
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        logp = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        return SampledTokens(tokens=tokens, logp=logp, support=None)
    if not truncates(sampling):
        tokens, logp = active().draw(logits, uniform, temperature=sampling.temperature)
        return SampledTokens(tokens=tokens, logp=logp, support=None)
    probs, kept = distribution(logits, sampling)
    tokens, logp = inverse_cdf(probs, uniform)
    return SampledTokens(tokens=tokens, logp=logp, support=kept)
