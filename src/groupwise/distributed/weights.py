"""Loads published weights into another model, and verifies that they arrived."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import RunError
from groupwise.models.weights import PublishedWeights
from groupwise.types import TensorInfo, WeightsRef


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """Weights to be sent to another process, with the digests that the sender computed.

    Attributes:
        version: the number of optimizer steps behind them.
        named: the tensors.
        digests: of each tensor, computed before it was sent.
    """

    version: int
    named: Mapping[str, Tensor]
    digests: Mapping[str, int]

    @property
    def manifest(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.named.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named.items()

    def digest(self, name: str) -> int:
        """What the sender computed."""
        return self.digests[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors as arrays of bytes, which Ray puts into shared memory without another copy; the
        receiver reads them there and must not write."""
        arrays = {
            name: (t.contiguous().flatten().view(torch.uint8).numpy(), t.dtype, tuple(t.shape))
            for name, t in self.named.items()
        }
        return _received, (self.version, arrays, dict(self.digests))


def _received(
    version: int,
    arrays: Mapping[str, tuple[Any, torch.dtype, tuple[int, ...]]],
    digests: Mapping[str, int],
) -> Shipment:
    """The shipment that was sent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        named = {
            name: torch.from_numpy(array).view(dtype).view(shape)
            for name, (array, dtype, shape) in arrays.items()
        }
    return Shipment(version=version, named=named, digests=digests)


def shipment(weights: WeightsRef) -> Shipment:
    """Published weights in memory that any process can be given. On a CPU they are the live
    tensors: what a method of an actor returns is written to Ray's store before its next one."""
    named = {name: tensor.detach().cpu() for name, tensor in weights.tensors()}
    copy = PublishedWeights(version=weights.version, named=named)
    digests = {name: copy.digest(name) for name in named}
    return Shipment(version=weights.version, named=named, digests=digests)


def accept(model: Any, weights: Shipment, *, version: int) -> None:
    """Take over a shipment, if it is the version that was announced.

    Raises:
        RunError: it is another version, or what arrived is not what was sent (`take_over`).
    """
    if weights.version != version:
        raise RunError(
            f"weights of version {weights.version}: arrived where version {version} was announced."
        )
    take_over(model, weights)


@torch.no_grad()
def take_over(model: Any, weights: WeightsRef) -> None:
    """Copy published weights into a model of the same kind, and check what is there afterwards.

    Raises:
        RunError: a tensor is missing, unknown, of another shape or type, or its bytes differ from
            those that were published; or a tied head came apart.
    """
    own = dict(model.named_parameters())
    _check_tied(model, weights)
    _check_cover(own, weights)
    for name, tensor in weights.tensors():
        own[name].copy_(tensor)
    here = PublishedWeights(version=weights.version, named=own)
    if wrong := [name for name in own if here.digest(name) != weights.digest(name)]:
        raise RunError(
            f"weights of version {weights.version}: {some(wrong)} arrived with different "
            "bytes from those published."
        )


def _check_tied(model: Any, weights: WeightsRef) -> None:
    """That a head which is tied to the embedding still is."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = getattr(base.config, "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not embedding.weight:
        raise RunError(
            f"weights of version {weights.version}: the head is tied to the embedding, but "
            "the sampling model has a separate one."
        )


def _check_cover(own: dict[str, Any], weights: WeightsRef) -> None:
    """That the published tensors are those of the model, in name, shape and type."""
    manifest = weights.manifest
    missing, unknown = sorted(own.keys() - manifest.keys()), sorted(manifest.keys() - own.keys())
    if missing or unknown:
        said = [f"{some(missing)} missing"] if missing else []
        said += [f"{some(unknown)} unknown to the model that samples"] if unknown else []
        raise RunError(f"weights of version {weights.version}: {', '.join(said)}.")
    for name, (shape, dtype) in manifest.items():
        if (shape, dtype) != (tuple(own[name].shape), own[name].dtype):
            raise RunError(
                f"weights of version {weights.version}: {name} is {dtype} {list(shape)}, the model "
                f"that samples has {own[name].dtype} {list(own[name].shape)}."
            )


def some(names: list[str]) -> str:
    """The first names of a list."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
