"""The optimiser: which weights have changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from groupwise.updates import MasterOptimizer, OptimizerSettings


def test_movement_is_the_share_of_parameters_that_have_not_changed() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.ones(2))}
    unmoved = MasterOptimizer(parameters, OptimizerSettings()).movement()
    assert unmoved() == 1.0
    with torch.no_grad():
        parameters["a"] += 1e-6
    assert unmoved() == 0.5


def test_movement_copies_no_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    double = torch.Tensor.double
    monkeypatch.setattr(
        torch.Tensor, "double", lambda self: copied.append(self.numel()) or double(self)
    )
    monkeypatch.setattr("groupwise.updates.optimizer.PIECE", 8)
    weight = nn.Parameter(torch.arange(20.0).reshape(4, 5))
    unmoved = MasterOptimizer({"w": weight}, OptimizerSettings()).movement()
    assert unmoved() == 1.0
    with torch.no_grad():
        weight[3, 4] += 1e-3
    assert unmoved() == 0.0
    assert max(copied) == 8
