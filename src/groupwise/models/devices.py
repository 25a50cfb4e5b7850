"""Where models are computed."""

from __future__ import annotations

import resource

import torch

from groupwise.errors import warn
from groupwise.machine import usable_cores


def best_device() -> torch.device:
    """The CUDA GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(name: str) -> torch.device:
    """The device of a setting; "auto" takes the best one."""
    return best_device() if name == "auto" else torch.device(name)


def use_threads(count: int | None) -> None:
    """Set PyTorch's number of CPU threads.

    Args:
        count: threads; None keeps PyTorch's default, or takes the cores that this process may use
            if they are fewer. More threads than cores are set with a warning.
    """
    cores = usable_cores()
    if count is not None and count > cores:
        warn(
            f"threads = {count}: this process may use {cores} of the CPU's cores, for which the "
            f"threads will compete. Set threads = {cores}."
        )
    torch.set_num_threads(min(torch.get_num_threads(), cores) if count is None else count)


def peak_memory() -> float:
    """The most memory that this process has taken: on its GPU, or all of it where there is none;
    in MB.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
