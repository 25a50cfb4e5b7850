"""Where models are computed."""

from __future__ import annotations

import resource

import torch


def best_device() -> torch.device:
    """The CUDA GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(name: str) -> torch.device:
    """The device of a setting; "auto" takes the best one."""
    return best_device() if name == "auto" else torch.device(name)


def peak_memory() -> float:
    """The most memory that this process has taken: on its GPU, or all of it where there is none;
    in MB.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
