"""Decoding steps, norms, feed-forwards and log-probabilities on a GPU: kernels in Triton
(`triton_kernels.py`), for float32 and 16 bits.

PyTorch installs Triton with its wheels for GPUs. Where it is missing or fails, PyTorch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from groupwise.errors import warn
from groupwise.kernels.build import real_tensors, takes, takes_fake_tensors
from groupwise.kernels.interface import DecodeRows, GroupCache, LayerCache, Norm
from groupwise.kernels.reference import Reference

TYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS, KEY_BYTES = 64, 2**14
"""Keys that attention takes at once, and their bytes, at most: several fit into shared memory."""
LONGEST = 2**31 - 1
"""The window of attention that has none."""
PARTS = 512
"""Sums of which the gradient of a norm's weight is added up."""
ENTRIES = 1024
"""Numbers that an elementwise kernel takes at once."""
VOCABULARY = 4096
"""Logits of a row that a draw takes at once."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative error, in norm, that a trial accepts for a dtype."""


class Nothing:
    """Replaces the kernels inside `shapes_only`."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


def _kernels() -> Any:
    """The kernels, each to be called with its grid."""
    if takes_fake_tensors():
        return Nothing()
    from groupwise.kernels import triton_kernels

    return triton_kernels


def can_use_gpu(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: plain ones of one dtype on a GPU, on which a trial
    gave the results of the reference."""
    first = tensors[0]
    return all(
        takes(x) and x.device == first.device and x.dtype == first.dtype for x in tensors
    ) and can_use_device(first.device, first.dtype)


def can_use_device(device: torch.device, kind: torch.dtype) -> bool:
    """Whether the kernels work on a device in a dtype. It must be the current one, on which Triton
    launches."""
    if device.type != "cuda" or kind not in TYPES or device.index != torch.cuda.current_device():
        return False
    return _works(device, kind)


@cache
def _works(device: torch.device, kind: torch.dtype) -> bool:
    """Whether Triton is there and its kernels give the results of the reference for a dtype; warns
    once where not."""
    with real_tensors(), torch.inference_mode():
        found = fault(lambda: torch.tensor([*_gaps(device, kind)]).max().item(), kind)
    if found is not None:
        warn_unused(device, found)
    return found is None


def fault(trial: Callable[[], float], kind: torch.dtype) -> str | None:
    """What is wrong with kernels that a trial uses: their relative error, NaN included, or what
    they raise; None where nothing is."""
    try:
        worst = trial()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no compiler, or too little shared memory
        return reason(error)
    return None if worst <= TOLERANCE[kind] else f"results are off by {worst:.1g}"


