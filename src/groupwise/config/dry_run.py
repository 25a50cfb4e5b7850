"""The largest step of the rollout and of the update on fake tensors, counting live memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.config import Config
from groupwise.kernels import GroupCache, active
from groupwise.models import Backbone, groupwise_attention
from groupwise.rollouts.engines.attention import Decode, Prefill
from groupwise.rollouts.engines.group import PREFILL_TOKENS
from groupwise.rollouts.sampling import draw
from groupwise.types import Batch, Limits
from groupwise.updates import Pack, Projection, pack, plan, token_logprobs
from groupwise.updates.learner import update_mode


class Live(TorchDispatchMode):
    """Adds up the bytes of all live tensors created inside.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return made

    def leave_out(self, tensors: list[Tensor]) -> None:
        """Do not count these tensors, which existed before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def place_without_content(model: nn.Module, device: torch.device) -> None:
    """Replace a model's meta tensors by fake tensors on a device; shared tensors stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for named in (module._parameters, module._buffers):
            for name, old in named.items():
                if old is None:
                    continue
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
                named[name] = made.setdefault(id(old), new)  # pyright: ignore[reportArgumentType]


def microbatches(config: Config, *, prompt: int) -> list[tuple[Pack, bool]]:
    """Microbatches of an update, every completion as long as it may become, one of which has the
    peak: the first, and the largest of those that find gradients of others, as the flag says."""
    group, length = config.group_size, config.sampling.max_tokens
    tokens = config.update.tokens_per_microbatch
    enough = math.ceil(tokens / (prompt + group * length)) + 1
    prompts = min(math.ceil(config.prompts_per_step / config.update.minibatches), 2 * enough)
    shape = (prompts * group, length)
    batch = Batch(
        prompts=(torch.zeros(prompt, dtype=torch.long),) * prompts,
        group=torch.arange(prompts).repeat_interleave(group),
        tokens=torch.zeros(shape, dtype=torch.long),
        length=torch.full(shape[:1], length),
        mask=torch.ones(shape, dtype=torch.bool),
        advantage=torch.zeros(shape),
        weight=torch.zeros(shape),
    )
    first, *others = plan(batch, torch.arange(shape[0]), tokens=tokens)
    found = [(first, False)]
    if others:
        largest = max(others, key=len)
        found = [*(found if len(largest) < len(first) else []), (largest, True)]
    return [(pack(batch, rows, device=torch.device("cpu")), later) for rows, later in found]


def update_bytes(
    model: Any, laid: Pack, *, several: bool, mode: FakeTensorMode, device: torch.device
) -> dict[str, int]:
    """The memory of a microbatch in addition to the model.

    Args:
        model: of fake tensors; the optimizer's hooks are on it.
        laid: the microbatch.
        several: whether the gradients of another one are there already.
        mode: that made the model.
    """
    backbone = Backbone.of(model)
    update_mode(model)
    layers = before = 0
    kernels = active().training_layers(model)
    with (
        active().shapes_only(),
        kernels,
        Live() as live,
        groupwise_attention(backbone.model),
    ):
        live.leave_out([*model.parameters(), *model.buffers()])
        for _ in range(1 + several):
            before = live.now
            # Each has masks of its own, so they are not part of what the one before leaves.
            own = _without_content(laid, lambda real: mode.from_tensor(real).to(device))
            hidden = backbone.hidden(own.tokens, own.positions, own.attend)
            layers = live.now - before
            head = Projection(
                weight=backbone.head.weight,
                bias=backbone.head.bias,
                softcap=backbone.softcap,
                fp32_logits=backbone.fp32_logits,
                accumulate_into_grad=True,
            )
            logp, _ = token_logprobs(hidden.index_select(0, own.source), own.target, head)
            logp.sum().backward()
            del hidden, logp, own
    rest = live.peak - layers - before
    return {"gradients": before, "activations": layers, "logits and buffers": rest}


def rollout_bytes(
    config: Config, model: Any, *, limits: Limits, device: torch.device
) -> dict[str, int]:
    """The memory of the group engine with a full cache, in addition to the model."""
    prompt, group, length = limits.prompt, limits.group, limits.suffix
    used = min(limits.slots, max(config.engine.max_rows, group) // group)
    backbone = Backbone.of(model)
    model.eval()
    cache = GroupCache(
        slots=limits.slots,
        group=group,
        prompt_capacity=prompt,
        suffix_capacity=length,
        device=device,
    )
    with torch.no_grad(), active().shapes_only(), Live() as live:
        live.leave_out([*model.parameters(), *model.buffers()])
        new = max(1, min(used, PREFILL_TOKENS // prompt))
        places = torch.arange(prompt, device=device).repeat(new)
        attend = Prefill(cache=cache, slots=torch.arange(new, device=device), time=prompt)
        backbone.hidden(torch.zeros_like(places), places, attend)
        held = sum(t.nbytes for layer in cache.layers.values() for t in layer.tensors())
        row = torch.arange(used * group, device=device)
        time = torch.full_like(row, length - 1)
        decode = Decode(
            cache=cache,
            used=used,
            rows=row,
            slot=row // group,
            sample=row % group,
            time=time,
            clock=length - 1,
            prompt=prompt,
            suffix=length,
            aligned=False,
        )
        logits = backbone.logits(backbone.hidden(torch.zeros_like(row), time + prompt, decode))
        draw(logits, torch.zeros(len(row), device=device), config.sampling)
    return {"keys and values": held, "buffers": live.peak - held}


def _without_content(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass of tensors, converted all the way down."""
    if isinstance(value, Tensor):
        return convert(value)
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: _without_content(getattr(value, f.name), convert) for f in fields(value)}
        return replace(value, **given)
    return value
