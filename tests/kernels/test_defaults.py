"""Kernels under another default dtype and default device than PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.kernels import Affine, LowRank, adamw
from groupwise.kernels.build import compiled
from groupwise.kernels.cpu import low_rank, rms_norm_backward
from groupwise.kernels.log_softmax import selective_log_softmax
from groupwise.kernels.packed import PackedLinear

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no g++")


def numbers(*shape: int) -> Tensor:
    wave = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
    return wave.square().sin().float().view(shape)


def computed() -> list[Tensor]:
    a, b = numbers(3, 64), numbers(50, 3)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = numbers(9, 64).to(dtype), numbers(50, 64).to(dtype), numbers(50).to(dtype)
        adapter = LowRank(a=a, b=b, scaling=2.0)
        found += [
            PackedLinear(weight, bias, adapter)(x),
            PackedLinear(weight, bias, gate=Affine(weight, None))(x),
            *low_rank(x, a, b, onto=None, scaling=1.0),
            *rms_norm_backward(x, weight[0], 1e-6, x),
        ]
        target = torch.arange(9, device="cpu")
        logp, h, norm = selective_log_softmax(x, target, temperature=0.7, entropy=True)
        assert h is not None
        found += [logp, h, norm]
    return [*found, adamw.norm(numbers(5000).bfloat16())]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_defaults_change_nothing(default: torch.dtype | str) -> None:
    wanted = computed()
    before = torch.get_default_dtype()
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        found = computed()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
