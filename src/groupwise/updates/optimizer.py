"""AdamW on float32 master weights, gradient clipping, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from groupwise.errors import RunError, UsageError, install_command
from groupwise.kernels import active
from groupwise.settings import OptimizerSettings
from groupwise.updates.masters import Master, SplitMaster, master_of

PIECE = 1 << 22
"""Numbers of a weight that are summed in float64 at once."""

STEPPED = 1 << 24
"""16-bit weights that are float32 at one time during a step, unless one parameter has more."""

SCALE = 1024.0
"""Initial loss scale of an fp16 model; a power of 4, so that its square root is exact."""


def learning_rate(step: int, settings: OptimizerSettings, *, total_steps: int = 0) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

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

    bf16 has 8 bits of mantissa: a weight of 1 cannot take a step of 1e-6. So parameters in bf16 or
    fp16 get float32 master weights (`masters.py`), and the gradients of microbatches are added in
    float32 as the backward pass produces them; the parameter is refreshed after the step. A float32
    or float64 parameter is its own master.

    Args:
        named: all parameters of the model by name; those that require a gradient are trained.
        settings: of AdamW and its schedule.
        total_steps: optimizer steps of the run, where a decaying schedule ends.

    Attributes:
        parameters, masters: trained parameters and what holds their master weights, by name.
        scale: factor to multiply the loss by before the backward pass; divided out again here.
            The smallest number of fp16 is 6e-8, where the gradients of large batches begin.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        *,
        total_steps: int = 0,
    ) -> None:
        self.settings, self.total_steps = settings, total_steps
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        self.masters = {
            name: master_of(p, offload=settings.offload) for name, p in self.parameters.items()
        }
        self._separate = {name: master for name, master in self.masters.items() if master.held}
        self.adam = self._adam()
        self.steps = 0
        # Gradients of a float32 adapter come through the fp16 layers above it.
        self.scale = SCALE if any(p.dtype == torch.float16 for p in named.values()) else 1.0

    def step(self) -> tuple[float, float]:
        """Clip, step, refresh; returns the norm before clipping and the rate used.

        A gradient that is not finite skips the step. So does a gradient of exactly 0: whether rows
        without a gradient were computed or left out must not decide whether the momentum of earlier
        steps moves the weights.
        """
        self._unscale()
        total = self._total_norm()
        norm = float(total)
        rate = learning_rate(self.steps, self.settings, total_steps=self.total_steps)
        if not math.isfinite(norm):
            self.scale = max(1.0, self.scale / SCALE**0.5)
        elif norm > 0:
            for group in self.adam.param_groups:
                group["lr"] = rate
            limit = self.settings.max_grad_norm
            limit = math.inf if limit is None else limit
            self._take_step(float((limit / (total + 1e-6)).clamp(max=1.0)))
        self.steps += 1
        self.clear()
        return norm, rate

    def _total_norm(self) -> Tensor:
        """The norm of the gradient. A 16-bit gradient contributes its norm, computed in float32."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        return nn.utils.get_total_norm(
            [active().gradient_norm(grad) if grad.itemsize < 4 else grad for grad in grads]
        )

    @torch.no_grad()
    def _take_step(self, factor: float) -> None:
        """Step on the gradient times a factor: halves in place where a kernel can, and of the other
        masters some at a time."""
        trained = [m for m in self.masters.values() if m.grad is not None]
        for master in trained:
            if _in_place(master, self.settings.name):
                master.step_in_place(self.adam, factor)
        for some in _by_size([m for m in trained if m.grad is not None]):
            for master in some:
                master.open(factor)
            self.adam.step()
            for master in some:
                master.close()

    def step_bytes(self, name: str) -> int:
        """The most that weights and gradients take which are float32 only during a step of the
        optimizer `name`."""
        opened = [m for m in self.masters.values() if not _in_place(m, name)]
        sizes = [sum(m.widened for m in some) for some in _by_size(opened)]
        return 8 * max(sizes, default=0)

    def clear(self) -> None:
        """Discard all gradients."""
        for master in self.masters.values():
            master.clear()

    @torch.no_grad()
    def pop_gradient(self) -> Tensor:
        """The gradient of all masters as one vector, 0 where there is none; discards it."""
        self._unscale()
        grads = [master.full_grad() for master in self.masters.values()]
        self.clear()
        return torch.cat([grad.flatten() for grad in grads])

    @torch.no_grad()
    def _unscale(self) -> None:
        if self.scale != 1.0:
            for master in self.masters.values():
                if master.grad is not None:
                    master.full_grad().div_(self.scale)

    def remove_hooks(self) -> None:
        """Remove the hooks, so that another optimizer can train the parameters."""
        for master in self.masters.values():
            master.remove_hook()

    def reread(self) -> None:
        """Take the weights from the parameters, which were overwritten."""
        for master in self.masters.values():
            master.reread()

    def reset(self) -> None:
        """Reset the running means of AdamW; the learning rate keeps its schedule."""
        rates = [group["lr"] for group in self.adam.param_groups]
        self.adam = self._adam()
        for group, rate in zip(self.adam.param_groups, rates, strict=True):
            group["lr"] = rate

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, as tensors and plain numbers."""
        moments = self.adam.state_dict()["state"]
        # Split masters are put together here: on a card, one at a time.
        masters = {name: master.value().cpu() for name, master in self._separate.items()}
        return {
            "moments": {n: moments[i] for i, n in enumerate(self.masters) if i in moments},
            "masters": masters,
            "steps": self.steps,
            "scale": self.scale,
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the state back to what `state` returned.

        Raises:
            RunError: the state is of other parameters.
        """
        moments = _by_name(state["moments"], list(self.masters))
        masters = _by_name(state["masters"], list(self._separate))
        if not moments.keys() <= self.masters.keys() or masters.keys() != self._separate.keys():
            raise RunError(
                "optimizer state: belongs to other parameters; resume with the settings of the "
                "run's config.json."
            )
        found = {i: moments[name] for i, name in enumerate(self.masters) if name in moments}
        self.adam.load_state_dict({**self.adam.state_dict(), "state": found})
        for name, saved in masters.items():
            self._separate[name].set_value(saved)
        self.steps, self.scale = state["steps"], state.get("scale", self.scale)

    def _adam(self) -> torch.optim.Optimizer:
        return _adam([master.stepped for master in self.masters.values()], self.settings)


