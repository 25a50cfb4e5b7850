"""Batches of random numbers."""

from __future__ import annotations

import torch

from groupwise.types import Batch
from tiny_models import VOCAB


def batch_of(groups: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """Groups of 1 to 4 completions of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1 + (3 * index + 1) % 4 for index in range(groups)]
    rows = sum(sizes)
    length = torch.randint(1, 13, (rows,), generator=generator)
    mask = torch.arange(12) < length[:, None]
    numbers = torch.randn(4, rows, 12, generator=generator, dtype=dtype)
    return Batch(
        prompts=tuple(
            torch.randint(12, VOCAB, (1 + index % 6,), generator=generator)
            for index in range(groups)
        ),
        group=torch.repeat_interleave(torch.arange(groups), torch.tensor(sizes)),
        tokens=torch.randint(12, VOCAB, (rows, 12), generator=generator) * mask,
        length=length,
        mask=mask,
        advantage=numbers[0],
        weight=torch.rand(rows, 12, generator=generator, dtype=dtype) * mask,
        old_logp=-2 + numbers[1] / 4,
        sampler_logp=-2 + numbers[2] / 4,
        ref_logp=-2 + numbers[3] / 4,
        row_weight=torch.rand(rows, generator=generator, dtype=dtype),
    )
