"""The weights that the optimizer steps: float32 behind parameters of fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Master:
    """A parameter that the optimizer steps itself: float32 or float64, and in place.

    Attributes:
        parameter: the model's.
        stepped: the tensor that AdamW steps, and the key of its moments.
    """

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

    @property
    def gradient(self) -> Tensor | None:
        """The gradient in full precision, which may be changed in place, or None."""
        return self.stepped.grad

    @gradient.setter
    def gradient(self, value: Tensor | None) -> None:
        self.stepped.grad = value

    def gradient_or_zeros(self) -> Tensor:
        """The gradient in full precision, which from now on there is."""
        if (gradient := self.gradient) is None:
            gradient = torch.zeros_like(self.parameter, dtype=self.stepped.dtype)
            gradient = gradient.to(self.stepped.device)
            self.gradient = gradient
        return gradient

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient."""
        return self.stepped.grad is not None

    @property
    def gradient_bytes(self) -> int:
        """What the gradient takes now."""
        return 0 if self.stepped.grad is None else self.stepped.grad.nbytes

    def norm_input(self) -> Tensor:
        """What a norm over several gradients is computed from: the gradient, or its own norm."""
        assert self.stepped.grad is not None
        return self.stepped.grad

    def remove_hook(self) -> None:
        """Leave the gradients of the parameter where autograd puts them."""


class WideMaster(Master):
    """A float32 copy of a parameter in fp16, or of one that stays on a card while the optimizer
    works on the CPU.

    Args:
        away: whether the copy is in pinned memory of the host.
    """

    def __init__(self, parameter: nn.Parameter, *, away: bool) -> None:
        self.parameter = parameter
        low = parameter.dtype in (torch.bfloat16, torch.float16)
        wide = parameter.detach().to(torch.float32) if low else parameter.detach()
        self.stepped = nn.Parameter(wide.cpu().pin_memory() if away else wide)
        self._hook = parameter.register_post_accumulate_grad_hook(self._take)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """As `Master.held`."""
        return (self.stepped,)

    def set_value(self, value: Tensor) -> None:
        """As `Master.set_value`."""
        super().set_value(value)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights to the parameter."""
        if self.parameter.device == self.stepped.device:
            self.parameter.copy_(self.stepped)
        else:
            self.parameter.copy_(_pinned(self.stepped, self.parameter.dtype), non_blocking=True)

    def _take(self, parameter: Tensor) -> None:
        """Add the finished gradient of the parameter to that of the copy."""
        if (grad := parameter.grad) is None:
            return
        if grad.device != self.stepped.device:
            grad = _pinned(grad, grad.dtype)
        if self.stepped.grad is None:
            self.stepped.grad = grad.to(self.stepped.dtype)
        else:
            self.stepped.grad.add_(grad)
        parameter.grad = None

    def remove_hook(self) -> None:
        """As `Master.remove_hook`."""
        self._hook.remove()


class SplitMaster(Master):
    """Float32 weights in two halves of 16 bits: a bfloat16 parameter, and what it rounds off.

    bfloat16 is the upper half of float32, so the parameter and the lower half are the float32
    weights, in 2 bytes per weight beside the model where a copy takes 4. Rounding is to nearest,
    ties away from zero. A gradient stays in bfloat16, as autograd made it, until that of a second
    microbatch is added in float32.

    `stepped` is empty except between `open` and `close`.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.lower = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
        self.stepped = nn.Parameter(self._nothing())
        self._gradient: Tensor | None = None
        self._hook = parameter.register_post_accumulate_grad_hook(self._take)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """As `Master.held`."""
        return (self.lower,)

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device=self.parameter.device)

    @torch.no_grad()
    def value(self) -> Tensor:
        """As `Master.value`, in a new tensor."""
        upper, whole = self._upper(), torch.empty_like(self.parameter, dtype=torch.float32)
        lower_half, upper_half = _halves(whole)
        lower_half.copy_(self.lower)
        torch.add(upper, self.lower >> 15, out=upper_half)
        return whole

    @torch.no_grad()
    def set_value(self, value: Tensor) -> None:
        """As `Master.set_value`."""
        lower_half, upper_half = _halves(value.to(self.parameter.device).contiguous())
        self.lower.copy_(lower_half)
        # A lower half from 2¹⁵ on, which is negative as int16, rounds up: to the upper half + 1.
        torch.sub(upper_half, self.lower >> 15, out=self._upper())

    def _upper(self) -> Tensor:
        return self.parameter.detach().view(torch.int16)

    @property
    def gradient(self) -> Tensor | None:
        """As `Master.gradient`."""
        if self._gradient is not None:
            self._gradient = self._gradient.float()
        return self._gradient

    @gradient.setter
    def gradient(self, value: Tensor | None) -> None:
        self._gradient = value

    @property
    def has_gradient(self) -> bool:
        """As `Master.has_gradient`."""
        return self._gradient is not None

    @property
    def gradient_bytes(self) -> int:
        """As `Master.gradient_bytes`."""
        return 0 if self._gradient is None else self._gradient.nbytes

    def norm_input(self) -> Tensor:
        """As `Master.norm_input`."""
        assert self._gradient is not None
        return torch.linalg.vector_norm(self._gradient, dtype=torch.float32)

    def open(self, factor: Tensor) -> None:
        """Give `stepped` the weights, and the gradient times a factor."""
        gradient = self.gradient
        self._gradient = None
        self.stepped.data = self.value()
        self.stepped.grad = None if gradient is None else gradient.mul_(factor)

    def close(self) -> None:
        """Take what the optimizer has made of them."""
        self.set_value(self.stepped.detach())
        self.stepped.grad = None
        self.stepped.data = self._nothing()

    def _take(self, parameter: Tensor) -> None:
        """Add the finished gradient of the parameter."""
        if parameter.grad is None:
            return
        if self._gradient is None:
            self._gradient = parameter.grad
        else:
            self._gradient = self._gradient.float().add_(parameter.grad)
        parameter.grad = None

    def remove_hook(self) -> None:
        """As `Master.remove_hook`."""
        self._hook.remove()


def master_of(parameter: nn.Parameter, *, offload: bool) -> Master:
    """The master of a parameter; `offload` puts that of one on a card into memory of the host."""
    away = offload and parameter.device.type != "cpu"
    if away or parameter.dtype == torch.float16:
        return WideMaster(parameter, away=away)
    if parameter.dtype != torch.bfloat16:
        return Master(parameter)
    halves = parameter.dim() > 0 and parameter.is_contiguous()
    return SplitMaster(parameter) if halves else WideMaster(parameter, away=False)


def _halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 bits of float32 numbers, as views."""
    pair = whole.view(torch.int16).view(*whole.shape, 2)
    return pair[..., 0], pair[..., 1]


def _pinned(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in pinned memory of the host, of which a card reads and writes at full speed. PyTorch
    changes the dtype of what crosses over on the CPU, in memory that is not pinned, so it must be
    the same on both sides. Freed blocks are used again once the card has read them."""
    return torch.empty(value.shape, dtype=dtype, pin_memory=True).copy_(value)
