"""Layers of an update on a CPU, forward and backward by kernels of our own.

    products      y = x Wᵀ + b,    dx = dy W,    dW = dyᵀ x,    db = Σ dy
    norms         x · w / √(mean(x²) + ε)
    feed-forward  down(silu(gate(x)) · up(x))

Norms and activations, which `transformers` writes as ten operations and their gradients, are one
each, and keep nothing for the backward pass but what they were given; in bfloat16 too. The rest is
for float32, whose products PyTorch leaves to MKL: on an AMD EPYC these are 3 to 15 % faster. Unlike
oneDNN's, they compile nothing for a number of rows, of which no two microbatches have the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from groupwise.models.kernels import (
    LANES,
    TYPES,
    compiled,
    computes,
    multiply,
    rms_norm,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
)
from groupwise.models.products import SMALLEST, plain, product

PIECE = 2**21
"""Entries of a 16-bit product that are added at once."""

Forward = Callable[[Tensor], Tensor]


def times(
    left: Float[Tensor, "rows depth"], right: Float[Tensor, "depth columns"]
) -> Float[Tensor, "rows columns"]:
    """left · right. Records no gradient."""
    return multiply(left, right) if computes(left, right) else product(left, right.t())


def add_product(
    total: Float[Tensor, "rows columns"] | None,
    left: Float[Tensor, "rows depth"],
    right: Float[Tensor, "depth columns"],
) -> Float[Tensor, "rows columns"]:
    """total + left · right, in place, and in float32 at least. Records no gradient.

    Products of 16 bits are added in pieces, because PyTorch makes a float32 copy of each.
    """
    if computes(left, right):
        return multiply(left, right, onto=total)
    if total is not None and left.dtype == total.dtype:
        return total.addmm_(left, right)
    more, piece = left @ right, max(1, PIECE // right.shape[1])
    if total is None:
        return more.to(torch.promote_types(left.dtype, torch.float32))
    for part, addend in zip(total.split(piece), more.split(piece), strict=True):
        part += addend
    return total


class own_layers:
    """Inside the block, which may be entered again and again, layers of a model on a CPU compute by
    kernels of our own, and after it as before: in bfloat16 norms and feed-forwards, in float32 also
    linear layers and embeddings.

    Linear layers and embeddings are known by their type. Norms and feed-forwards are tried when
    this is made, and computed here only where they have no other parts and that gives what they
    give themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [] if compiled() is None else list(model.modules())
        training = [module.training for module in modules]
        model.eval()  # An adapter's dropout would make of every trial another one.
        self._forwards = {module: forward for module in modules if (forward := _own(module))}
        for module, was in zip(modules, training, strict=True):
            module.training = was

    def __enter__(self) -> None:
        # What another block computes already stays as it is.
        self._inside = [module for module in self._forwards if "forward" not in vars(module)]
        for module in self._inside:
            module.forward = self._forwards[module]

    def __exit__(self, *error: object) -> None:
        for module in self._inside:
            vars(module).pop("forward", None)


def _own(module: Any) -> Forward | None:
    """How a module computes here, or None where it is left alone."""
    types = {p.dtype for p in module.parameters()}
    if len(types) != 1 or not types <= set(TYPES) or _device(module) != "cpu":
        return None
    if types == {torch.float32} and type(module) is nn.Embedding:
        return _embedding(module) if _looks_up(module) else None
    if types == {torch.float32} and plain(module):
        return _linear(module) if module.weight.numel() >= SMALLEST else None
    children = {name for name, _ in module.named_children()}
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if (children, parameters) == (set(), {"weight"}) and hasattr(module, "variance_epsilon"):
        return _tried(_norm, module, len(module.weight))
    if (children, parameters) == ({"gate_proj", "up_proj", "down_proj", "act_fn"}, set()):
        fits = module.gate_proj.out_features % LANES == 0
        return _tried(_feed_forward, module, module.gate_proj.in_features) if fits else None
    return None


def _device(module: nn.Module) -> str:
    return " ".join({p.device.type for p in module.parameters()})


@torch.no_grad()
def _tried(make: Callable[[Any], Forward], module: nn.Module, size: int) -> Forward | None:
    """The forward pass, if it computes what the module does: in float32, where rounding hides
    nothing."""
    some = module if _is_float32(module) else copy.deepcopy(module).float()
    x = torch.linspace(-3, 3, 4 * size).view(1, 4, size).square() - 1.5
    wanted = some(x)
    return make(module) if (make(some)(x) - wanted).norm() <= 1e-5 * wanted.norm() else None


def _is_float32(module: nn.Module) -> bool:
    return all(p.dtype == torch.float32 for p in module.parameters())


def _linear(layer: nn.Linear) -> Forward:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        apply: Any = _Linear.apply
        return apply(rows, layer.weight, layer.bias).unflatten(0, x.shape[:-1])

    return forward


def _looks_up(module: nn.Embedding) -> bool:
    """Whether an embedding has none of its options."""
    return (
        module.padding_idx is None
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def _embedding(module: nn.Embedding) -> Forward:
    apply: Any = _Embedding.apply
    return lambda tokens: apply(tokens, module.weight)


def _norm(module: Any) -> Forward:
    apply: Any = _Norm.apply
    return lambda x: apply(x, module.weight, module.variance_epsilon)


def _feed_forward(module: Any) -> Forward:
    apply: Any = _SwiGLU.apply
    return lambda x: module.down_proj(apply(module.gate_proj(x), module.up_proj(x)))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = multiply(x, weight.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        want_x, want_weight, want_bias = ctx.needs_input_grad
        return (
            multiply(grad, weight) if want_x else None,
            _gradient(weight, grad, x) if want_weight else None,
            grad.sum(0) if want_bias else None,
        )


def _gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """gradᵀ · x, added to the gradient that a weight has already, or handed to autograd."""
    if weight.grad is None:
        return multiply(grad.t(), x)
    multiply(grad.t(), x, onto=weight.grad)
    return None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        total = torch.zeros_like(weight) if weight.grad is None else weight.grad
        total.index_add_(0, tokens.flatten(), grads[0].flatten(0, -2))
        return None, total if weight.grad is None else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, d_weight = rms_norm_backward(x, weight, ctx.eps, grads[0])
        return dx, d_weight if ctx.needs_input_grad[1] else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return swiglu_backward(gate, up, grads[0])
