"""Layers of an update, forward and backward by kernels: in C++ on a CPU, in Triton on a GPU.

    products      y = x Wᵀ + b,    dx = dy W,    dW = dyᵀ x,    db = Σ dy
    norms         x · w / √(mean(x²) + ε)
    feed-forward  down(silu(gate(x)) · up(x))

Norms and activations, which `transformers` writes as ten operations and their gradients, are one
each, and save nothing for the backward pass but their inputs; in bfloat16 too, and where adapters
or 4-bit weights compute the products. silu(gate(x)) · up(x), which the product after it would save,
is computed again in the backward pass: a quarter of the activations.

The rest is for CPUs. Products are for float32, which PyTorch leaves to MKL: on an AMD EPYC these
are 3 to 15 % faster. Unlike oneDNN, they compile nothing per number of rows, which differs from
microbatch to microbatch. They are for bfloat16 too on processors without AVX-512, where PyTorch has
no fast ones, and on those with AMX. There, oneDNN takes 1.5 to 1.9 times as long for dW, and on two
threads up to 1.9 times as long for y and dx, depending on their sizes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from groupwise.kernels import cpu, gpu
from groupwise.kernels.build import compiled
from groupwise.kernels.cpu import (
    LANES,
    can_multiply,
    can_multiply_in_tiles,
    matmul,
    multiplies_in_updates,
    multiplies_tiles,
)
from groupwise.kernels.four_bits import has_training_layout, is_four_bit_linear
from groupwise.kernels.onednn import SMALLEST
from groupwise.kernels.reference import accumulable_grad, is_plain_linear

Forward = Callable[[Any, Tensor], Tensor]
KINDS = frozenset({"training_linear", "embedding", "norm", "feed_forward"})
"""Modules that have kernels."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TRIED = 4 * LANES
"""Size of the weights on which a kernel is tried."""


class use_kernels:
    """Re-entrant context manager that routes supported modules to the kernels: norms and
    feed-forwards; on a CPU, in float32 embeddings too, and linear layers in float32, or in bfloat16
    where PyTorch has no fast products of it, or none for the gradients of weights. Gradients are
    for `backward()`: they are added to those that weights have already, and `torch.autograd.grad`
    does not return them. Neither second derivatives nor `torch.func` are supported.

    Linear layers and embeddings are recognised by their type. Norms and feed-forwards are tried
    when this is made, and routed only where they have no other parts and the kernel reproduces
    their output.

    Args:
        kinds: which modules.
        devices: types of the devices that they may be on.
    """

    def __init__(
        self, model: nn.Module, *, kinds: Set[str] = KINDS, devices: Collection[str] = ("cpu",)
    ) -> None:
        if compiled() is None:
            devices = {*devices} - {"cpu"}
        found = {module: _own(module, kinds, devices) for module in model.modules()}
        self._found = {module: (_numbers(module), own) for module, own in found.items() if own}
        self._inside: list[list[nn.Module]] = []

    def __enter__(self) -> None:
        # Modules that are routed already stay so; those whose dtype has changed are left alone.
        inside = [
            module
            for module, (numbers, _) in self._found.items()
            if "forward" not in vars(module) and _numbers(module) == numbers
        ]
        for module in inside:
            # Bound, so that a copy of the module computes with its own weights.
            module.forward = MethodType(self._found[module][1], module)
        self._inside.append(inside)

    def __exit__(self, *error: object) -> None:
        for module in self._inside.pop():
            vars(module).pop("forward", None)


def _own(module: Any, kinds: Set[str], devices: Collection[str]) -> Forward | None:
    """The forward of a module by kernels, or None where it is left alone."""
    numbers = _numbers(module)
    on, types = {device for _, device in numbers}, {dtype for dtype, _ in numbers}
    if len(on) != 1 or not on <= {*devices}:
        return None
    usable = _kernels(*on).TYPES
    if not all(dtype in usable or not dtype.is_floating_point for dtype in types):
        return None
    if on == {"cuda"} and not all(
        gpu.can_use_device(p.device, p.dtype) for p in module.parameters() if p.is_floating_point()
    ):
        return None
    if on == {"cpu"} and type(module) is nn.Embedding:
        return _embedding if "embedding" in kinds and _looks_up(module) else None
    if "training_linear" in kinds and (forward := _linear_forward(module)) is not None:
        return forward
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and one input
        return None
    children = {name for name, _ in module.named_children()}
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if (
        len(types) == 1
        and types <= {*usable}
        and (children, parameters) == (set(), {"weight"})
        and hasattr(module, "variance_epsilon")
    ):
        return _norm if "norm" in kinds and _agrees(_norm, module) else None
    if (children, parameters) == ({*PROJECTIONS, "act_fn"}, set()):
        return _feed_forward if "feed_forward" in kinds and _agrees(_feed_forward, module) else None
    return None


