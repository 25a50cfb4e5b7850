"""One stream of uniform numbers for every completion, computed from its name and not from who draws
it.

The number for position t of a completion is a hash of (stream, prompt id, sample, t). So what a
completion draws depends neither on the batch it is in, nor on the order of rows, nor on what was
drawn before: a resumed run, a reordered batch, a continued completion and two algorithms under
comparison all see the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from groupwise.types import Request

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(request: Request, count: int) -> Float64[Tensor, "group time"]:
    """Uniform numbers in [0, 1) for the first `count` positions of the wanted samples.

    Each is SplitMix64 of (key + position · golden ratio), its upper 53 bits as a fraction, where
    the key is a BLAKE2b hash of the stream, the prompt's id and the sample's index.

    Args:
        request: whose completions.
        count: positions per completion.

    Returns:
        float64 numbers, equal on every machine.

    Source:
        Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), the mixing
            function.
    """
    keys = np.array([_key(request, sample) for sample in request.wanted], dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = keys[:, None] + (np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)[None, :]
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _key(request: Request, sample: int) -> int:
    name = "\x1f".join([*(str(part) for part in request.stream), request.prompt.id, str(sample)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
