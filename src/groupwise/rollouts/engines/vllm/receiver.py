"""The other side of `shared_memory.py`: receives weights in the processes of a vLLM server.

The server runs in another environment, so `process.py` copies this file into a folder on its path.
It imports nothing of groupwise, and vLLM only where vLLM calls it.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BACKEND = "groupwise"
"""Name of the engine in vLLM's registry of weight-transfer engines."""
SHOWN = 3
"""Names in an error message."""


@dataclass(frozen=True, kw_only=True)
class SharedUpdate:
    """A version of the weights in shared memory; the body of `/update_weights`.

    Attributes:
        path: of the memory, as another process of this machine sees it.
        size: of the memory, in bytes.
        version: the number of optimizer steps behind the weights.
        names: of the tensors, as in a checkpoint.
        dtypes: of the tensors, such as "bfloat16".
        offsets: of the first byte of each tensor.
        digests: SHA-256 of the bytes of each tensor.
    """

    path: str
    size: int
    version: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    digests: list[str]


def digest(data: Tensor) -> str:
    """SHA-256 of a row of bytes."""
    return hashlib.sha256(data.numpy().data).hexdigest()


def digests(rows: list[Tensor]) -> list[str]:
    """`digest` of each row, in threads."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(digest, rows))


def read(update: SharedUpdate) -> list[tuple[str, Tensor]]:
    """Copies of the tensors of an update.

    Raises:
        ValueError: their bytes are not those that were sent.
    """
    memory = torch.from_file(update.path, shared=False, size=update.size, dtype=torch.uint8)
    rows, tensors = [], []
    for name, dtype, shape, offset in zip(
        update.names, update.dtypes, update.shapes, update.offsets, strict=True
    ):
        # A copy, because some layers keep the tensor that they are given.
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        row = tensor.flatten().view(torch.uint8)
        row.copy_(memory[offset : offset + len(row)])
        rows.append(row)
        tensors.append((name, tensor))
    found = zip(update.names, update.digests, digests(rows), strict=True)
    changed = [name for name, sent, arrived in found if sent != arrived]
    check("arrived with different bytes from those sent", changed, update)
    return tensors


def check(problem: str, names: list[str], update: SharedUpdate) -> None:
    """Refuse an update if there are tensors with a problem.

    Raises:
        ValueError: there are.
    """
    if names:
        rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ValueError(
            f"weights of version {update.version}: {', '.join(names[:SHOWN])}{rest} {problem}."
        )


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """The body of `/init_weight_transfer_engine`: shared memory needs no connection."""


def register() -> None:
    """Add the receiver to vLLM's registry; vLLM calls this in each of its processes."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngine,
    )
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    class SharedMemoryEngine(WeightTransferEngine):
        """Loads what the trainer has written to shared memory, and checks it."""

        init_info_cls = Nothing
        update_info_cls = SharedUpdate
        supports_draft_weight_update = False
        known = frozenset[str]()  # Names of the last complete update.

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            _reload().initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: SharedUpdate) -> None:
            # vLLM joins several tensors in one parameter and does not see that a part is missing.
            given = frozenset(update_info.names)
            check("did not arrive", sorted(self.known - given), update_info)
            own = {name for name, _ in self.model.named_parameters()}
            loaded = self.model.load_weights(read(update_info))
            check("got no value", sorted(own - set(loaded or own)), update_info)
            self.known = given

        def finish_weight_update(self) -> None:
            _reload().finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


def _reload() -> Any:
    """The part of vLLM that loads weights layer by layer."""
    from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

    return reload
