"""The optimiser: which weights have changed."""

from __future__ import annotations

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
