"""What each token's log-probability has to be where weights changed while a completion was
written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from groupwise.types import Completion, Group


def span_logprobs(weights: Sequence[Any], group: Group, completion: Completion) -> list[float]:
    """Each token under the weights of the version that drew it, behind the keys and values that the
    versions before it have left.

    Args:
        weights: a model for every version.
    """
    ids = torch.tensor([[*group.prompt_tokens, *completion.tokens]])
    prompt, found, cache, at = len(group.prompt_tokens), [], None, 0
    ends = [start for start, _ in completion.versions[1:]] + [len(completion.tokens)]
    for (start, version), end in zip(completion.versions, ends, strict=True):
        if start == end:
            continue
        last = prompt + end - 1
        with torch.no_grad():
            out = weights[version](ids[:, at:last], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logp = out.logits[0].log_softmax(-1)
        found += [float(logp[prompt + t - 1 - at, ids[0, prompt + t]]) for t in range(start, end)]
        at = last
    return found


def largest_gap(weights: Sequence[Any], groups: Sequence[Group]) -> float:
    """Between these and the log-probabilities of the engine."""
    gaps = [0.0]
    for group in groups:
        for one in group.completions:
            wanted = span_logprobs(weights, group, one)
            gaps += [abs(a - b) for a, b in zip(wanted, one.logprobs, strict=True)]
    return max(gaps)
