"""What is sent to the ranks of a learner arrives as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.distributed.messages import packed, unpacked


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3).t(),
        torch.tensor(float("nan"), dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.bool),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16()[::2],
        torch.randn(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
    ],
    ids=["transposed", "number", "empty", "bool", "bf16", "gradient", "parameter", "sparse"],
)
def test_a_tensor_arrives_as_it_was(tensor: Tensor) -> None:
    (arrived,) = unpacked(packed({"a": [tensor, tensor]}))["a"][:1]
    assert (arrived.dtype, arrived.shape, type(arrived)) == (
        tensor.dtype,
        tensor.shape,
        type(tensor),
    )
    assert torch.equal(arrived.to_dense().nan_to_num(9.0), tensor.detach().to_dense().nan_to_num(9))


def test_what_arrives_may_be_written() -> None:
    given = torch.zeros(3)
    arrived = unpacked(packed(given))
    arrived += 1
    assert arrived.tolist() == [1.0] * 3 and given.tolist() == [0.0] * 3
