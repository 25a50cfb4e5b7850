"""Compute kernels behind one protocol, `Backend`: C++ and oneDNN on a CPU, Triton and CUDA graphs
on a GPU.

`reference.py` defines every operation in PyTorch. Everything else is optional: without the line
that imports `auto`, its modules and `cpp/` can be deleted, and PyTorch computes.
"""

from groupwise.kernels import auto  # noqa: F401
from groupwise.kernels.adapter import add_low_rank
from groupwise.kernels.four_bits import FourBits, is_four_bit_linear
from groupwise.kernels.heap import keep_freed_memory
from groupwise.kernels.interface import (
    BACKENDS,
    COPY_LIMIT,
    Affine,
    Backend,
    DecoderLayer,
    DecodeRows,
    GroupCache,
    LayerCache,
    LowRank,
    Norm,
    SplitAdamW,
    Tree,
    active,
    select,
    using,
)
from groupwise.kernels.reference import (
    Reference,
    accumulable_grad,
    attention,
    inverse_cdf,
    is_plain_linear,
    within_window,
)

__all__ = [
    "BACKENDS",
    "COPY_LIMIT",
    "Affine",
    "Backend",
    "DecodeRows",
    "DecoderLayer",
    "FourBits",
    "GroupCache",
    "LayerCache",
    "LowRank",
    "Norm",
    "Reference",
    "SplitAdamW",
    "Tree",
    "accumulable_grad",
    "active",
    "add_low_rank",
    "attention",
    "inverse_cdf",
    "is_four_bit_linear",
    "is_plain_linear",
    "keep_freed_memory",
    "select",
    "using",
    "within_window",
]
