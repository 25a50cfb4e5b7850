"""What is sent to the ranks of a learner arrives as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from groupwise.distributed.messages import packed, unpacked

TENSORS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "number": lambda: torch.tensor(float("nan"), dtype=torch.float64),
    "empty": lambda: torch.zeros(0, 3, dtype=torch.bool),
    "bool": lambda: torch.tensor([True, False]),
    "bf16": lambda: torch.randn(5).bfloat16()[::2],
    "gradient": lambda: torch.randn(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "sparse": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_arrives_as_it_was(kind: str) -> None:
    tensor = TENSORS[kind]()
    arrived = unpacked(packed({"a": [tensor, tensor]}))["a"][1]
    assert type(arrived) is type(tensor)
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived.to_dense().nan_to_num(9.0), tensor.detach().to_dense().nan_to_num(9))


def test_what_arrives_may_be_written() -> None:
    given = torch.zeros(3)
    arrived = unpacked(packed(given))
    arrived += 1
    assert arrived.tolist() == [1.0] * 3 and given.tolist() == [0.0] * 3
