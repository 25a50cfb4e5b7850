"""The weights that the optimizer steps: float32 behind parameters of fewer bits."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.kernels import SplitAdamW, active


class Master:
    """Weights and gradient of a parameter in full precision, and how the optimizer steps them.

    This one is of a parameter that is stepped itself: float32 or float64, and in place.

    Attributes:
        parameter: the model's.
        stepped: the tensor that AdamW steps, and the key of its moments.
        widened: the number of weights that are float32 only between `open` and `close`.
    """

    widened = 0

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = self.stepped = parameter

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What is kept beside the parameter."""
        return ()

    def value(self) -> Tensor:
        """The weights in full precision."""
        return self.stepped.detach()

    @torch.no_grad()
    def set_value(self, value: Tensor) -> None:
        """Replace the weights, and the parameter with them."""
        self.stepped.copy_(value)

    def reread(self) -> None:
        """Take the weights from the parameter, which was overwritten."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient as it is kept, in 16 bits or more."""
        return self.stepped.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.stepped.grad = value

    def full_grad(self) -> Tensor:
        """The gradient in full precision, from now on kept in it; zeros if there was none."""
        if (grad := self.grad) is None:
            grad = torch.zeros_like(self.parameter, dtype=self.stepped.dtype)
        self.grad = grad = grad.to(self.stepped.device, self.stepped.dtype)
        return grad

    def open(self, factor: float) -> None:
        """Give `stepped` the weights, and the gradient times a factor."""
        self.full_grad().mul_(factor)

    def close(self) -> None:
        """Take what the optimizer has made of them."""
        self.clear()

    def clear(self) -> None:
        """Discard the gradient."""
        self.grad = None

    def remove_hook(self) -> None:
        """Leave the gradients of the parameter where autograd puts them."""


class _Beside(Master, ABC):
    """A master that takes over the gradients of its parameter.

    The parameter owns the hook, and the garbage collector finds no cycle through it, so the hook
    must not own the master: it would keep model and master in memory for good.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._add_hook()

    @abstractmethod
    def take(self, grad: Tensor) -> None:
        """Add the gradient of a microbatch."""

    def _add_hook(self) -> None:
        reference = weakref.ref(self)

        def hand_over(parameter: Tensor) -> None:
            if (master := reference()) is not None and (grad := parameter.grad) is not None:
                parameter.grad = None
                master.take(grad)

        self._hook = self.parameter.register_post_accumulate_grad_hook(hand_over)

    def remove_hook(self) -> None:
        """As `Master.remove_hook`."""
        self._hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hook"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """PyTorch copies and pickles a parameter without its hooks."""
        vars(self).update(state)
        self._add_hook()


class WideMaster(_Beside):
    """A float32 copy of a parameter in fp16, or of one that stays on a card while the optimizer
    works on the CPU.

    Args:
        away: whether the copy is in pinned memory of the host.
    """

    def __init__(self, parameter: nn.Parameter, *, away: bool) -> None:
        super().__init__(parameter)
        low = parameter.dtype in (torch.bfloat16, torch.float16)
        wide = parameter.detach().to(torch.float32) if low else parameter.detach()
        self.stepped = nn.Parameter(wide.cpu().pin_memory() if away else wide)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """As `Master.held`."""
        return (self.stepped,)

    def set_value(self, value: Tensor) -> None:
        """As `Master.set_value`."""
        super().set_value(value)
        self._refresh()

    @torch.no_grad()
    def reread(self) -> None:
        """As `Master.reread`."""
        self.stepped.copy_(self.parameter)

    def close(self) -> None:
        """As `Master.close`."""
        self._refresh()
        self.clear()

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the weights to the parameter."""
        if self.parameter.device == self.stepped.device:
            self.parameter.copy_(self.stepped)
        else:
            self.parameter.copy_(_pinned(self.stepped, self.parameter.dtype), non_blocking=True)

    def take(self, grad: Tensor) -> None:
        """As `_Beside.take`."""
        if grad.device != self.stepped.device:
            grad = _pinned(grad, grad.dtype)
        if self.stepped.grad is None:
            self.stepped.grad = grad.to(self.stepped.dtype)
        else:
            self.stepped.grad.add_(grad)


