"""Keeps freed memory in the process, so that the next buffer of the same size costs nothing."""

from __future__ import annotations

import ctypes
import sys

import torch

from groupwise.kernels.interface import active

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = -1
"""Turns trimming off. The largest threshold, 2 GiB, does not: half a billion parameters leave more
than that free at the end of the heap, and steps that gave it back took an eighth longer."""


def keep_freed_memory() -> bool:
    """Let glibc reuse buffers of every size instead of returning the large ones to the kernel.

    A step allocates and frees the same large buffers over and over. By default every one is made of
    fresh pages, each of which the kernel has to find, clear and map when it is first touched.
    Compared with keeping buffers of up to 32 MiB, glibc's own maximum, a bf16 update on a CPU takes
    a tenth less time and a float32 update the same. No buffer is returned between steps.

    PyTorch asks glibc for aligned buffers, and glibc before 2.38 cannot reuse the hole of one for
    another of its size. So tensors made from now on come from an allocator that aligns them itself
    (`allocator.cpp`), unless compiled kernels are switched off: a LoRA run of 0.5 B parameters then
    needs 2.4 GiB less (`benchmarks/notes.md`).

    Returns:
        Whether it took effect: only Linux with glibc has this switch.

    Source: mallopt(3).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER)):
        return False
    if "cpp" in active().description(torch.device("cpu")):
        from groupwise.kernels.build import allocator  # goes with the kernels

        if (own := allocator()) is not None:
            own.use_heap()
    return True
