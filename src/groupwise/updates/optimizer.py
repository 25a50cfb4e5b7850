"""AdamW on float32 masters, gradient clipping, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.errors import UsageError
from groupwise.settings import OptimizerSettings

SCALE = 1024.0
"""What the loss of an fp16 model is multiplied by; a power of 4, so that its root is exact."""


def learning_rate(step: int, settings: OptimizerSettings, *, total_steps: int = 0) -> float:
    """The rate of optimiser step `step`, counted from 0.

        warm-up: rate · (step + 1) / warmup_steps
        after:   rate · (f + (1 − f) · decay(x)),  x = (step − warmup) / (total − warmup)
        decay(x) = 1 (constant), 1 − x (linear), (1 + cos πx) / 2 (cosine)

    Example:
        >>> linear = OptimizerSettings(learning_rate=1.0, warmup_steps=2, schedule="linear")
        >>> [learning_rate(step, linear, total_steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    rate, warmup = settings.learning_rate, settings.warmup_steps
    if step < warmup:
        return rate * (step + 1) / warmup
    span = total_steps - warmup
    if settings.schedule == "constant" or span <= 0:
        return rate
    x = min(1.0, (step - warmup) / span)
    decay = 1.0 - x if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))
    return rate * (settings.final_fraction + (1.0 - settings.final_fraction) * decay)


class MasterOptimizer:
    """AdamW whose weights and gradients are float32 whatever the model computes in.

    bf16 has 8 bits of mantissa: a weight of 1 cannot take a step of 1e-6. So a model in bf16 or
    fp16 gets float32 masters; gradients are added to theirs as each microbatch's backward pass
    produces them, and the model's copy is refreshed after the step. A float32 or float64 model is
    its own master, at no cost.

    Args:
        parameters: those that require gradients are trained.
        settings: of AdamW and its schedule.
        total_steps: optimiser steps of the run, where a decaying schedule ends.

    Attributes:
        scale: what the loss is to be multiplied by before its backward pass, and is divided out
            again here. fp16 ends at 6e-8, where the gradients of a batch of many tokens begin.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        settings: OptimizerSettings,
        *,
        total_steps: int = 0,
    ) -> None:
        self.settings, self.total_steps = settings, total_steps
        everything = list(parameters)
        self.parameters = [p for p in everything if p.requires_grad]
        self.masters = [_master(p, offload=settings.offload) for p in self.parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_into(master))
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if master is not parameter
        ]
        self.adam = _adam(self.masters, settings)
        self.steps = 0
        # Gradients of a float32 adapter come through the fp16 layers above it.
        self.scale = SCALE if any(p.dtype == torch.float16 for p in everything) else 1.0

    def step(self) -> tuple[float, float]:
        """Clip, step, refresh; returns the norm before clipping and the rate used.

        A gradient that is not finite changes nothing: the step is left out and the norm returned
        tells. Nor does a gradient of exactly 0: whether rows that teach nothing were computed or
        skipped must not decide whether the momentum of earlier steps moves the weights.
        """
        limit = self.settings.max_grad_norm
        self._unscale()
        norm = float(nn.utils.clip_grad_norm_(self.masters, math.inf if limit is None else limit))
        rate = learning_rate(self.steps, self.settings, total_steps=self.total_steps)
        if not math.isfinite(norm):
            self.scale = max(1.0, self.scale / SCALE**0.5)
        elif norm > 0:
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
            self._refresh()
        self.steps += 1
        self.clear()
        return norm, rate

    def clear(self) -> None:
        """Leave no gradient: the next batch begins with none."""
        self.adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def take(self) -> Tensor:
        """The gradient of all masters as one vector; 0 where none came. None is left behind."""
        self._unscale()
        grads = [torch.zeros_like(m) if m.grad is None else m.grad for m in self.masters]
        self.clear()
        return torch.cat([grad.flatten() for grad in grads])

    @torch.no_grad()
    def _unscale(self) -> None:
        if self.scale != 1.0:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.div_(self.scale)

    def movement(self) -> Callable[[], float]:
        """Begin to watch the weights; the function returned gives the share of parameters that have
        not changed since."""

        def sums() -> list[tuple[float, float]]:
            """Two sums per parameter, which almost any change shows in."""
            with torch.no_grad():
                wide = (master.double() for master in self.masters)
                return [(float(w.sum()), float(w.square().sum())) for w in wide]

        before = sums()
        return lambda: fmean(float(a == b) for a, b in zip(before, sums(), strict=True))

    def release(self) -> None:
        """Leave the parameters to another optimiser: their gradients no longer come here."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _refresh(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors and plain numbers."""
        own = [m.detach() for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        return {
            "adam": self.adam.state_dict(),
            "masters": own,
            "steps": self.steps,
            "scale": self.scale,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        own = [m for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        for master, saved in zip(own, state["masters"], strict=True):
            master.copy_(saved)
        self.steps, self.scale = state["steps"], state.get("scale", self.scale)
        self._refresh()


def _master(parameter: nn.Parameter, *, offload: bool) -> nn.Parameter:
    """What the optimiser changes in place of a parameter; the parameter itself where it can."""
    away = offload and parameter.device.type != "cpu"
    low = parameter.dtype in (torch.bfloat16, torch.float16)
    if not low and not away:
        return parameter
    wide = parameter.detach().to(torch.float32) if low else parameter.detach()
    return nn.Parameter(wide.cpu().pin_memory() if away else wide)


def _adam(masters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    given: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(masters, fused=True, **given)
    try:
        import bitsandbytes.optim as bitsandbytes  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "optimizer.name = 'adamw_8bit': needs bitsandbytes; pip install 'groupwise[quant]', or "
            "take 'adamw'."
        ) from error
    return bitsandbytes.AdamW8bit(masters, **given)  # pyright: ignore[reportPrivateImportUsage]


def _into(master: nn.Parameter) -> Any:
    """A hook that moves a parameter's finished gradient into its master's."""

    def move(parameter: Tensor) -> None:
        if parameter.grad is not None:
            wide = parameter.grad.to(master.device, master.dtype)
            master.grad = wide if master.grad is None else master.grad.add_(wide)
            parameter.grad = None

    return move
