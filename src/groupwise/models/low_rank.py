"""Layers of PEFT's low-rank adapters with the products of `kernels/adapter.py`."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn

from groupwise.kernels import LowRank, add_low_rank


class _Summed:
    """For layers of PEFT: one adapter without dropout and variants is computed here, anything else
    by PEFT."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = [] if self.disable_adapters or self.merged else self.active_adapters
        if args or kwargs or len(names) != 1 or names[0] not in self.lora_A:
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        (name,) = names
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return add_low_rank(self.base_layer(x), x, a, b, scaling=self.scaling[name])


class SummedLinear(_Summed, lora.Linear):
    """An adapter of a linear layer."""


SUMMED: dict[type, type] = {lora.Linear: SummedLinear}
"""The classes here by those of PEFT that they replace."""

if hasattr(lora, "Linear4bit"):

    class SummedLinear4bit(_Summed, lora.Linear4bit):  # pyright: ignore[reportGeneralTypeIssues]
        """An adapter of a layer with 4-bit weights."""

    SUMMED[lora.Linear4bit] = SummedLinear4bit


def sum_low_rank(model: Any) -> Any:
    """The model, with the low-rank adapters of its linear layers computed by `add_low_rank`.

    Left alone are adapters with dropout, a bias or a variant such as DoRA.
    """
    for layer in model.modules():
        if type(layer) in SUMMED and _is_plain(layer):
            layer.__class__ = SUMMED[type(layer)]
    return model


def _is_plain(layer: Any, dropout: tuple[type, ...] = (nn.Identity,)) -> bool:
    parts = [*layer.lora_A.values(), *layer.lora_B.values()]
    return (
        not layer.lora_variant
        and not getattr(layer, "fan_in_fan_out", False)
        and all(type(part) is nn.Linear and part.bias is None for part in parts)
        and all(type(part) in dropout for part in layer.lora_dropout.values())
    )


def added_in_rollouts(layer: nn.Module) -> LowRank | None:
    """What a layer of PEFT adds to its base layer in evaluation mode; None where that is nothing.

    Raises:
        ValueError: it is no low-rank adapter, or one with a bias, a variant such as DoRA, weights
            that are not float32, or more than one adapter at once.
    """
    known = type(layer) in {*SUMMED, *SUMMED.values()}
    if not known or not _is_plain(layer, (nn.Identity, nn.Dropout)):
        raise ValueError(f"{type(layer).__name__}: is not a plain low-rank adapter")
    of: Any = layer
    merged = of.disable_adapters or of.merged
    names = [] if merged else [name for name in of.active_adapters if name in of.lora_A]
    if not names:
        return None
    a, b = of.lora_A[names[0]].weight, of.lora_B[names[0]].weight
    if len(names) > 1 or {a.dtype, b.dtype} != {torch.float32}:
        raise ValueError("an adapter is not float32, or another one is active beside it")
    return LowRank(a=a, b=b, scaling=of.scaling[names[0]])
