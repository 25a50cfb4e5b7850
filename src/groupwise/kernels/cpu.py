"""Operations of rollouts and updates on a CPU, in C++ (`cpp/`): in float32, and most of them in
bfloat16 with sums in float32.

A decoding step of a small model is hundreds of operations of a few microseconds each. A PyTorch
operation takes ten microseconds to start, and reads and writes whole tensors. Here products also
compute the activation or the sum that follows them, and tokens are drawn without writing their
probabilities.

GFLOP/s of products on two cores of an AMD EPYC; rows x inputs → outputs:

    rows x weight          MKL   oneDNN   here
    64 x 128 → 512          51      110    180
    64 x 512 → 1536        138      200    213
    1024 x 512 → 1536      162      189    190
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from groupwise.kernels import onednn, structures
from groupwise.kernels.build import compiled, library, takes
from groupwise.kernels.structures import require

LANES = 16
"""Attention kernels need a head dimension that is a multiple of this number."""
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The suffix of the kernels for each dtype."""
LARGE = 2**18
"""Numbers of a matrix that MKL multiplies faster on Intel's processors."""
DEEP = 128
"""Rows of activations from which on tiles compute products faster than oneDNN."""
PANEL = 32
"""Columns of a product that are computed at once."""


def typed(name: str, *tensors: Tensor) -> Any:
    """The kernel for the dtype of the tensors."""
    types = {x.dtype for x in tensors}
    require(len(types) == 1 and types <= TYPES.keys(), "dtypes must be the kernel's")
    return getattr(library(), f"{name}_{TYPES[tensors[0].dtype]}")


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products with packed weights are computed in a dtype."""
    return compiled() is not None and dtype in TYPES


def pack(x: Float[Tensor, "columns *rest"], panels: Float[Tensor, "panels *rest size"]) -> None:
    """Fill panels of `size` columns each, without another copy on the way."""
    size = panels.shape[-1]
    whole, left = divmod(len(x), size)
    panels[:whole] = x[: whole * size].unflatten(0, (whole, size)).movedim(1, -1)
    if left:
        panels[whole, ..., :left] = x[-left:].movedim(0, -1)


def can_use_cpu(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: float32 on a CPU."""
    return (
        all(takes(x) and x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
        and compiled() is not None
    )


@cache
def of_intel() -> bool:
    """Whether the processor is Intel's, for which MKL is written."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def can_multiply(*tensors: Tensor) -> bool:
    """Whether `matmul` computes the products of these factors on a CPU."""
    dtypes = {x.dtype for x in tensors}
    return (
        all(takes(x) and x.device.type == "cpu" for x in tensors)
        and len(dtypes) == 1
        and multiplies_in_updates(*dtypes, size=tensors[-1].numel())
    )


def multiplies_in_updates(dtype: torch.dtype, *, size: int) -> bool:
    """Whether `matmul` computes products with a factor of this size on a CPU: those of float32,
    unless it is large and the processor Intel's, where MKL takes a fifth less time for an update;
    and those of bfloat16 where oneDNN has none: PyTorch's own take seven times as long as float32
    there. Nothing is measured for the choice, so that a run computes the same when it is resumed.
    """
    if compiled() is None:
        return False
    if dtype == torch.float32:
        return size < LARGE or not of_intel()
    return dtype == torch.bfloat16 and dtype not in onednn.dtypes()


def multiplies_tiles() -> bool:
    """Whether products of bfloat16 are computed in the tiles of AMX."""
    kernels = compiled()
    return kernels is not None and bool(kernels.multiplies_tiles())


def can_multiply_in_tiles(left: Tensor, right: Tensor) -> bool:
    """Whether `matmul` is faster than oneDNN in bfloat16 with AMX, for large weights and many rows.

    It is for dyᵀ · x, the gradient of a weight, whose left factor is a transposed matrix, and on
    several threads for other products: oneDNN is no faster on two threads than on one for some
    sizes.
    """
    for x in (left, right):
        if not takes(x) or x.device.type != "cpu" or x.dtype != torch.bfloat16:
            return False
        if 1 not in x.stride():
            return False
    of_weight = left.stride(0) == right.stride(1) == 1 and left.stride(1) != 1
    rows = len(right) if of_weight else len(left)
    size = len(left) * right.shape[1] if of_weight else right.numel()
    return (
        rows >= DEEP
        and size >= onednn.SMALLEST
        and multiplies_tiles()
        and (of_weight or torch.get_num_threads() > 1)
    )


def matmul(
    left: Float[Tensor, "rows depth"],
    right: Float[Tensor, "depth columns"],
    *,
    onto: Float[Tensor, "rows columns"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """left · right, of any strides, with sums in float32; added to `onto` in place where that is
    given, in float32 or the dtype of the factors. Records no gradient."""
    out = left.new_empty(len(left), right.shape[1]) if onto is None else onto
    require(left.shape[1] == len(right), "factors must have the same depth")
    require(out.shape == (len(left), right.shape[1]), "`onto` must have the size of the product")
    require(out.is_contiguous(), "`onto` must be contiguous")
    require(out.dtype in (left.dtype, torch.float32), "`onto` must be float32 or like the factors")
    call = structures.Product(
        left.data_ptr(), right.data_ptr(), out.data_ptr(), len(left), right.shape[1], len(right),
        *left.stride(), *right.stride(), onto is not None, torch.get_num_threads(),
    )  # fmt: skip
    product = typed("product", left, right)
    if out.dtype != left.dtype:
        product = library().product_bfloat16_to_float32
    if product(ctypes.byref(call)):
        raise MemoryError(f"product of {list(left.shape)} and {list(right.shape)}: out of memory")
    return out


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """x · weight / √(mean(x²) + ε) over the last dimension, in one dtype. Records no gradient."""
    size = len(weight)
    require(x.shape[-1] == size, "rows must have the size of the weight")
    require(weight.is_contiguous(), "the weight must be contiguous")
    x = x.contiguous()
    out = torch.empty_like(x)
    typed("rms_norm", x, weight)(
        x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rms_norm_backward(
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, "size"],
    eps: float,
    grad: Float[Tensor, "*rows size"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "size"]]:
    """The gradients of x and weight from that of `rms_norm`."""
    x, grad, threads, size = x.contiguous(), grad.contiguous(), torch.get_num_threads(), len(weight)
    require(
        x.shape == grad.shape and x.shape[-1] == size, "gradients must have the sizes of the inputs"
    )
    require(weight.is_contiguous(), "the weight must be contiguous")
    dx, d_weight = torch.empty_like(x), x.new_zeros(threads, size, dtype=torch.float32)
    typed("rms_norm_backward", x, weight, grad)(
        x.data_ptr(), weight.data_ptr(), grad.data_ptr(), x.numel() // size, size, eps,
        dx.data_ptr(), d_weight.data_ptr(), threads,
    )  # fmt: skip
    return dx, d_weight.sum(0).to(weight.dtype)


def swiglu(
    gate: Float[Tensor, "*rows size"], up: Float[Tensor, "*rows size"]
) -> Float[Tensor, "*rows size"]:
    """silu(gate) ∘ up, for a multiple of 16 numbers of one dtype. Records no gradient."""
    require(
        gate.shape == up.shape and gate.numel() % LANES == 0,
        "gate and up must have the same size, a multiple of 16",
    )
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    typed("swiglu", gate, up)(
        gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr(), torch.get_num_threads()
    )
    return out


def swiglu_backward(
    gate: Float[Tensor, "*rows size"],
    up: Float[Tensor, "*rows size"],
    grad: Float[Tensor, "*rows size"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows size"]]:
    """The gradients of gate and up from that of `swiglu`."""
    require(gate.shape == up.shape == grad.shape, "gradients must have the sizes of the inputs")
    require(gate.numel() % LANES == 0, "gate and up must have the same size, a multiple of 16")
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    typed("swiglu_backward", gate, up, grad)(
        gate.data_ptr(), up.data_ptr(), grad.data_ptr(), gate.numel(),
        d_gate.data_ptr(), d_up.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return d_gate, d_up


def draw_tokens(
    logits: Float32[Tensor, "rows vocab"], uniform: Float[Tensor, "rows"], *, temperature: float
) -> tuple[Int64[Tensor, "rows"], Float32[Tensor, "rows"]]:
    """Inverse-CDF sampling from softmax(logits / temperature): per row the first token whose
    cumulative probability exceeds the row's uniform number, and its log-probability."""
    require(uniform.shape == logits.shape[:1], "there must be one uniform number per row")
    require(logits.shape[1] > 0, "there is no token to draw")
    require(logits.dtype == torch.float32, "tensors must be float32")
    require(uniform.device == logits.device, "uniform numbers must be on the device of the logits")
    require(0 < temperature < torch.inf, "the temperature must be positive and finite")
    logits, uniform = logits.contiguous(), uniform.double().contiguous()
    logp = logits.new_empty(len(logits))
    tokens = logits.new_empty(len(logits), dtype=torch.long)
    if library().draw_tokens(
        logits.data_ptr(), *logits.shape, 1 / temperature, uniform.data_ptr(), tokens.data_ptr(),
        logp.data_ptr(), torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError(f"tokens of {list(logits.shape)} logits: out of memory")
    return tokens, logp


def can_use_low_rank(rows: Sequence[Tensor], factors: Sequence[Tensor]) -> bool:
    """Whether the products of an adapter are computed by kernels: rows of one dtype, and float32
    factors."""
    return (
        len({x.dtype for x in rows}) == 1
        and rows[0].dtype in TYPES
        and all(takes(x) and x.device.type == "cpu" for x in rows)
        and can_use_cpu(*factors)
    )


def low_rank(
    x: Float[Tensor, "rows inputs"],
    a: Float32[Tensor, "rank inputs"],
    b: Float32[Tensor, "outputs rank"],
    *,
    onto: Float[Tensor, "rows outputs"] | None,
    scaling: float,
) -> tuple[Float[Tensor, "rows outputs"], Float32[Tensor, "rows rank"]]:
    """onto + (x · aᵀ) · (scaling · b)ᵀ, with float32 sums, and x · aᵀ. Records no gradient."""
    require(x.shape[1] == a.shape[1] and b.shape[1] == len(a), "factors must fit each other")
    require(onto is None or onto.shape == (len(x), len(b)), "`onto` must fit the product")
    (packed_a, packed_b), x = _packed_factors(a, b), x.contiguous()
    packed_b *= scaling
    onto = None if onto is None else onto.contiguous()
    out, inner = x.new_empty(len(x), len(b)), a.new_empty(len(x), len(a))
    call = structures.LowRank(
        x.data_ptr(), packed_a.data_ptr(), packed_b.data_ptr(),
        None if onto is None else onto.data_ptr(), out.data_ptr(), inner.data_ptr(),
        *x.shape, len(a), len(b), torch.get_num_threads(),
    )  # fmt: skip
    typed("low_rank", *([x] if onto is None else [x, onto]))(ctypes.byref(call))
    return out, inner


def low_rank_gradient(
    inner: Float32[Tensor, "rows rank"], x: Float[Tensor, "rows columns"], *, scaling: float
) -> Float32[Tensor, "rank columns"]:
    """scaling · innerᵀ · x, with float32 sums. Records no gradient."""
    require(len(inner) == len(x), "factors must have the same rows")
    inner, x = inner.contiguous(), x.contiguous()
    out = inner.new_empty(inner.shape[1], x.shape[1])
    call = structures.LowRankGradient(
        inner.data_ptr(), x.data_ptr(), out.data_ptr(), len(x), *out.shape,
        torch.get_num_threads(), scaling,
    )  # fmt: skip
    typed("low_rank_gradient", x)(ctypes.byref(call))
    return out


def _packed_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors as panels of 32 columns."""
    packed = [x.new_zeros(-(-len(x) // PANEL), x.shape[1], PANEL) for x in (a, b)]
    for each, panels in zip((a, b), packed, strict=True):
        pack(each.detach(), panels)
    return packed[0], packed[1]


def can_use_attention(query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None) -> bool:
    """Whether `decode_attention` and `tree_attention` take these heads."""
    return (
        softcap is None
        and query.dtype in TYPES
        and query.shape[-1] % LANES == 0
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and all(
            takes(x) and x.device.type == "cpu" and x.dtype == query.dtype and x.stride(-1) == 1
            for x in (query, key, value)
        )
        and compiled() is not None
    )