def reason(error: Exception) -> str:
    """Type and first line of what a kernel raised."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def warn_unused(device: torch.device, why: str) -> None:
    """Warn that the kernels are not used, and why."""
    warn(f"Triton's kernels are not used on {device} ({why}); steps take more time and memory.")


def _gaps(device: torch.device, kind: torch.dtype) -> Iterator[float]:
    """Relative errors of all kernels."""
    random = torch.Generator("cpu").manual_seed(0)

    def some(*shape: int) -> Tensor:
        # A plan of memory makes the GPU the default device.
        return torch.randn(shape, generator=random, device="cpu").to(device, kind)

    group = GroupCache(slots=2, group=2, prompt_capacity=70, suffix_capacity=40, device=device)
    group.prompt_length += torch.tensor([70, 9], device=device)
    slot, sample, time = torch.tensor([[0, 0, 1], [0, 1, 1], [39, 7, 0]], device=device)
    rows = DecodeRows(
        cache=group, slot=slot, sample=sample, time=time, used=2, rows=2 * slot + sample, clock=0,
        prompt=70, suffix=40, aligned=False, in_step=False,
    )  # fmt: skip
    layer = group.layer(0, some(1, 2, 64))
    for tensor in layer.tensors():
        tensor.copy_(some(*tensor.shape))
    given, how = (some(3, 6, 64), some(3, 2, 64), some(3, 2, 64)), {"scaling": 0.2, "window": 50}
    # In float64, because products of float32 may be those of TF32.
    wide = replace(layer, **{name: x.double() for name, x in vars(layer).items()})
    of_wide = [x.double() for x in given]
    wanted = Reference().decode_attention(rows, wide, *of_wide, softcap=None, **how)
    yield _gap(decode_attention(rows, layer, *given, softcap=None, **how), wanted)
    logits, uniform = some(3, 5000), torch.tensor([0.0, 0.3, 0.999], device=device).double()
    tokens, logp = draw(logits, uniform, temperature=0.8)
    exact = (logits.double() / 0.8).log_softmax(-1)
    below, reached = exact.exp().cumsum(-1), tokens[:, None]
    edge = (below.gather(1, reached)[:, 0] - uniform).clamp(max=0).abs().max().item()
    yield edge + _gap(logp, exact.gather(1, reached)[:, 0])
    yield from _log_softmax_gaps(logits)
    x, added, weight = some(5, 96), some(5, 96), some(96)
    total, normed = add_norm(x, added, Norm(weight=weight, eps=1e-6))
    yield _gap(normed, rms_norm(x + added, weight, 1e-6))
    yield _gap(normed, F.rms_norm(total.float(), (96,), weight.float(), 1e-6))
    with torch.inference_mode(False), torch.enable_grad():
        gate, up, grad = (some(5, 96).requires_grad_() for _ in range(3))
        gated = F.silu(gate) * up
        of_gate, of_up = torch.autograd.grad(gated, (gate, up), grad)
        normed = F.rms_norm(gate, (96,), up[0], 1e-6)
        (of_x,) = torch.autograd.grad(normed, gate, grad)
    yield _gap(swiglu(gate, up), gated)
    yield from map(_gap, swiglu_backward(gate, up, grad), (of_gate, of_up))
    yield _gap(rms_norm_backward(gate, up[0], 1e-6, grad)[0], of_x)
    query, key, place = some(3, 4, 16), some(3, 2, 16), torch.tensor([2, 0, 1], device=device)
    turned = torch.cat((-query[..., 8:], query[..., :8]), -1)
    cos, sin = some(3, 16), some(3, 16)
    wanted = query * cos[place, None] + turned * sin[place, None]
    rotate(query, key, place, (cos, sin))
    yield _gap(query, wanted)


def _log_softmax_gaps(logits: Tensor) -> Iterator[float]:
    """Of log-probabilities, entropies and the gradient of logits, which takes their place."""
    exact, wide = Reference(), logits.double()
    target, temperature = torch.tensor([7, 0, 4999], device=logits.device), 0.8
    grad, d_h = logits[:, 0].double(), logits[:, 1].double()
    how = {"temperature": temperature, "entropy": True}
    logp, h, norm = selective_log_softmax(logits, target, **how)
    wide_logp, wide_h, wide_norm = exact.selective_log_softmax(wide, target, **how)
    plain = {"temperature": temperature, "entropy": None, "norm": None}
    own, wanted = logits.clone(), wide.clone()
    selective_log_softmax_backward_(own, target, grad.float(), **plain)
    exact.selective_log_softmax_backward_(wanted, target, grad, **plain)
    yield _gap(own, wanted)
    assert h is not None and wide_h is not None
    yield from map(_gap, (logp, h, norm), (wide_logp, wide_h, wide_norm))
    selective_log_softmax_backward_(
        logits, target, grad.float(),
        temperature=temperature, entropy=(h, d_h.float()), norm=norm,
    )  # fmt: skip
    exact.selective_log_softmax_backward_(
        wide, target, grad, temperature=temperature, entropy=(wide_h, d_h), norm=wide_norm
    )
    yield _gap(logits, wide)


def _gap(found: Tensor, wanted: Tensor) -> float:
    exact = wanted.detach().double()
    return ((found.detach().double() - exact).norm() / exact.norm()).item()


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """x · weight / √(mean(x²) + ε) over the last dimension. Records no gradient."""
    x, size = x.contiguous(), len(weight)
    out, rows = torch.empty_like(x), x.numel() // size
    _kernels().rms_norm[rows,](x, weight, out, size, eps, SIZE=power(size))
    return out


def rms_norm_backward(
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, "size"],
    eps: float,
    grad: Float[Tensor, "*rows size"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "size"]]:
    """The gradients of x and weight from that of `rms_norm`."""
    x, grad, size = x.contiguous(), grad.contiguous(), len(weight)
    rows, dx = x.numel() // size, torch.empty_like(x)
    programs = min(rows, PARTS)
    d_weight = x.new_empty(programs, size, dtype=torch.float32)
    _kernels().rms_norm_backward[programs,](
        x, weight, grad, dx, d_weight, rows, size, eps, SIZE=power(size)
    )
    return dx, d_weight.sum(0).to(weight.dtype)


def add_norm(
    x: Float[Tensor, "rows size"], added: Float[Tensor, "rows size"], norm: Norm
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """x + added, and its `rms_norm`."""
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[1]
    _kernels().add_norm[len(x),](
        x, added, norm.weight, total, out, size, norm.eps, SIZE=power(size)
    )
    return total, out


def rotate(
    query: Float[Tensor, "rows heads dim"],
    key: Float[Tensor, "rows key_heads dim"],
    positions: Int[Tensor, "rows"],
    rotation: tuple[Tensor, Tensor],
) -> None:
    """Rotate queries and keys in place.

        [a b] ← [a·cos − b·sin, b·cos + a·sin]

    Args:
        rotation: cosines and sines of every position, [positions, dim].
    """
    (rows, heads, dim), key_heads = query.shape, key.shape[1]
    _kernels().rotate[rows, heads + key_heads](
        query, key, *rotation, positions, heads, key_heads, HALF=dim // 2, SIZE=power(dim // 2)
    )


def swiglu(
    gate: Float[Tensor, "*rows size"], up: Float[Tensor, "*rows size"]
) -> Float[Tensor, "*rows size"]:
    """silu(gate) · up. Records no gradient."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _kernels().swiglu[-(-gate.numel() // ENTRIES),](gate, up, out, gate.numel(), SIZE=ENTRIES)
    return out


