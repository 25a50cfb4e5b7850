"""The optimizer: which weights have changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from groupwise.updates.optimizer import moments


def test_moments_change_with_a_weight() -> None:
    weights = [torch.zeros(3), torch.ones(2)]
    before = moments(weights)
    assert torch.equal(moments(weights), before)
    weights[0] += 1e-6
    assert (moments(weights) == before).all(1).tolist() == [False, True]


def test_moments_copy_no_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    double = torch.Tensor.double
    monkeypatch.setattr(
        torch.Tensor, "double", lambda self: copied.append(self.numel()) or double(self)
    )
    monkeypatch.setattr("groupwise.updates.optimizer.PIECE", 8)
    weight = nn.Parameter(torch.arange(20.0).reshape(4, 5))
    before = moments([weight])
    with torch.no_grad():
        weight[3, 4] += 1e-3
    assert not torch.equal(moments([weight]), before)
    assert max(copied) == 8
