"""A published version of weights that live in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from groupwise.types import TensorInfo

WORDS = 1 << 18
"""Number of words whose sum is computed at a time."""


@dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """Weights of a learner in the same process.

    Attributes:
        version: the number of optimizer steps behind them.
        named: the live tensors; a reader sees what they hold when it reads.
    """

    version: int
    named: Mapping[str, Tensor]

    @property
    def manifest(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.named.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.named.items():
            yield name, tensor.detach()

    def digest(self, name: str) -> int:
        """Σ wordᵢ · (2i + 1) modulo 2⁶⁴, where words are the tensor's bytes, four at a time, as
        signed numbers; the last one is filled up with zeros."""
        data, total = self.named[name].detach().contiguous().flatten().view(torch.uint8), 0
        if len(data) % 4 or data.storage_offset() % 4:
            data = pad(data, (0, -len(data) % 4))
        words = data.view(torch.int32)
        odd = torch.arange(1, 2 * min(WORDS, len(words)) + 1, 2, device=words.device)
        for first in range(0, len(words), WORDS):
            part = words[first : first + WORDS].long()
            total += int((part * odd[: len(part)]).sum()) + 2 * first * int(part.sum())
        return total % 2**64
