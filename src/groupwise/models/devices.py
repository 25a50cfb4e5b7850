"""Where models are computed."""

from __future__ import annotations

import torch


def best_device() -> torch.device:
    """The CUDA GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(name: str) -> torch.device:
    """The device of a setting; "auto" takes the best one."""
    return best_device() if name == "auto" else torch.device(name)
