"""A reader with its weights sharded over ranks, by `fully_shard` (FSDP2).

Losses are sums whose weights were normalised over the whole batch, so gradients are summed over
ranks and divided by nothing. FSDP2 averages by default, hence `sum_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.types import Outputs
from groupwise.updates import Reader

LOW = (torch.bfloat16, torch.float16)


def shard(reader: Reader, mesh: DeviceMesh) -> torch.dtype | None:
    """Shard a reader: every layer by itself, then embedding, norm and head as the root's group.

    Trained weights of 16 bits become float32, of which each rank keeps its shard; they are gathered
    and computed with in 16 bits, and their gradients are summed in float32.

    Returns:
        The type of 16 bits that is computed in, if the weights had one.
    """
    # FSDP finds the tensors whose gradients it has to wait for by walking the outputs of forward.
    _walkable(Outputs)
    model = reader.backbone.model
    low = next((p.dtype for p in reader.parameters() if p.requires_grad and p.dtype in LOW), None)
    policy = MixedPrecisionPolicy()
    if low is not None:
        reader.float()
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    # The root is resharded after a forward pass too: otherwise a pass without gradients would leave
    # it gathered, and writes to its weights would go to the copy.
    for module in [*layers(model), reader]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    sum_gradients(reader)
    return low


def layers(model: Any) -> list[nn.Module]:
    """The layers of a model's decoder: its longest list of modules."""
    lists = [
        module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)
    ]
    return list(max(lists, key=len, default=nn.ModuleList()))


def sum_gradients(reader: nn.Module) -> None:
    """Reduce gradients by plain sums."""
    for module in sharded_modules(reader):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def sharded_modules(reader: nn.Module) -> Iterator[FSDPModule]:
    """The modules whose weights are gathered together."""
    for module in reader.modules():
        if isinstance(module, FSDPModule):
            yield module


def reshard(reader: nn.Module) -> None:
    """Give gathered weights back, so that the parameters are the shards."""
    for module in sharded_modules(reader):
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the shards of all ranks, which all ranks have to ask for."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, in the form of `like`."""
    full = full.to(like.device)
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


@cache
def _walkable(outputs: type) -> None:
    """Tell PyTorch that the fields of a data class hold tensors."""
    torch.export.register_dataclass(outputs)
