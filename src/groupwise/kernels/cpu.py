"""What rollouts and updates on a CPU compute in float32, written in C++ (`cpp/`); attention of a
decoding step, norms and activations in bfloat16 too.

A decoding step of a small model is hundreds of operations of a few microseconds. PyTorch's each
cost ten to start, and read and write everything; its attention computes what slots of different
ages do not use, and masks it. Here products take what follows them along, and one pass attends
from all rows of a prompt to its keys and from each row to its own.

The source is compiled where it is first needed, in a few seconds, by the machine's `g++` for its
processor, and kept in `~/.cache/groupwise`. It runs on the threads that PyTorch has already. Where
there is no compiler, PyTorch computes everything.

GFLOP/s of products on two cores of an AMD EPYC; rows x inputs → outputs:

    rows x weight          MKL   oneDNN   here
    64 x 128 → 512          51      110    180
    64 x 512 → 1536        138      200    213
    1024 x 512 → 1536      162      189    190
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import Parameter

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
FLAGS = (
    "-std=gnu++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC",
    "-Wl,-Bsymbolic",  # a function of the same name elsewhere in the process is not ours
)  # fmt: skip
LANES = 16
"""Heads of a multiple of so many dimensions can be attended."""
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What the kernels for a type end in, where there is one for each."""
PANEL = 32
"""Columns of a product that are computed at once."""
OF_EVERY_TYPE = {
    "rms_norm": "ppnndpn",
    "rms_norm_backward": "pppnndppn",
    "swiglu": "ppnpn",
    "swiglu_backward": "pppnppn",
}
SIGNATURES = {
    **{f"{name}_{of}": kinds for name, kinds in OF_EVERY_TYPE.items() for of in TYPES.values()},
    "softmax": "pnnpn",
    "draw_tokens": "pnndpppn",
    "before_attention": "ppnppn",
    "after_attention": "pppnpn",
    "decode": "pnpppn",
}
"""What functions that take more than one structure are given: pointers, int64 numbers, doubles."""
ARGUMENTS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}


class Heads(ctypes.Structure):
    """[rows, heads, dim] by its strides."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        """Those of a tensor whose last dimension lies together."""
        require(x.stride(-1) == 1, "heads whose numbers do not lie side by side")
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class GivenLinear(ctypes.Structure):
    """`Linear` of layer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "onto", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "depth", "columns", "gated", "threads")),
    )


class _Product(ctypes.Structure):
    """`Product` of products.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "out")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "rows", "columns", "depth",
                "left_row", "left_step", "right_row", "right_step", "onto", "threads",
            )
        ),
    )  # fmt: skip


@cache
def compiled() -> ctypes.CDLL | None:
    """The functions of `cpp/`; None where they cannot be compiled or loaded."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    # A folder of this process takes the place of a cache that cannot be written, or holds a file
    # that cannot be read.
    with tempfile.TemporaryDirectory() as own:
        for home in (_cache(), Path(own)):
            try:
                return _with_signatures(ctypes.CDLL(str(_built(compiler, home))))
            except (OSError, RuntimeError, subprocess.SubprocessError):
                continue
    return None


def _with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, kinds in SIGNATURES.items():
        getattr(library, name).argtypes = [ARGUMENTS[kind] for kind in kinds]
    return library


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "groupwise")


