"""Several processes of this one, as ranks of a group: forked, so that nothing is imported again."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groupwise.distributed.world import World

FORK = multiprocessing.get_context("fork")


def run_ranks(
    size: int, work: Callable[..., Any], *given: Any, timeout_s: float = 20.0, limit_s: float = 90.0
) -> list[Any]:
    """What `work(world, *given)` returns on every rank, or the exception that it raised; None of a
    rank that ended without a word."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe(duplex=False) for _ in range(size)]
        processes = [
            FORK.Process(target=_rank, args=(rank, size, folder, timeout_s, end, work, given))
            for rank, (_, end) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        results: list[Any] = []
        for (result, _), process in zip(pipes, processes, strict=True):
            try:
                results.append(_read(result) if result.poll(limit_s) else "still running")
            except EOFError:
                results.append(None)
            process.join(5)
            process.kill()
        return results


def same(results: list[Any]) -> list[Any]:
    """The results, none of which may be an error."""
    for rank, result in enumerate(results):
        assert not isinstance(result, str | BaseException) and result is not None, (rank, result)
    return results


def _rank(
    rank: int,
    size: int,
    folder: str,
    timeout_s: float,
    pipe: Any,
    work: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    world = None
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        world = World(store, rank, size, timeout_s=timeout_s)
        _write(pipe, work(world, *given))
    except BaseException as error:
        if world is not None:
            world.failed(error)
        traceback.print_exc()
        _write(pipe, error)
    pipe.close()


def _write(pipe: Any, value: Any) -> None:
    """Send a value as bytes: tensors would go through memory that ends with the process."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    pipe.send_bytes(buffer.getvalue())


def _read(pipe: Any) -> Any:
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def exact_norms(model: nn.Module) -> nn.Module:
    """The model with norms in the type of its weights; those of transformers compute in float32,
    which hides what is wrong behind rounding."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_norm, module)
    return model


def _norm(module: Any, states: Tensor) -> Tensor:
    scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * (states * scale)
