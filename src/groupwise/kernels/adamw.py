"""The optimizer step of a bfloat16 model on a CPU in one pass over memory (`cpp/adamw.cpp`)."""

from __future__ import annotations

import ctypes
import math

import torch
from jaxtyping import BFloat16, Float, Float32, Int16
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from groupwise.kernels import structures
from groupwise.kernels.build import compiled, library
from groupwise.kernels.cpu import typed
from groupwise.kernels.structures import require

BLOCK = 1 << 12
"""Numbers whose squares are added in float32; their sums are added in float64."""


def can_step(parameter: Tensor) -> bool:
    """Whether `split_adamw` takes the parameter: a contiguous bfloat16 one on a CPU. A fake one, of
    which the memory of a run is planned, stands for one of the run."""
    return (
        parameter.device.type == "cpu"
        and parameter.dtype == torch.bfloat16
        and not is_traceable_wrapper_subclass(parameter)
        and parameter.is_contiguous()
        and compiled() is not None
    )


def split_adamw(
    parameter: BFloat16[Tensor, "*shape"],
    lower: Int16[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    exp_avg: Float32[Tensor, "*shape"],
    exp_avg_sq: Float32[Tensor, "*shape"],
    *,
    step: int,
    factor: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Step t of AdamW (Loshchilov & Hutter, 1711.05101) in place, on float32 weights w whose upper
    half is the parameter, with the roundings of `torch.optim.AdamW(fused=True)` on x86:

        g = factor · grad
        m = m + (1 − β₁) · (g − m),  v = β₂ · v + (1 − β₂) · g²
        w = w · (1 − lr · decay) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

    It moves 26 bytes per weight with a gradient in bfloat16, and 28 with one in float32.

    Args:
        parameter, lower: the halves of w, as in `SplitMaster`.
        grad: in bfloat16 or float32.
        exp_avg, exp_avg_sq: m and v.
        factor: of the gradient, from clipping.
    """
    grad, halves, moments = grad.contiguous(), (parameter, lower), (exp_avg, exp_avg_sq)
    require(
        [x.dtype for x in halves] == [torch.bfloat16, torch.int16]
        and {x.dtype for x in moments} == {torch.float32},
        "the halves must be bfloat16 and int16, the moments float32",
    )
    for each in (*halves, grad, *moments):
        require(each.shape == parameter.shape, "weights, gradient and moments must have one shape")
        require(each.device.type == "cpu" and each.is_contiguous(), "tensors must be contiguous")
    beta1, beta2 = betas
    call = structures.AdamW(
        grad.data_ptr(), parameter.data_ptr(), lower.data_ptr(), exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(), parameter.numel(), torch.get_num_threads(),
        factor, 1 - lr * weight_decay, beta2, 1 - beta1, 1 - beta2,
        lr / (1 - beta1**step), math.sqrt(1 - beta2**step), eps,
    )  # fmt: skip
    typed("adamw", grad)(ctypes.byref(call))
    for each in (*halves, *moments):
        torch.autograd.graph.increment_version(each)


def can_sum_squares(x: Tensor) -> bool:
    """Whether `norm` takes a tensor, as `can_step`."""
    return can_step(x)


def norm(x: BFloat16[Tensor, "*shape"]) -> Float32[Tensor, ""]:
    """√Σ x², the same with any number of threads. PyTorch makes a float32 copy, and its float32
    sums of 10⁸ squares are 1 % too small."""
    sums = x.new_empty(-(-x.numel() // BLOCK), dtype=torch.float64)
    library().square_sums(x.data_ptr(), x.numel(), BLOCK, sums.data_ptr(), torch.get_num_threads())
    return sums.sum().sqrt().float()