def swiglu_backward(
    gate: Float[Tensor, "*rows size"],
    up: Float[Tensor, "*rows size"],
    grad: Float[Tensor, "*rows size"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows size"]]:
    """The gradients of gate and up from that of `swiglu`."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    d_gate, d_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _kernels().swiglu_backward[-(-count // ENTRIES),](
        gate, up, grad, d_gate, d_up, count, SIZE=ENTRIES
    )
    return d_gate, d_up


def decode_attention(
    rows: DecodeRows,
    layer: LayerCache,
    query: Float[Tensor, "rows heads dim"],
    key: Float[Tensor, "rows key_heads dim"],
    value: Float[Tensor, "rows key_heads dim"],
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Float[Tensor, "rows heads dim"]:
    """Attention of one new token per row to the prompt of its slot and to its own suffix.

        softmax(cap(q · [prompt keys; suffix keys]ᵀ · scaling)) [prompt values; suffix values]

    Writes the new keys and values into the suffix first, at `time`. Rows whose time is −1 attend to
    themselves alone and write nothing. Reads lengths on the GPU, so that a CUDA graph of it stays
    valid while completions grow.
    """
    (count, heads, dim), key_heads = query.shape, key.shape[1]
    out, size = query.new_empty(count, heads, dim), max(16, power(dim))
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    strides = (stride for x in (query, key, value) for stride in x.stride()[:2])
    _kernels().decode_attention[count, key_heads](
        query, key, value, out, *layer.tensors(),
        rows.slot, rows.sample, rows.time, rows.cache.prompt_length, *strides,
        heads // key_heads, rows.cache.group, layer.prompt_key.shape[2], layer.suffix_key.shape[3],
        LONGEST if window is None else window, scaling, softcap or 1.0,
        dim=dim, HEADS=max(16, power(heads // key_heads)), DIM=size,
        KEYS=max(16, min(KEYS, KEY_BYTES // (size * query.itemsize))),
        CAPPED=softcap is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out


def draw(
    logits: Float[Tensor, "rows vocab"], uniform: Float[Tensor, "rows"], *, temperature: float
) -> tuple[Int64[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Inverse-CDF sampling from softmax(logits / temperature): one token per row, and its
    log-probability."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    blocks = -(-vocab // VOCABULARY)
    largest, sums = logits.new_empty(2, rows, blocks, dtype=torch.float32)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logp = logits.new_empty(rows)
    kernels = _kernels()
    kernels.sum_blocks[rows, blocks](logits, largest, sums, vocab, temperature, SIZE=VOCABULARY)
    kernels.draw[rows,](
        logits, uniform.contiguous(), largest, sums, tokens, logp, vocab, temperature, blocks,
        SIZE=VOCABULARY, BLOCKS=power(blocks),
    )  # fmt: skip
    return tokens, logp


def can_add_matmul(total: Tensor | None, left: Tensor) -> bool:
    """Whether a GPU adds a product of 16 bits to float32 sums. A plan of memory does not: before
    PyTorch 2.13 it has no shapes of that product."""
    return (
        not takes_fake_tensors()
        and left.is_cuda
        and left.dtype in (torch.float16, torch.bfloat16)
        and (total is None or total.dtype == torch.float32)
    )


def add_matmul(
    total: Float32[Tensor, "rows columns"] | None,
    left: Float[Tensor, "rows inner"],
    right: Float[Tensor, "inner columns"],
) -> Float32[Tensor, "rows columns"]:
    """total + left · right, in place, without rounding the product to 16 bits."""
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def can_use_log_softmax(logits: Tensor) -> bool:
    """Whether the kernels of log-probabilities take these logits: contiguous rows on a GPU."""
    return logits.dim() == 2 and logits.is_contiguous() and can_use_gpu(logits)


def selective_log_softmax(
    logits: Float[Tensor, "rows vocab"],
    target: Int64[Tensor, "rows"],
    *,
    temperature: float,
    entropy: bool,
) -> tuple[Float32[Tensor, "rows"], Float32[Tensor, "rows"] | None, Float32[Tensor, "rows 2"]]:
    """log softmax(logits / temperature) at the targets, the entropy, and the largest logit and
    Σ e^((z − largest) / temperature) of every row. Records no gradient."""
    rows, vocab = logits.shape
    logp = logits.new_empty(rows, dtype=torch.float32)
    h, norm = torch.empty_like(logp), logp.new_empty(rows, 2)
    _kernels().log_softmax[rows,](
        logits, target.contiguous(), logp, h, norm, vocab, temperature,
        ENTROPY=entropy, SIZE=VOCABULARY, num_warps=8,
    )  # fmt: skip
    return logp, h if entropy else None, norm


def selective_log_softmax_backward_(
    logits: Float[Tensor, "rows vocab"],
    target: Int64[Tensor, "rows"],
    grad: Float[Tensor, "rows"],
    *,
    temperature: float,
    entropy: tuple[Float[Tensor, "rows"], Float[Tensor, "rows"]] | None,
    norm: Float32[Tensor, "rows 2"] | None,
) -> None:
    """Overwrite logits with their gradient, computed in float32 and rounded once."""
    if norm is None:
        norm = selective_log_softmax(logits, target, temperature=temperature, entropy=False)[2]
    rows, vocab = logits.shape
    h, d_h = (grad, grad) if entropy is None else entropy
    given = (x.contiguous() for x in (target, grad, h, d_h, norm))
    _kernels().log_softmax_backward[rows, -(-vocab // VOCABULARY)](
        logits, *given, vocab, temperature,
        ENTROPY=entropy is not None, SIZE=VOCABULARY, num_warps=8,
    )  # fmt: skip


def power(size: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (size - 1).bit_length()
