"""Products with packed weights, which a rollout computes once per layer and token: in float32, in
bfloat16 with sums in float32, and of weights in 4 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from groupwise.kernels import structures
from groupwise.kernels.build import library
from groupwise.kernels.cpu import LANES, PANEL, multiplies, pack, typed
from groupwise.kernels.four_bits import FourBits
from groupwise.kernels.interface import Affine, LowRank
from groupwise.kernels.structures import require


class PackedLinear:
    """x · Wᵀ + b with packed copies of W and b, in float32, or in bfloat16 with sums in float32.
    Records no gradient.

    Args:
        weight, bias: of a layer.
        added: by an adapter, to the product that has been rounded to the dtype of the weight.
        gate: another layer with weight G and bias c, for silu(x · Gᵀ + c) · (x · Wᵀ + b).

    Raises:
        ValueError: bfloat16 with an odd number of inputs, on a processor that multiplies them in
            pairs; 4 bits without a scale per 64 inputs; or a gate or an adapter of another size or
            dtype.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs inputs"] | FourBits,
        bias: Float[Tensor, "outputs"] | None,
        added: LowRank | None = None,
        *,
        gate: Affine | None = None,
    ) -> None:
        self.gated = gate is not None
        self.dtype, (self.columns, self.depth) = weight.dtype, weight.shape
        require(multiplies(self.dtype), "weights must be float32 or bfloat16")
        pairs = self.dtype == torch.bfloat16 and bool(library().multiplies_pairs())
        require(not pairs or self.depth % 2 == 0, "inputs must be even")
        own = Affine(weight, bias, added)
        parts = [own] if gate is None else [gate, own]
        require(
            len({(x.weight.shape, x.weight.dtype) for x in parts}) == 1,
            "a gate must have the size and dtype of its layer",
        )
        size = PANEL // len(parts)
        panels = -(-self.columns // size)
        self.weight = _packed_weights([x.weight for x in parts], panels=panels, pairs=pairs)
        self.bias = torch.zeros(panels, PANEL, device="cpu", dtype=torch.float32)
        for first, each in zip(range(0, PANEL, size), parts, strict=True):
            if each.bias is not None:
                pack(each.bias.detach(), self.bias[..., first : first + size])
        self.adapter = _packed_adapters(parts, panels=panels)

    def __call__(
        self,
        x: Float[Tensor, "rows inputs"],
        *,
        onto: Float[Tensor, "rows outputs"] | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """The product, with `onto` added."""
        require(x.shape[1] == self.depth, "inputs must have the size of the weight's")
        require(onto is None or onto.shape == (len(x), self.columns), "`onto` must fit the product")
        require(
            {x.dtype, self.dtype if onto is None else onto.dtype} == {self.dtype},
            "tensors must have the dtype of the weight",
        )
        x, onto = x.contiguous(), None if onto is None else onto.contiguous()
        out = x.new_empty(len(x), self.columns)
        call = self.structure()
        call.x, call.rows, call.out = x.data_ptr(), len(x), out.data_ptr()
        call.onto = None if onto is None else onto.data_ptr()
        call.threads = torch.get_num_threads()
        if typed("linear", x)(ctypes.byref(call)):
            raise MemoryError(f"a product of {len(x)} rows: out of memory")
        return out

    def structure(self) -> structures.Linear:
        """The weight, for a call."""
        return structures.Linear(
            **self.weight.fields(), bias=self.bias.data_ptr(),
            depth=self.depth, columns=self.columns, gated=self.gated,
            **({} if self.adapter is None else self.adapter.fields()),
        )  # fmt: skip


@dataclass(frozen=True)
class _PackedMatrix:
    """Panels with 32 columns of a weight, or 16 of each of two; pairs of bfloat16 are one number of
    32 bits."""

    panels: Float[Tensor, "panels depth 32"]

    def fields(self) -> dict[str, Any]:
        """Those of `structures.Linear`."""
        return {"weight": self.panels.data_ptr()}


@dataclass(frozen=True)
class _PackedCodes:
    """The same of weights in 4 bits; eight codes are one number of 32 bits."""

    codes: Float32[Tensor, "panels words 32"]
    scales: Float32[Tensor, "panels blocks 32"]
    levels: Float32[Tensor, "16"]

    def fields(self) -> dict[str, Any]:
        pointers = (x.data_ptr() for x in (self.codes, self.scales, self.levels))
        return {"small": structures.FourBits(*pointers)}


def _packed_weights(
    parts: Sequence[Float[Tensor, "columns depth"] | FourBits], *, panels: int, pairs: bool
) -> _PackedMatrix | _PackedCodes:
    whole = [x.detach() for x in parts if isinstance(x, Tensor)]
    small = [x for x in parts if isinstance(x, FourBits)]
    require(not whole or not small, "a gate must have as many bits as its layer")
    return _packed_codes(small, panels) if small else _packed_matrix(whole, panels, pairs)


def _packed_matrix(
    parts: Sequence[Float[Tensor, "columns depth"]], panels: int, pairs: bool
) -> _PackedMatrix:
    """By a kernel where numbers have 32 bits."""
    words = torch.float32 if pairs else parts[0].dtype
    parts = [x.contiguous().view(words) for x in parts]
    columns, depth = parts[0].shape
    make = torch.zeros if columns * len(parts) % PANEL else torch.empty  # all is filled
    packed = make(panels, depth, PANEL, device="cpu", dtype=words)
    if words == torch.float32:
        *gate, own = (x.data_ptr() for x in parts)
        first, threads = gate[0] if gate else None, torch.get_num_threads()
        library().pack_panels(first, own, columns, depth, packed.data_ptr(), threads)
        return _PackedMatrix(packed)
    for x, some in zip(parts, packed.chunk(len(parts), -1), strict=True):
        pack(x, some)
    return _PackedMatrix(packed)


def _packed_codes(parts: Sequence[FourBits], panels: int) -> _PackedCodes:
    (columns, depth), block = parts[0].shape, FourBits.BLOCK
    require(
        all(
            x.codes.is_contiguous()
            and {x.codes.device.type, x.scales.device.type} == {"cpu"}
            and x.scales.shape == (columns, depth // block)
            and depth % block == 0
            and x.levels.equal(parts[0].levels)
            for x in parts
        ),
        f"weights in 4 bits must have a scale per {block} numbers, and the same levels",
    )
    # The first of two codes is in the upper half of its byte, and in the lower one here.
    swapped = [(x.codes << 4 | x.codes >> 4).view(torch.float32) for x in parts]
    codes = _packed_matrix(swapped, panels, pairs=False).panels
    scales = torch.zeros(panels, depth // block, PANEL, device="cpu", dtype=torch.float32)
    for x, some in zip(parts, scales.chunk(len(parts), -1), strict=True):
        pack(x.scales, some)
    return _PackedCodes(codes, scales, parts[0].levels.contiguous())


@dataclass(frozen=True)
class _PackedAdapter:
    """The adapters of layers that share their panels: (x · Aᵀ) · Bᵀ, where the rank is the sum of
    theirs. Sixteen columns of the product have `high` numbers of the rank, from `start` on: what
    the block-diagonal B has beside them is zero."""

    rank: int
    a: Float32[Tensor, "of_rank inputs 16"]
    b: Float32[Tensor, "panels high 32"]
    start: Int64[Tensor, "panels 2"]

    def fields(self) -> dict[str, int]:
        """Those of `structures.Linear`."""
        tensors = {"a": self.a, "b": self.b, "start": self.start}
        pointers = {name: x.data_ptr() for name, x in tensors.items()}
        return {**pointers, "rank": self.rank, "high": self.b.shape[1]}


def _packed_adapters(parts: Sequence[Affine], *, panels: int) -> _PackedAdapter | None:
    """Those of layers; None where there are none, or they add only zeros."""
    outputs, inputs = parts[0].weight.shape
    there = [each.added for each in parts if each.added is not None]
    for each in there:
        require(
            {each.a.dtype, each.b.dtype} == {torch.float32}
            and each.a.shape[1] == inputs
            and each.b.shape == (outputs, len(each.a)),
            "an adapter must be float32 and have the size of its layer",
        )
    rank, end, size = sum(len(each.a) for each in there), 0, PANEL // len(parts)
    b = torch.zeros(panels, rank, PANEL, device="cpu", dtype=torch.float32)
    for first, each in zip(range(0, PANEL, size), (part.added for part in parts), strict=True):
        if each is not None:
            start, end = end, end + len(each.a)
            pack(each.b.detach() * each.scaling, b[:, start:end, first : first + size])
    if not b.any():
        return None
    a = b.new_zeros(-(-rank // LANES), inputs, LANES)
    pack(torch.cat([each.a.detach() for each in there]), a)
    return _PackedAdapter(rank, a, *_without_zeros(b))


def _without_zeros(
    b: Float32[Tensor, "panels rank 32"],
) -> tuple[Float32[Tensor, "panels high 32"], Int64[Tensor, "panels 2"]]:
    """The shortest part of the rank outside of which all is zero, for every half of a panel: `high`
    numbers, and where they start."""
    halves = b.unflatten(-1, (2, LANES)).movedim(2, 1)  # [panels, 2, rank, 16]
    used, rank = (halves != 0).any(-1), b.shape[1]
    place = torch.arange(rank, device=b.device)
    first = torch.where(used, place, rank).amin(-1)
    end = torch.where(used, place + 1, 0).amax(-1)
    high = int((end - first).amax())
    start = first.clamp(max=rank - high)
    chosen = (start[..., None] + place[:high])[..., None].expand(-1, -1, -1, LANES)
    return halves.gather(2, chosen).movedim(1, 2).flatten(2).contiguous(), start
