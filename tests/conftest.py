"""Settings of the whole suite: one thread per worker, no hub, a reason for skipped GPU tests, and
the PyTorch reference in place of the kernels where GROUPWISE_TEST_KERNELS=torch asks for it."""

from __future__ import annotations

import os

# ruff: noqa: E402 - the libraries read these when they are imported; programs of tests inherit them.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from groupwise.kernels import Reference
from groupwise.kernels.interface import BACKENDS


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if os.environ.get("GROUPWISE_TEST_KERNELS") == "torch":
        BACKENDS["auto"] = Reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
