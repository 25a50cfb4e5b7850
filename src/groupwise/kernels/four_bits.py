"""Weights in 4 bits on a CPU, as bitsandbytes stores them (QLoRA, Dettmers et al., 2305.14314)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor, nn


@dataclass(frozen=True, eq=False, kw_only=True)
class FourBits:
    """A matrix: weight[i, j] = levels[code[i, j]] · scales[i, j // 64], rounded to a dtype.

    Attributes:
        codes: two per byte, the first of them in the upper half.
        dtype: of the layer that has the weight.
    """

    BLOCK: ClassVar[int] = 64
    """Numbers of a row that share a scale."""
    COPY_BYTES: ClassVar[float] = 0.5 + 4 / BLOCK
    """Bytes per number of the copy that a rollout makes."""

    codes: UInt8[Tensor, "outputs half_inputs"]
    scales: Float32[Tensor, "outputs blocks"]
    levels: Float32[Tensor, "16"]
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Any) -> FourBits:
        """The weight of a layer for which `is_four_bit_linear` is true; its codes are not copied.

        Raises:
            ValueError: it does not compute in the dtype in which its weight was quantized.
        """
        from bitsandbytes.functional import dequantize_blockwise

        state = layer.weight.quant_state
        if layer.compute_dtype not in (None, state.dtype):
            raise ValueError(f"weights of {state.dtype} are multiplied in {layer.compute_dtype}")
        scales = state.absmax
        if state.nested:
            scales = dequantize_blockwise(scales, state.state2) + state.offset
        rows = layer.out_features
        return cls(
            codes=layer.weight.detach().view(rows, -1).as_subclass(Tensor),
            scales=scales.float().view(rows, -1),
            levels=state.code.float(),
            dtype=state.dtype,
        )

    @classmethod
    def joined(cls, parts: Sequence[FourBits]) -> FourBits:
        """Matrices of the same inputs, one above the other.

        Raises:
            ValueError: they have other levels or dtypes.
        """
        first = parts[0]
        if any(x.dtype != first.dtype or not x.levels.equal(first.levels) for x in parts):
            raise ValueError("matrices in 4 bits must have the same levels and dtype")
        return cls(
            codes=torch.cat([x.codes for x in parts]),
            scales=torch.cat([x.scales for x in parts]),
            levels=first.levels,
            dtype=first.dtype,
        )

    @property
    def shape(self) -> tuple[int, int]:
        rows, half = self.codes.shape
        return rows, 2 * half

    def whole(self) -> Float[Tensor, "outputs inputs"]:
        """The matrix in its dtype."""
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).view(
            len(self.codes), -1, self.BLOCK
        )
        return (self.levels[codes.int()] * self.scales[..., None]).flatten(1).to(self.dtype)


def has_training_layout(layer: Any) -> bool:
    """Whether the weight of a 4-bit layer is laid out as bitsandbytes trains. In evaluation, it has
    another layout for processors with AVX512-BF16."""
    return not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


def is_four_bit_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer on a CPU is x · Wᵀ + bias with a weight in 4 bits, laid out for training."""
    library: Any = sys.modules.get("bitsandbytes")  # slow to import, and there if a layer is
    if library is None or type(layer) is not library.nn.Linear4bit or "forward" in vars(layer):
        return False
    of: Any = layer
    state = getattr(of.weight, "quant_state", None)
    return (
        state is not None
        and of.weight.device.type == "cpu"
        and of.weight.dtype == torch.uint8
        and has_training_layout(of)
        and state.blocksize == FourBits.BLOCK
        and of.in_features % FourBits.BLOCK == 0
    )
