"""A device that computes on the CPU and raises where its tensors meet tensors of the CPU, as a card
does. `python pretended_card.py FOLDER` runs `CASES` on the CPU and on it, and prints the metrics.

What a card forgives is allowed: scalars of the CPU in arithmetic, indices on the CPU, and copies.
It is a back end of the whole process, so tests start it in one of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from groupwise.errors import first_line
from small_runs import prepared, timeless

NAME = "card"
COPIES = {"copy_", "_to_copy", "index"}
READS = {"_local_scalar_dense", "equal", "is_same_size"}
WAITS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
"""Operations for which the CPU waits until the card has computed their operands; so it does where
it reads a list, a copy, or what is chosen by a mask."""
waits = [0]
"""How often it has waited."""

CASES: dict[str, list[str]] = {
    "softrank": [],
    "ppo": ["algorithm.name=ppo"],
    "stops": ["sampling.top_p=0.9", "sampling.stop=['1']", "algorithm.name=dapo"],
    "generate": ["engine.name=generate", "sampling.top_k=5", "update.minibatches=2"],
    "bfloat16": ["model.dtype=bfloat16", "algorithm.name=gspo"],
}
"""Settings of runs that together go through most of a step."""


SAMPLED = {
    "plain": ["sampling.max_tokens=8"],
    "truncated": ["sampling.max_tokens=8", "sampling.top_p=0.9"],
    "stops": ["sampling.max_tokens=8", "sampling.stop=['1', '23']"],
}
"""Settings of runs whose sampling is counted."""


class CardTensor(torch.Tensor):
    """A tensor of the pretended card; `held` is where its numbers are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> CardTensor:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        waits[0] += 1
        return self.held.tolist()


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, its results on the card where an operand or `device` is there.

    Raises:
        RuntimeError: tensors of both devices meet.
    """
    name = func.overloadpacket.__name__
    flat, form = pytree.tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, CardTensor)]
    others = [each for each in tensors if not isinstance(each, CardTensor) and each.dim() > 0]
    if ours and others and name not in COPIES:
        raise RuntimeError(f"{func}: tensors of the card and of the CPU meet")
    asked = kwargs.get("device")
    here = bool(ours) if asked is None else torch.device(asked).type == NAME
    plain = [
        each.held
        if isinstance(each, CardTensor)
        else torch.device("cpu")
        if isinstance(each, torch.device)
        else each
        for each in flat
    ]
    plain_args, plain_kwargs = pytree.tree_unflatten(plain, form)
    result = func(*plain_args, **plain_kwargs)
    waits[0] += bool(ours) and (name in WAITS or not here or _chosen_by_mask(name, plain))
    if name == "copy_":
        return args[0]
    if not here or name in READS:
        return result
    known = {id(each.held): each for each in ours}

    def moved(each: torch.Tensor) -> torch.Tensor:
        return known[id(each)] if id(each) in known else CardTensor(each)

    return pytree.tree_map_only(torch.Tensor, moved, result)


def _chosen_by_mask(name: str, operands: list[Any]) -> bool:
    """Whether the size of a result depends on numbers of the card."""
    masks = (
        each for each in operands if isinstance(each, torch.Tensor) and each.dtype == torch.bool
    )
    return name == "index" and any(mask.dim() for mask in masks)


class _Dispatch(TorchDispatchMode):
    """Factories with `device="card"` have no operand that is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """`torch.tensor` moves data below every dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        return func(*args, **kwargs)


class _Backend:
    """What torch asks of the module of a back end; its random numbers are those of the CPU."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = manual_seed = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.empty(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)


@contextmanager
def pretended_card() -> Iterator[None]:
    """Inside, `best_device` is the card."""

    def enter(self: Any) -> None:
        # Wrappers have no inference tensors; without a gradient is what is left of the mode.
        self.instead = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)
        self.instead.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self.instead.__exit__(*error)

    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("groupwise") and hasattr(module, "best_device"):
                card = patch.object(module, "best_device", lambda: torch.device(NAME, 0))
                stack.enter_context(card)
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", enter))
        stack.enter_context(patch.object(torch.inference_mode, "__exit__", leave))
        # Otherwise `.to` makes a parameter for each place of a tied weight.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        stack.enter_context(_Factories())
        stack.enter_context(_Dispatch())
        yield


def rows(folder: Path, *settings: str) -> list[dict[str, Any]] | str:
    """The metrics of a run of two steps, or how it ended."""
    try:
        run = prepared(folder, "steps=2", "model.kernels=torch", *settings)
        try:
            run.trainer.run()
        finally:
            run.close()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return timeless(folder)


def waits_in_sampling(folder: Path, *settings: str) -> int:
    """How often the CPU waits for the card while the completions of a step are sampled."""
    run = prepared(folder, "steps=1", "model.kernels=torch", *settings)
    generate, counted = run.engine.generate, 0

    def counting(*args: Any, **given: Any) -> Iterator[Any]:
        nonlocal counted
        found = iter(generate(*args, **given))
        while True:
            before = waits[0]
            try:
                group = next(found)
            except StopIteration:
                return
            finally:
                counted += waits[0] - before
            yield group

    with patch.object(run.engine, "generate", counting):
        run.trainer.run()
    run.close()
    return counted


def mixing(text: str) -> float:
    """A reward whose author moved a tensor to the device and forgot another."""
    there = torch.ones(2, device=torch.device(NAME, 0))
    return float((there + torch.ones(2)).sum())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    _setup_privateuseone_for_python_backend(NAME, _Backend)  # pyright: ignore
    found: dict[str, Any] = {}
    for case, settings in CASES.items():
        found[case] = {"cpu": rows(folder / f"{case}-cpu", *settings)}
        with pretended_card():
            found[case][NAME] = rows(folder / f"{case}-card", *settings)
    with pretended_card():
        found["waits"] = {
            case: [
                waits_in_sampling(folder / f"{case}-{group}", *settings, f"group_size={group}")
                for group in (2, 12)
            ]
            for case, settings in SAMPLED.items()
        }
        try:
            mixing("")
            found["mixing"] = "passed"
        except RuntimeError as error:
            found["mixing"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
