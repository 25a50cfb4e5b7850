"""The policy in memory that a vLLM server on this machine reads, without a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from groupwise.rollouts.engines.vllm.receiver import SharedUpdate, digests

ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes."""


class SharedWeights:
    """The newest version of a policy in anonymous memory (memfd), which no other user can open,
    which ends with the processes that use it, and which /dev/shm does not limit."""

    def __init__(self) -> None:
        self._file = os.memfd_create("groupwise-weights")
        self._memory = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: Mapping[str, Tensor], *, version: int) -> SharedUpdate:
        """Copy tensors into the memory, in place of the version before."""
        offsets, size = [], 0
        for tensor in tensors.values():
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        if len(self._memory) != size:
            os.ftruncate(self._file, size)
            self._memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        rows = []
        for tensor, offset in zip(tensors.values(), offsets, strict=True):
            row = self._memory[offset : offset + tensor.nbytes]
            row.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            rows.append(row)
        return SharedUpdate(
            path=path,
            size=size,
            version=version,
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            offsets=offsets,
            digests=digests(rows),
        )

    def close(self) -> None:
        """Free the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)