def _linear_forward(layer: nn.Module) -> Forward | None:
    """As `_own`, of a linear layer on a CPU."""
    if is_four_bit_linear(layer):
        size, dtype = layer.in_features * layer.out_features, _dtype_of_product(layer)
        return (
            _four_bit_linear
            if size >= SMALLEST and multiplies_in_updates(dtype, size=size)
            else None
        )
    if not is_plain_linear(layer, "cpu") or layer.weight.numel() < SMALLEST:
        return None
    if can_multiply(*reversed(tuple(layer.parameters()))):
        return _linear
    narrow = _numbers(layer) == {(torch.bfloat16, "cpu")}
    return _linear_in_tiles if narrow and multiplies_tiles() else None


def _kernels(device: str) -> Any:
    """The module of the kernels for a type of device."""
    return gpu if device == "cuda" else cpu


def _numbers(module: nn.Module) -> set[tuple[torch.dtype, str]]:
    """Dtypes and devices of a module's parameters."""
    return {(p.dtype, p.device.type) for p in module.parameters()}


def _looks_up(module: nn.Embedding) -> bool:
    """Whether an embedding uses none of its options, but that a token may have no gradient."""
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


@torch.no_grad()
def _agrees(own: Forward, module: Any) -> bool:
    """Whether the kernel reproduces a norm or feed-forward, tried with small float32 weights in
    place of the module's: these may be in 16 bits, whose rounding hides much, in 4, or fake."""
    device = next(module.parameters()).device
    with _disable_current_modes():  # of fake tensors
        try:
            # In float32 whatever the program's default: the kernel is not tried in another type.
            float32: Any = {"dtype": torch.float32, "device": device}
            some, grid = copy.copy(module), torch.linspace(-20, 20, 161, **float32)
            if own is _norm:
                some._parameters = {"weight": nn.Parameter(_wave(TRIED).to(device))}
            else:
                # Tried alone as well: a product with small weights might hide it.
                if not torch.allclose(some.act_fn(grid), F.silu(grid), atol=1e-6):
                    return False
                if some.gate_proj.out_features % LANES:
                    return False
                small = {n: _small_linear(of).to(device) for of, n in enumerate(PROJECTIONS, 1)}
                some._modules = {**module._modules, **small}
            x = torch.linspace(-3, 3, 4 * TRIED, **float32).view(1, 4, TRIED).square() - 1.5
            wanted = some(x)
            return 0 < wanted.norm() and bool(
                (own(some, x) - wanted).norm() <= 1e-5 * wanted.norm()
            )
        except Exception:  # a kernel that does not compile raises errors of its own
            return False


def _small_linear(of: int) -> nn.Linear:
    """A projection of the trial, another one for every number."""
    layer = nn.Linear(TRIED, TRIED, bias=False, device="meta", dtype=torch.float32)
    layer = layer.to_empty(device="cpu")
    layer.weight.copy_(_wave(TRIED * TRIED, of=of).view(TRIED, TRIED))
    return layer


def _wave(size: int, *, of: int = 1) -> Tensor:
    """Numbers between -1 and 1, irregular like those of a model."""
    places = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")
    return (places.square() * of).sin().float()


def _linear(layer: Any, input: Tensor) -> Tensor:
    if input.dtype != layer.weight.dtype:
        return type(layer).forward(layer, input)
    rows = input.reshape(-1, input.shape[-1])
    apply: Any = _Linear.apply
    return apply(rows, layer.weight, layer.bias).view(*input.shape[:-1], len(layer.weight))


def _linear_in_tiles(layer: Any, input: Tensor) -> Tensor:
    if input.dtype != layer.weight.dtype:
        return type(layer).forward(layer, input)
    apply: Any = _TiledLinear.apply
    return apply(input, layer.weight, layer.bias)


def _four_bit_linear(layer: Any, x: Tensor) -> Tensor:
    # A rollout may have laid the weight out anew since the layer was recognised.
    if x.dtype != _dtype_of_product(layer) or not has_training_layout(layer):
        return type(layer).forward(layer, x)
    apply: Any = _FourBitLinear.apply
    rows, bias = x.reshape(-1, x.shape[-1]), layer.bias
    bias = None if bias is None else bias.to(x.dtype)
    out = apply(rows, bias, layer.weight.detach(), layer.weight.quant_state)
    return out.view(*x.shape[:-1], layer.out_features)


def _dtype_of_product(layer: Any) -> torch.dtype:
    """That in which a layer with a weight in 4 bits multiplies."""
    return layer.compute_dtype or layer.weight.quant_state.dtype


