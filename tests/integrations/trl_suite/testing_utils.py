"""What TRL's test file takes from the module `testing_utils` beside it.

TRL's own module imports private names of one version of TRL. This one asks which packages are
installed; jmespath, which TRL's trainer needs for tools, is not needed here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch


def _requires(package: str) -> Any:
    known = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not known, reason=f"needs {package}")


class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir(self, tmp_path: Path) -> None:
        self.tmp_dir = str(tmp_path)


def is_ampere_or_newer() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


require_bitsandbytes = _requires("bitsandbytes")
require_kernels = _requires("kernels")
require_liger_kernel = _requires("liger_kernel")
require_peft = _requires("peft")
require_vision = _requires("PIL")
require_vllm = _requires("vllm")
require_jmespath = pytest.mark.filterwarnings("default")
require_torch_accelerator = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an accelerator"
)
