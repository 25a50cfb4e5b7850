"""Published weights: a version, a manifest, and checksums that depend on order."""

from __future__ import annotations

import torch

from groupwise.models.weights import PublishedWeights
from groupwise.types import TensorInfo


def weights(values: torch.Tensor) -> PublishedWeights:
    return PublishedWeights(version=3, named={"a": values})


def test_the_manifest_names_shape_and_type_of_every_tensor() -> None:
    made = weights(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert made.manifest == {"a": TensorInfo((2, 3), torch.bfloat16)}
    assert [name for name, _ in made.tensors()] == ["a"]


def test_a_digest_is_pinned_and_changes_with_value_order_and_type() -> None:
    # Two words: 1 + 2·2⁸ + 255·2¹⁶ = 16,712,193, and −1 of four bytes 255, times 3.
    bytes_of = torch.tensor([1, 2, 255, 0, 255, 255, 255, 255], dtype=torch.uint8)
    assert weights(bytes_of).digest("a") == 16_712_193 - 3
    assert weights(bytes_of[:3]).digest("a") == 16_712_193
    values = torch.randn(400_000)  # more than one chunk of bytes
    moved = values.clone()
    moved[300_000] += 1e-3
    swapped = values.clone()
    swapped[[7, 300_000]] = swapped[[300_000, 7]]
    digests = {weights(x).digest("a") for x in (values, moved, swapped, values.bfloat16())}
    assert len(digests) == 4
    assert weights(values.clone()).digest("a") == weights(values).digest("a")


def test_tensors_are_read_when_asked_for() -> None:
    """Nothing is copied when a version is published."""
    values = torch.zeros(4)
    made = weights(values)
    before = made.digest("a")
    values.fill_(1.0)
    assert made.digest("a") != before
    assert dict(made.tensors())["a"].data_ptr() == values.data_ptr()