class SplitMaster(_Beside):
    """Float32 weights in two halves of 16 bits: a bfloat16 parameter, and what it rounds off.

    bfloat16 is the upper half of float32, so the parameter and the lower half are the float32
    weights, in 2 bytes per weight beside the model where a copy takes 4. Rounding is to nearest,
    ties away from zero. A gradient stays in bfloat16, as autograd made it, until that of a second
    microbatch is added in float32. It is kept as `parameter.main_grad`, so that kernels can add
    later ones in place (`accumulable_grad`).

    `stepped` is empty except between `open` and `close`, which are needed where no kernel steps the
    halves in place.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__(parameter)
        self.grad = None  # that of an earlier master
        self.lower = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
        self.stepped = nn.Parameter(self._nothing())
        self.widened = parameter.numel()

    @property
    def held(self) -> tuple[Tensor, ...]:
        """As `Master.held`."""
        return (self.lower,)

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device=self.parameter.device)

    def _whole(self) -> Tensor:
        """Memory for the float32 weights."""
        return torch.empty(self.parameter.shape, dtype=torch.float32, device=self.parameter.device)

    @torch.no_grad()
    def value(self) -> Tensor:
        """As `Master.value`, in a new tensor."""
        whole = self._whole()
        lower_half, upper_half = _halves(whole)
        lower_half.copy_(self.lower)
        torch.add(self._upper(), self.lower >> 15, out=upper_half)
        return whole

    @torch.no_grad()
    def set_value(self, value: Tensor) -> None:
        """As `Master.set_value`."""
        self._split(self._whole().copy_(value))

    def _split(self, whole: Tensor) -> None:
        lower_half, upper_half = _halves(whole)
        self.lower.copy_(lower_half)
        # A lower half from 2¹⁵ on, which is negative as int16, rounds up: to the upper half + 1.
        torch.sub(upper_half, self.lower >> 15, out=self._upper())

    def _upper(self) -> Tensor:
        return self.parameter.detach().view(torch.int16)

    def reread(self) -> None:
        """As `Master.reread`. The old lower half would make a weight of 0 a NaN."""
        self.lower.zero_()

    @property
    def grad(self) -> Tensor | None:
        """As `Master.grad`."""
        return getattr(self.parameter, "main_grad", None)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        vars(self.parameter).pop("main_grad", None)
        if value is not None:
            vars(self.parameter)["main_grad"] = value

    def remove_hook(self) -> None:
        """As `Master.remove_hook`. Kernels must not add to a gradient that nobody takes."""
        super().remove_hook()
        self.grad = None

    def open(self, factor: float) -> None:
        """As `Master.open`."""
        grad = self.full_grad().mul_(factor)
        self.stepped.data = self.value()
        self.stepped.grad, self.grad = grad, None

    @property
    def kernel(self) -> SplitAdamW | None:
        """What steps the halves in place, where there is such a kernel."""
        return active().split_adamw(self.parameter)

    def step_in_place(self, adam: torch.optim.Optimizer, factor: float) -> None:
        """What `open`, a step of AdamW and `close` do, by the kernel. The state stays AdamW's."""
        kernel, grad = self.kernel, self.grad
        assert kernel is not None and grad is not None, "ask `kernel` and `grad` first"
        group, state = adam.param_groups[0], adam.state[self.stepped]
        if not state:  # As AdamW makes it.
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(self.lower, dtype=torch.float32)
        kernel(
            self.parameter, self.lower, grad, state["exp_avg"], state["exp_avg_sq"],
            step=int(state["step"]) + 1, factor=factor,
            **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
        )  # fmt: skip
        state["step"] += 1
        self.clear()

    def close(self) -> None:
        """As `Master.close`."""
        self._split(self.stepped.detach())
        self.clear()

    def clear(self) -> None:
        """As `Master.clear`."""
        self.grad = self.stepped.grad = None
        self.stepped.data = self._nothing()

    def take(self, grad: Tensor) -> None:
        """As `_Beside.take`."""
        self.grad = grad if self.grad is None else self.full_grad().add_(grad)


def master_of(parameter: nn.Parameter, *, offload: bool) -> Master:
    """The master of a parameter; `offload` puts that of one on a card into memory of the host."""
    away = offload and parameter.device.type != "cpu"
    if away or parameter.dtype == torch.float16:
        return WideMaster(parameter, away=away)
    if parameter.dtype != torch.bfloat16:
        return Master(parameter)
    return (
        SplitMaster(parameter) if parameter.is_contiguous() else WideMaster(parameter, away=False)
    )


def _halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 bits of float32 numbers, as views."""
    pair = whole.view(-1).view(torch.int16).view(*whole.shape, 2)
    return pair[..., 0], pair[..., 1]


def _pinned(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in pinned memory of the host, of which a card reads and writes at full speed. PyTorch
    changes the dtype of what crosses over on the CPU, in memory that is not pinned, so it must be
    the same on both sides. Freed blocks are used again once the card has read them."""
    return torch.empty(value.shape, dtype=dtype, pin_memory=True).copy_(value)
