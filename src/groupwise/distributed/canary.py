"""A known prompt after every transfer, to check that an engine computes with the weights of its
model.

Digests prove that the right weights arrived in the model. An engine may keep further copies, such
as weights laid out for a kernel, and sample from those of an earlier version.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch

from groupwise.errors import RunError
from groupwise.models import Policy
from groupwise.types import Engine, Prompt, Request, Sampling, Stream

LENGTH, PRIME = 16, 7919
"""Number of prompt tokens, and the distance between their ids."""
WRITTEN = 8
"""Tokens that the engine writes."""
LIMIT, LIMIT_16_BIT = 1e-3, 0.1
"""Largest mean difference, in nats, for float32 and for 16 bits."""


def canary_gap(engine: Engine, policy: Policy) -> float:
    """The mean difference of log-probabilities, in nats, between what an engine says of the tokens
    that it draws after a known prompt and a forward pass of its model; infinite if one is not
    finite."""
    model: Any = policy.model
    prompt = [(place + 1) * PRIME % len(policy.tokenizer) for place in range(LENGTH)]
    request = Request(
        prompt=Prompt(id="canary", text=""), tokens=prompt, group=1, stream=Stream(step=-1)
    )
    (group,) = engine.generate([request], Sampling(max_tokens=WRITTEN))
    written = group.completions[0]
    device = model.get_input_embeddings().weight.device
    training = model.training
    model.eval()
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *written.tokens]], device=device)
        logits = model(ids, use_cache=False).logits[0, LENGTH - 1 : -1].float().cpu()
    model.train(training)
    tokens = torch.tensor([int(token) for token in written.tokens])
    own = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1).tolist()
    gap = fmean(abs(a - b) for a, b in zip(own, written.logprobs, strict=True))
    return gap if math.isfinite(gap) else math.inf


def check_canary(engine: Engine, policy: Policy, *, version: int) -> float:
    """Check that an engine computes with the weights of its model; returns `canary_gap`.

    Raises:
        RunError: it computes with others.
    """
    model: Any = policy.model
    limit = LIMIT if model.dtype in (torch.float32, torch.float64) else LIMIT_16_BIT
    gap = canary_gap(engine, policy)
    if gap > limit:
        raise RunError(
            f"weights of version {version}: the sampler does not compute with "
            "the weights that arrived "
            f"(log-probabilities of known tokens differ by {gap:.2g} nats on average)."
        )
    return gap
