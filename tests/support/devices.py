"""The devices that the numerical core is tested on: the CPU, and by the mark `gpu` a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

ON_EVERY_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def placed(data: Any, device: str) -> Any:
    """Tensors, alone or in mappings, on a device; other values as they are."""
    if isinstance(data, Mapping):
        return {name: placed(value, device) for name, value in data.items()}
    return data.to(device) if isinstance(data, Tensor) else data
