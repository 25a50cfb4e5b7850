"""The load-balancing loss of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from groupwise.errors import UsageError


def routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The routers of a model of `transformers`, each with the place of the logits in its output."""
    known: Any = getattr(model, "_can_record_outputs", None) or {}
    recorder = known.get("router_logits")
    if recorder is None:
        return []
    kind = recorder.target_class
    return [(module, recorder.index) for module in model.modules() if isinstance(module, kind)]


def check_routers(model: nn.Module) -> None:
    """Refuse a model without experts.

    Raises:
        UsageError: the model has no routers that can be read.
    """
    if not routers(model):
        raise UsageError(
            f"update.router_aux_loss: {type(model).__name__} is not a mixture of experts with "
            "readable router logits; remove the setting."
        )


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Float[Tensor, "tokens experts"]]]:
    """Collect the logits of every router in a forward pass, with their gradient."""
    found: list[Tensor] = []
    handles = []
    for module, place in routers(model):

        def keep(_: nn.Module, __: Any, output: Any, place: int = place) -> None:
            logits = output[place] if isinstance(output, tuple) else output
            found.append(logits.reshape(-1, logits.shape[-1]))

        handles.append(module.register_forward_hook(keep))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def load_balancing_loss(
    logits: Sequence[Float[Tensor, "tokens experts"]],
    *,
    chosen: int,
    seen: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """How unevenly the tokens use the experts; `chosen` when all experts are used alike.

        L = E · Σ_e (assignments of e / tokens) · (mean probability of e),   over all layers

    Args:
        logits: of the routers, one tensor per layer.
        chosen: experts per token.
        seen: tokens that are not padding; None: all.

    Example:
        >>> even = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> load_balancing_loss([even], chosen=1)
        tensor(1.)

    Source: Switch Transformer (2101.03961), as computed by `transformers`.
    """
    kept = [each if seen is None else each[seen.flatten()] for each in logits]
    probabilities = torch.cat([each.float().softmax(-1) for each in kept])
    places = probabilities.topk(chosen, dim=-1).indices
    used = torch.zeros_like(probabilities).scatter_(1, places, 1.0).mean(0)
    return probabilities.shape[-1] * (used * probabilities.mean(0)).sum()
