"""Log-probabilities of chosen tokens from rows of logits, and their gradient in place of the
logits, in C++ (`cpp/log_softmax.cpp`).

PyTorch needs float32 copies of bfloat16 logits and passes over memory for every operation: 1024
rows of 32,000 logits take it 0.4 GB in four passes forward, and 0.7 GB in four passes backward.
Here a row is read from memory once, and the gradient written once, in the dtype of the logits.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from groupwise.kernels.build import compiled, takes
from groupwise.kernels.cpu import TYPES, typed
from groupwise.kernels.structures import require


def can_use_log_softmax(logits: Tensor) -> bool:
    """Whether the kernels take these logits: contiguous ones of float32 or bfloat16 on a CPU."""
    return (
        takes(logits)
        and logits.device.type == "cpu"
        and logits.dtype in TYPES
        and logits.is_contiguous()
        and compiled() is not None
    )


def selective_log_softmax(
    logits: Float[Tensor, "rows vocab"],
    target: Int64[Tensor, "rows"],
    *,
    temperature: float,
    entropy: bool,
) -> tuple[
    Float32[Tensor, "rows"], Float32[Tensor, "rows"] | None, Float32[Tensor, "rows 2"]
]:  # fmt: skip
    """log softmax(logits / temperature) at the targets, the entropy, and the largest logit and
    Σ e^((z − largest) / temperature) of every row. Records no gradient."""
    target = _checked(logits, target, temperature)
    logp = logits.new_empty(len(logits), dtype=torch.float32)
    h = torch.empty_like(logp) if entropy else None
    norm = logp.new_empty(len(logits), 2)
    unknown = typed("selective_log_softmax", logits)(
        logits.data_ptr(), target.data_ptr(), *logits.shape, 1 / temperature, logp.data_ptr(),
        None if h is None else h.data_ptr(), norm.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    require(not unknown, "targets must be tokens of the vocabulary")
    return logp, h, norm


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
    target = _checked(logits, target, temperature)
    if norm is None:
        norm = selective_log_softmax(logits, target, temperature=temperature, entropy=False)[2]
    given = [x.float().contiguous() for x in (norm, grad, *(entropy or ()))]
    sizes = [x.shape == logits.shape[:1] for x in given[1:]]
    require(norm.shape == (len(logits), 2) and all(sizes), "there must be one gradient per row")
    require(all(x.device == logits.device for x in given), "gradients must be where logits are")
    pointers = [x.data_ptr() for x in given] + [None] * (4 - len(given))
    unknown = typed("selective_log_softmax_backward", logits)(
        logits.data_ptr(), target.data_ptr(), *pointers, *logits.shape, 1 / temperature,
        torch.get_num_threads(),
    )  # fmt: skip
    require(not unknown, "targets must be tokens of the vocabulary")


def _checked(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """The targets, contiguous."""
    require(logits.dim() == 2 and logits.is_contiguous(), "logits must be contiguous rows")
    require(target.shape == logits.shape[:1], "there must be one target per row")
    require(target.dtype == torch.int64, "targets must be int64")
    require(target.device == logits.device, "targets must be on the device of the logits")
    require(0 < temperature < torch.inf, "the temperature must be positive and finite")
    return target.contiguous()
