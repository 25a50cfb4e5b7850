"""The optimizer step in two halves of 16 bits, and the norm of a gradient, against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from groupwise.kernels import Backend, Reference, using
from groupwise.kernels.adamw import BLOCK, can_step, norm, split_adamw
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.settings import OptimizerSettings
from groupwise.updates import MasterOptimizer
from groupwise.updates.masters import SplitMaster

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no g++")

SIZES = (1, 7, 8, 9, 15, 16, 17, 24, 31, 33, 4097, 20005)
"""Some fill no vector, some none of PyTorch's, and some need several threads."""


def made(**given: Any) -> MasterOptimizer:
    """Weights of every size, either sign, and both zeros."""
    named = {}
    for size in SIZES:
        weight = torch.randn(size, generator=torch.Generator().manual_seed(size))
        weight *= torch.logspace(-6, 3, size)
        weight[2:4] = torch.tensor([0.0, -0.0])[: max(0, size - 2)]
        named[str(size)] = nn.Parameter(weight.bfloat16())
    return MasterOptimizer(named, OptimizerSettings(learning_rate=1e-3, **given))


def give(adam: MasterOptimizer, *, scale: float, step: int) -> None:
    """Gradients from tiny to huge and 0, some as of one microbatch and some as of two."""
    generator = torch.Generator().manual_seed(step)
    for place, master in enumerate(adam.masters.values()):
        size = master.parameter.shape
        spread = 10 ** (4 * torch.randn(size, generator=generator))
        grad = torch.randn(size, generator=generator) * spread * scale
        grad *= torch.rand(size, generator=generator) > 0.2
        master.grad = grad if (place + step) % 2 else grad.bfloat16()


def stepped(
    backends: tuple[Backend, ...], *, scale: float = 1.0, factor: float = 0.37, **given: Any
) -> dict[str, Any]:
    """The state after a step by each backend, resumed in between, with the parameters."""
    adam = made(**given)
    for step, backend in enumerate(backends):
        before, adam = adam, made(**given)
        adam.restore(before.state())
        give(adam, scale=scale, step=step)
        with using(backend):
            adam._take_step(factor)
    parameters = {name: p.detach() for name, p in adam.parameters.items()}
    return {**adam.state(), "parameters": parameters}


def assert_same(found: Any, wanted: Any) -> None:
    """Every number to the bit, and its place in the state."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert torch.equal(found.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))
    else:
        assert found == wanted


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e8])
def test_a_step_in_place_is_the_step_of_pytorch(
    betas: tuple[float, float], decay: float, scale: float
) -> None:
    how: dict[str, Any] = {"betas": betas, "weight_decay": decay, "scale": scale}
    wanted = stepped((Reference(),) * 4, **how)
    assert_same(stepped((Auto(),) * 4, **how), wanted)
    assert_same(stepped((Reference(), Auto(), Reference(), Auto()), **how), wanted)
    assert all(weight.isfinite().all() for weight in wanted["masters"].values())


def test_a_master_that_rounds_up_keeps_its_value() -> None:
    """Ties away from zero, and lower halves from 2¹⁵ on, which belong to the number below."""
    tie = torch.tensor([1 + 1 / 256, 1 + 1 / 256 - 2**-23, -1 - 3 / 256, 1 + 1 / 256 + 2**-23])
    master = SplitMaster(nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    master.set_value(tie)
    rounded = master.parameter.detach().clone()
    moments = torch.zeros(4), torch.zeros(4)
    split_adamw(
        master.parameter, master.lower, torch.zeros(4), *moments,
        step=1, factor=1.0, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    assert torch.equal(master.value(), tie) and torch.equal(master.parameter, rounded)


def test_no_step_needs_float32_weights_where_a_kernel_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adam = made()
    with using(Auto()):
        assert adam.step_bytes("adamw") == 0
        assert adam.step_bytes("adamw_8bit") == 8 * sum(SIZES)
        before = adam.masters["9"].parameter._version
        give(adam, scale=1.0, step=0)
        monkeypatch.setattr(SplitMaster, "open", None)
        assert adam.step()[0] > 0
        assert adam.masters["9"].parameter._version > before
        assert all(master.grad is None for master in adam.masters.values())
    for backend in (Reference(), Auto(without={"split_adamw"})):
        with using(backend):
            assert adam.step_bytes("adamw") == 8 * sum(SIZES)


def test_fake_parameters_are_planned_as_those_of_a_run() -> None:
    with FakeTensorMode():
        adam = made()
    for backend, size in ((Auto(), 0), (Reference(), 8 * sum(SIZES))):
        with using(backend):
            assert adam.step_bytes("adamw") == size


@pytest.mark.parametrize(
    "parameter",
    [
        torch.zeros(4),
        torch.zeros(4, dtype=torch.float16),
        torch.zeros(4, dtype=torch.bfloat16, device="meta"),
        torch.zeros(4, 3, dtype=torch.bfloat16).t(),
    ],
    ids=["float32", "float16", "meta", "transposed"],
)
def test_other_parameters_are_left_to_pytorch(parameter: Tensor) -> None:
    assert not can_step(parameter)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    def step(**other: Tensor) -> None:
        tensors = {
            "parameter": torch.zeros(4, 4, dtype=torch.bfloat16),
            "lower": torch.zeros(4, 4, dtype=torch.int16),
            **{name: torch.zeros(4, 4) for name in ("grad", "exp_avg", "exp_avg_sq")},
        }
        split_adamw(
            **{**tensors, **other}, step=1, factor=1.0,
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
        )  # fmt: skip

    step(grad=torch.zeros(4, 4).t())
    for other in (
        {"grad": torch.zeros(4, 3)},
        {"grad": torch.zeros(4, 4, dtype=torch.float16)},
        {"exp_avg": torch.zeros(4, 4, dtype=torch.bfloat16)},
        {"exp_avg_sq": torch.zeros(4, 8)[:, ::2]},
        {"lower": torch.zeros(4, 4)},
    ):
        with pytest.raises((ValueError, TypeError)):
            step(**other)


@pytest.mark.parametrize("size", [0, 1, 15, BLOCK - 1, BLOCK, BLOCK + 17, 40 * BLOCK + 5])
def test_the_norm_of_a_gradient_is_exact_with_any_number_of_threads(size: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, threads = norm(grad), torch.get_num_threads()
    assert found.dtype == torch.float32 and found.shape == ()
    torch.testing.assert_close(found.double(), grad.double().norm(), rtol=2e-7, atol=0)
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(norm(grad), found)
    finally:
        torch.set_num_threads(threads)


def test_the_norm_is_the_kernel_s_for_16_bits_alone() -> None:
    grad = torch.full((3, 1001), 1.0).bfloat16()
    for x in (grad, grad.t(), grad[:, ::2], grad.half()):
        wanted = Reference().gradient_norm(x)
        torch.testing.assert_close(Auto().gradient_norm(x), wanted, rtol=1e-6, atol=0)
    grad[0, 0] = torch.inf
    assert Auto().gradient_norm(grad).isinf()
    grad[0, 1] = torch.nan
    assert Auto().gradient_norm(grad).isnan()
