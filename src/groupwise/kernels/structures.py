"""What a call passes to the C++ kernels: the structures of `cpp/`, field by field."""

from __future__ import annotations

import ctypes

from torch import Tensor

OF_EVERY_TYPE = {
    "before_attention": "ppnppn",
    "after_attention": "pppnpn",
    "decode": "pnpppn",
    "rms_norm": "ppnndpn",
    "rms_norm_backward": "pppnndppn",
    "swiglu": "ppnpn",
    "swiglu_backward": "pppnppn",
    "selective_log_softmax": "ppnndpppn",
    "selective_log_softmax_backward": "ppppppnndn",
}
SIGNATURES = {
    **{f"{name}_float32": kinds for name, kinds in OF_EVERY_TYPE.items()},
    **{f"{name}_bfloat16": kinds for name, kinds in OF_EVERY_TYPE.items()},
    "draw_tokens": "pnndpppn",
    "square_sums": "pnnpn",
    "pack_panels": "ppnnpn",
    "multiplies_pairs": "",
    "multiplies_tiles": "",
}
"""Arguments of the functions that take more than one structure: pointers, int64, doubles."""
ARGUMENTS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}


def require(fits: bool, what: str) -> None:
    """Raise ValueError for arguments with which a kernel would read out of bounds."""
    if not fits:
        raise ValueError(what)


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type]]:
    return _fields(names, ctypes.c_void_p)


def _sizes(names: str) -> list[tuple[str, type]]:
    return _fields(names, ctypes.c_int64)


class Heads(ctypes.Structure):
    """[rows, heads, dim] by its strides."""

    _fields_ = (*_pointers("data"), *_sizes("row head"))

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        """Those of a tensor whose last dimension is contiguous."""
        require(x.stride(-1) == 1, "the last dimension of heads must be contiguous")
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class FourBits(ctypes.Structure):
    """`FourBits` of four_bits.h."""

    _fields_ = (*_pointers("codes scales levels"),)


class Linear(ctypes.Structure):
    """`Linear` of layer.h."""

    _fields_ = (
        *_pointers("x weight"),
        ("small", FourBits),
        *_pointers("bias a b start onto out"),
        *_sizes("rows depth columns rank high gated threads"),
    )


class Product(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        *_pointers("left right out"),
        *_sizes("rows columns depth left_row left_step right_row right_step onto threads"),
    )


class Cache(ctypes.Structure):
    """`Cache` of decoding.h."""

    _fields_ = (
        *_pointers("prompt_key prompt_value suffix_key suffix_value"),
        *_sizes("key_heads dim group prompt_capacity suffix_capacity"),
    )


class Places(ctypes.Structure):
    """`Places` of decoding.h."""

    _fields_ = (*_pointers("slot sample time prompt_length"), *_sizes("rows"))


class Attention(ctypes.Structure):
    """`Attention` of decoding.h."""

    _fields_ = (
        *_fields("query key value", Heads),
        *_pointers("out"),
        ("cache", Cache),
        ("places", Places),
        *_sizes("heads window threads"),
        ("scaling", ctypes.c_double),
    )


class Tree(ctypes.Structure):
    """`Tree` of tree.h."""

    _fields_ = (
        *_fields("query key value", Heads),
        *_pointers("out norm out_grad query_grad key_grad value_grad memory begin length owner"),
        *_sizes("spans tokens heads key_heads dim window parts threads"),
        ("scaling", ctypes.c_double),
    )


class Norm(ctypes.Structure):
    """`Norm` of layer.h."""

    _fields_ = (*_pointers("weight"), ("eps", ctypes.c_double))


class Layer(ctypes.Structure):
    """`Layer` of layer.cpp."""

    _fields_ = (
        *_fields("qkv out gated down", Linear),
        *_fields("before between of_query of_key", Norm),
        *_pointers("cos sin"),
        *_sizes("heads key_heads dim window"),
        ("scaling", ctypes.c_double),
        ("cache", Cache),
    )


class LowRank(ctypes.Structure):
    """`LowRank` of low_rank.cpp."""

    _fields_ = (
        *_pointers("x a b onto out inner"),
        *_sizes("rows depth rank columns threads"),
    )


class LowRankGradient(ctypes.Structure):
    """`LowRankGradient` of low_rank.cpp."""

    _fields_ = (
        *_pointers("inner x out"),
        *_sizes("rows rank columns threads"),
        ("scaling", ctypes.c_double),
    )


class AdamW(ctypes.Structure):
    """`AdamW` of adamw.cpp."""

    _fields_ = (
        *_pointers("grad upper lower first second"),
        *_sizes("size threads"),
        *_fields("factor kept beta2 weight1 weight2 rate root eps", ctypes.c_double),
    )


STRUCTURES = (
    Heads, FourBits, Linear, Product, Cache, Places, Attention, Tree, Norm, Layer, LowRank,
    LowRankGradient, AdamW,
)  # fmt: skip


def prepare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments of a library's functions.

    Raises:
        OSError: a structure has another size in C++, or a function is missing.
    """
    try:
        for name, kinds in SIGNATURES.items():
            getattr(library, name).argtypes = [ARGUMENTS[kind] for kind in kinds]
        for each in STRUCTURES:
            size = getattr(library, f"size_of_{each.__name__}")
            size.restype = ctypes.c_int64
            if size() != ctypes.sizeof(each):
                raise OSError(
                    f"{each.__name__} has {size()} bytes in C++ and {ctypes.sizeof(each)} in Python"
                )
    except AttributeError as error:
        raise OSError(f"a function is missing: {error}") from error
    return library