def _embedding(module: Any, input: Tensor) -> Tensor:
    apply: Any = _Embedding.apply
    padding = module.padding_idx
    return apply(input, module.weight, -1 if padding is None else padding)


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != module.weight.dtype:
        return type(module).forward(module, hidden_states)
    apply: Any = _Norm.apply
    return apply(hidden_states, module.weight, module.variance_epsilon)


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    kernels = _kernels(gate.device.type)
    if gate.dtype not in kernels.TYPES or gate.dtype != up.dtype:
        return module.down_proj(module.act_fn(gate) * up)
    apply: Any = _SwiGLU.apply
    inner = apply(gate, up)
    with _computed_again(inner, lambda: kernels.swiglu(gate, up)):
        return module.down_proj(inner)


@contextmanager
def _computed_again(value: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, what autograd would save of a value is computed again in the backward pass.

    Under gradient checkpointing nothing is saved anyway, and what it computes again can be read a
    single time. A value that was changed in place is saved, because it would come out unchanged.
    """
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not torch.is_grad_enabled() or autograd._top_saved_tensors_default_hooks(True) is not None:
        yield
        return
    # Hooks must not hold the value.
    storage, size, version = value.untyped_storage()._cdata, value.numel(), value._version

    def pack(saved: Tensor) -> Tensor | torch.Size:
        same = saved.untyped_storage()._cdata == storage and saved._version == version
        whole = saved.is_contiguous() and saved.numel() == size
        return saved.shape if same and whole else saved

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return compute().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = weight  # Hooks of saved tensors would get it without its gradient.
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (x,), weight = grads, ctx.saved_tensors, ctx.weight
        want_x, want_weight, want_bias = ctx.needs_input_grad
        return (
            matmul(grad, weight) if want_x else None,
            _gradient(weight, grad, x) if want_weight else None,
            grad.sum(0) if want_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, rounded once."""
    if bias is not None and bias.dtype == torch.bfloat16:
        total = bias.float().repeat(len(x), 1)
        return matmul(x, weight.t(), onto=total).to(torch.bfloat16)
    out = matmul(x, weight.t())
    return out if bias is None else out.add_(bias)


def _gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """gradᵀ · x, added to the gradient that a weight has already, or else for autograd."""
    total = accumulable_grad(weight)
    more = matmul(grad.t(), x, onto=total)
    return more if total is None else None


class _TiledLinear(torch.autograd.Function):
    """A linear layer whose products are computed in tiles where this is faster than PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = weight  # As `_Linear` keeps it.
        rows = x.reshape(-1, x.shape[-1])
        if bias is None and can_multiply_in_tiles(rows, weight.t()):
            return matmul(rows, weight.t()).view(*x.shape[:-1], len(weight))
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (x,), weight = grads, ctx.saved_tensors, ctx.weight
        want_x, want_weight, want_bias = ctx.needs_input_grad
        rows, dx, d_weight = grad.reshape(-1, grad.shape[-1]), None, None
        if want_x:
            compute = matmul if can_multiply_in_tiles(rows, weight) else torch.mm
            dx = compute(rows, weight).view(*grad.shape[:-1], weight.shape[1])
        if want_weight:
            x = x.reshape(-1, x.shape[-1])
            if not can_multiply_in_tiles(rows.t(), x):
                d_weight = rows.t() @ x
            elif weight.grad is None:
                d_weight = _gradient(weight, rows, x)
            else:  # autograd adds it, for hooks
                d_weight = matmul(rows.t(), x)
        return dx, d_weight, rows.sum(0) if want_bias else None


class _FourBitLinear(torch.autograd.Function):
    """A linear layer with a frozen weight in 4 bits, which is made whole for every product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, state: Any) -> Tensor:
        ctx.weight, ctx.state = weight, state
        return _product(x, _whole(weight, state, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (want_x, want_bias, *_) = grads, ctx.needs_input_grad
        return (
            matmul(grad, _whole(ctx.weight, ctx.state, grad.dtype)) if want_x else None,
            grad.sum(0) if want_bias else None,
            None,
            None,
        )


def _whole(weight: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit  # slow to import

    return dequantize_4bit(weight, state).to(dtype).as_subclass(Tensor)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (tokens,), padding = grads, ctx.saved_tensors, ctx.padding
        size, total = len(ctx.weight), accumulable_grad(ctx.weight)
        if total is None or total.dtype != torch.float32:
            new = torch.ops.aten.embedding_dense_backward(grad, tokens, size, padding, False)
            return None, new, None
        grad = grad.float().masked_fill((tokens == padding)[..., None], 0.0)
        total.index_add_(0, tokens.flatten(), grad.reshape(-1, grad.shape[-1]))
        return None, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _kernels(x.device.type).rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        kernels = _kernels(x.device.type)
        dx, d_weight = kernels.rms_norm_backward(x, weight, ctx.eps, grads[0])
        return dx, d_weight if ctx.needs_input_grad[1] else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _kernels(gate.device.type).swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return _kernels(gate.device.type).swiglu_backward(gate, up, grads[0])