def _built(compiler: str, home: Path) -> Path:
    """The shared library in a folder, compiled unless it has been for this source and processor."""
    # PyTorch's own copy of OpenMP where it brings one: two of them would each keep threads of
    # their own spinning.
    programs = [str(path) for path in SOURCES if path.suffix == ".cpp"]
    flags = (*FLAGS, *programs, "-Wl,--as-needed", *_openmp())
    contents = [path.read_bytes() for path in SOURCES]
    identity = (*contents, "\0".join(flags).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(identity)).hexdigest()[:16]
    target = home / f"kernels-{name}.so"
    if not target.exists():
        home.mkdir(parents=True, exist_ok=True)
        # Another process may be doing the same: each one moves a finished file into place.
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / target.name
            command = [compiler, *flags, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            made.replace(target)
    return target


def _openmp() -> list[str]:
    """The OpenMP library that this process has loaded; PyTorch's where another package has one."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/libgomp" in line}
    return sorted(paths, key=lambda path: ("torch" not in path, path))[:1]


def _processor() -> str:
    """What a processor is told by; its clock, which changes, left out."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    telling = ("flags", "model name", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(telling)}))


def library() -> ctypes.CDLL:
    """`compiled`, where it is known that there is one."""
    library = compiled()
    assert library is not None, "ask `compiled` first"
    return library


def typed(name: str, *tensors: Tensor) -> Any:
    """The kernel for numbers of their type."""
    types = {x.dtype for x in tensors}
    require(len(types) == 1 and types <= TYPES.keys(), "other types than one of the kernel's")
    return getattr(library(), f"{name}_{TYPES[tensors[0].dtype]}")


def require(fits: bool, what: str) -> None:
    """Refuse what a kernel would read beyond its end, as PyTorch refuses it."""
    if not fits:
        raise ValueError(what)


class Linear:
    """x · Wᵀ + b with copies of W and b that are laid out for the kernels. Records no gradient.

    Args:
        weight, bias: of a layer.
        gate: weight and bias of another layer, G and c, where the product is to be
            silu(x · Gᵀ + c) · (x · Wᵀ + b).
    """

    def __init__(
        self,
        weight: Float32[Tensor, "outputs inputs"],
        bias: Float32[Tensor, "outputs"] | None,
        *,
        gate: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        self.gated = gate is not None
        self.columns, self.depth = weight.shape
        parts = [(weight, bias)] if gate is None else [gate, (weight, bias)]
        size = PANEL // len(parts)
        panels = -(-self.columns // size)
        self.weight = weight.new_zeros(panels, self.depth, PANEL)
        self.bias = weight.new_zeros(panels, PANEL)
        for first, (each, of_each) in zip(range(0, PANEL, size), parts, strict=True):
            _lay_out(each.detach(), self.weight[..., first : first + size])
            if of_each is not None:
                _lay_out(of_each.detach(), self.bias[..., first : first + size])

    def __call__(
        self,
        x: Float32[Tensor, "rows inputs"],
        *,
        onto: Float32[Tensor, "rows outputs"] | None = None,
    ) -> Float32[Tensor, "rows outputs"]:
        """The product, with `onto` added."""
        require(x.shape[1] == self.depth, "inputs of another size than the weight's")
        require(onto is None or onto.shape == (len(x), self.columns), "a sum of another size")
        require(
            {x.dtype, torch.float32 if onto is None else onto.dtype} == {torch.float32},
            "other types than float32",
        )
        x, onto = x.contiguous(), None if onto is None else onto.contiguous()
        out = x.new_empty(len(x), self.columns)
        given = self.given()
        given.x, given.rows, given.out = x.data_ptr(), len(x), out.data_ptr()
        given.onto = None if onto is None else onto.data_ptr()
        given.threads = torch.get_num_threads()
        library().linear(ctypes.byref(given))
        return out

    def given(self) -> GivenLinear:
        """What a kernel is told of the weight."""
        return GivenLinear(
            weight=self.weight.data_ptr(), bias=self.bias.data_ptr(),
            depth=self.depth, columns=self.columns, gated=self.gated,
        )  # fmt: skip


def _lay_out(
    x: Float32[Tensor, "columns *rest"], panels: Float32[Tensor, "panels *rest size"]
) -> None:
    """Fill panels with so many columns each, without another copy on the way."""
    size = panels.shape[-1]
    whole, left = divmod(len(x), size)
    panels[:whole] = x[: whole * size].unflatten(0, (whole, size)).movedim(1, -1)
    if left:
        panels[whole, ..., :left] = x[-left:].movedim(0, -1)


def computes(*tensors: Tensor) -> bool:
    """Whether kernels compute with these: float32 on a CPU; a subclass of tensors may have no
    memory."""
    return (
        all(
            type(x) in (Tensor, Parameter) and x.device.type == "cpu" and x.dtype == torch.float32
            for x in tensors
        )
        and compiled() is not None
    )


def multiply(
    left: Float32[Tensor, "rows depth"],
    right: Float32[Tensor, "depth columns"],
    *,
    onto: Float32[Tensor, "rows columns"] | None = None,
) -> Float32[Tensor, "rows columns"]:
    """left · right, each of them laid out in any way, as a transposed view is; added to `onto` in
    place where that is given. Records no gradient."""
    out = left.new_empty(len(left), right.shape[1]) if onto is None else onto
    require(left.shape[1] == len(right), "factors of different depth")
    require(out.shape == (len(left), right.shape[1]), "a sum of another size than the product")
    require(out.is_contiguous(), "a sum that is not contiguous")
    require({left.dtype, right.dtype, out.dtype} == {torch.float32}, "other types than float32")
    given = _Product(
        left.data_ptr(), right.data_ptr(), out.data_ptr(), len(left), right.shape[1], len(right),
        *left.stride(), *right.stride(), onto is not None, torch.get_num_threads(),
    )  # fmt: skip
    if library().product(ctypes.byref(given)):
        raise MemoryError(f"product of {list(left.shape)} and {list(right.shape)}: no memory")
    return out


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "size"], eps: float
) -> Float[Tensor, "*rows size"]:
    """x · weight / √(mean(x²) + ε) over the last dimension, in one type. Records no gradient."""
    size = len(weight)
    require(x.shape[-1] == size, "rows of another size than the norm's")
    require(weight.is_contiguous(), "a weight that is not contiguous")
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
    require(x.shape == grad.shape and x.shape[-1] == size, "gradients of another size")
    require(weight.is_contiguous(), "a weight that is not contiguous")
    dx, d_weight = torch.empty_like(x), torch.zeros(threads, size, dtype=torch.float32)
    typed("rms_norm_backward", x, weight, grad)(
        x.data_ptr(), weight.data_ptr(), grad.data_ptr(), x.numel() // size, size, eps,
        dx.data_ptr(), d_weight.data_ptr(), threads,
    )  # fmt: skip
    return dx, d_weight.sum(0).to(weight.dtype)


def swiglu(
    gate: Float[Tensor, "*rows size"], up: Float[Tensor, "*rows size"]
) -> Float[Tensor, "*rows size"]:
    """silu(gate) ∘ up, for a multiple of 16 numbers of one type. Records no gradient."""
    require(gate.shape == up.shape and gate.numel() % LANES == 0, "other sizes than swiglu takes")
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
    require(gate.shape == up.shape == grad.shape, "gradients of another size")
    require(gate.numel() % LANES == 0, "other sizes than swiglu takes")
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    typed("swiglu_backward", gate, up, grad)(
        gate.data_ptr(), up.data_ptr(), grad.data_ptr(), gate.numel(),
        d_gate.data_ptr(), d_up.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return d_gate, d_up


def softmax_(x: Float32[Tensor, "rows size"]) -> Float32[Tensor, "rows"]:
    """Softmax of every row, in place; returns log Σ eˣ."""
    require(x.is_contiguous(), "rows that do not lie one after the other")
    require(x.dtype == torch.float32, "another type than float32")
    norm = x.new_empty(len(x))
    library().softmax(x.data_ptr(), *x.shape, norm.data_ptr(), torch.get_num_threads())
    return norm


def draw_tokens(
    logits: Float32[Tensor, "rows vocab"], uniform: Float[Tensor, "rows"], *, temperature: float
) -> tuple[Int64[Tensor, "rows"], Float32[Tensor, "rows"]]:
    """One token per row from softmax(logits / temperature), the first whose cumulative probability
    exceeds the row's uniform number; and the logarithms of their probabilities."""
    require(uniform.shape == logits.shape[:1], "another number of uniform numbers than of rows")
    require(logits.shape[1] > 0, "no token to draw")
    require(logits.dtype == torch.float32, "another type than float32")
    require(uniform.device == logits.device, "uniform numbers on another device than the logits")
    require(0 < temperature < torch.inf, "a temperature that is not above 0 and finite")
    logits, uniform = logits.contiguous(), uniform.double().contiguous()
    logp = logits.new_empty(len(logits))
    tokens = logits.new_empty(len(logits), dtype=torch.long)
    if library().draw_tokens(
        logits.data_ptr(), *logits.shape, 1 / temperature, uniform.data_ptr(), tokens.data_ptr(),
        logp.data_ptr(), torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError(f"tokens of {list(logits.shape)} logits: no memory for sums")
    return tokens, logp


def attends(query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None) -> bool:
    """Whether `attend_rows` and `tree_attend` compute attention of this kind; a subclass of tensors
    may have no memory."""
    return (
        softcap is None
        and query.dtype in TYPES
        and query.shape[-1] % LANES == 0
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and all(
            type(x) is Tensor
            and x.device.type == "cpu"
            and x.dtype == query.dtype
            and x.stride(-1) == 1
            for x in (query, key, value)
        )
        and compiled() is not None
    )
