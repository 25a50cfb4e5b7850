"""A published version of weights that live in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.types import TensorInfo


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
        """Σ byteᵢ · (2i + 1) modulo 2⁶⁴."""
        data, total = self.named[name].detach().contiguous().flatten().view(torch.uint8), 0
        for first in range(0, len(data), 1 << 20):
            part = data[first : first + (1 << 20)].long()
            place = torch.arange(first, first + len(part), device=part.device)
            total += int((part * (2 * place + 1)).sum())
        return total % 2**64