def _by_name(saved: Mapping[Any, Any], names: list[str]) -> dict[str, Any]:
    """State by name; states of older formats are keyed by position."""
    return {names[key] if isinstance(key, int) else key: value for key, value in saved.items()}


@torch.no_grad()
def moments(weights: Iterable[Tensor]) -> Float64[Tensor, "weights 2"]:
    """The sums of values and of squares of every weight, which almost any change alters.

    Summed piece by piece: a float64 copy of a whole embedding would be twice its size, which
    memory estimates do not include.
    """
    return torch.stack([_moments(weight) for weight in weights])


def _moments(weight: Tensor) -> Float64[Tensor, "2"]:
    total = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for part in weight.reshape(-1).split(PIECE):
        wide = part.double()
        total += torch.stack([wide.sum(), wide.square().sum()])
    return total.cpu()


def _in_place(master: Master, name: str) -> TypeGuard[SplitMaster]:
    """Whether the optimizer `name` steps the halves of a master by a kernel."""
    return isinstance(master, SplitMaster) and name == "adamw" and master.kernel is not None


def _by_size(masters: list[Master]) -> Iterator[list[Master]]:
    """Masters in turn, as many at a time as widen `STEPPED` weights, and at least one."""
    some: list[Master] = []
    for master in masters:
        if some and sum(m.widened for m in (*some, master)) > STEPPED:
            yield some
            some = []
        some.append(master)
    if some:
        yield some


def _adam(masters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    given: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        # A list of tensors must not be empty, a group may be: a teacher trains nothing.
        return torch.optim.AdamW([{"params": masters}], fused=True, **given)
    try:
        from groupwise.updates.adam_8bit import PiecewiseAdamW8bit
    except ImportError as error:
        raise UsageError(
            "optimizer.name = 'adamw_8bit': needs bitsandbytes; use 'adamw', or "
            f"{install_command('quant')}."
        ) from error
    return PiecewiseAdamW8bit(masters, **given)
