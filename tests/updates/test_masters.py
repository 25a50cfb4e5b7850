"""Master weights: float32 behind parameters of 16 bits."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from groupwise.kernels import Reference, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.settings import OptimizerSettings
from groupwise.updates import MasterOptimizer, optimizer
from groupwise.updates.masters import SplitMaster, WideMaster, master_of


def bits(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def values(*shape: int, seed: int = 0) -> Tensor:
    """Float32 numbers of every size, either sign, and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=generator)
    found *= torch.logspace(-37, 37, shape[-1])
    found[0, 0], found[0, 1] = 0.0, -0.0
    return found


def test_a_split_master_holds_every_float32_in_two_halves() -> None:
    master = SplitMaster(nn.Parameter(torch.zeros(300, 200, dtype=torch.bfloat16)))
    wanted = values(300, 200)
    master.set_value(wanted)
    assert torch.equal(bits(master.value()), bits(wanted))
    tie = (bits(wanted) & 0xFFFF) == 0x8000
    assert torch.equal(master.parameter[~tie], wanted.to(torch.bfloat16)[~tie])
    assert sum(t.nbytes for t in master.held) == 2 * wanted.numel()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_split_master_rounds_ties_away_from_zero(sign: float) -> None:
    """Of 1 + k/256, bfloat16 holds those with even k; half a step up or down is a tie."""
    master = SplitMaster(nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    tie = sign * torch.tensor(
        [1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 - 2**-23, 1 + 1 / 256 + 2**-23]
    )
    master.set_value(tie)
    assert (sign * master.parameter.float()).tolist() == [1 + 2 / 256, 1 + 4 / 256, 1, 1 + 2 / 256]
    assert torch.equal(bits(master.value()), bits(tie))


def test_the_last_numbers_round_to_infinity_as_they_do_elsewhere() -> None:
    master = SplitMaster(nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    most = torch.finfo(torch.float32).max
    master.set_value(torch.tensor([most, -most]))
    assert master.parameter.tolist() == [math.inf, -math.inf]
    assert master.value().tolist() == [most, -most]


def stepped(kind: type, name: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[Tensor]:
    """The masters and norms of five steps, each of two microbatches, of three parameters."""

    def made(parameter: nn.Parameter, *, offload: bool) -> Any:
        return (
            SplitMaster(parameter) if kind is SplitMaster else WideMaster(parameter, away=offload)
        )

    monkeypatch.setattr(optimizer, "master_of", made)
    generator = torch.Generator().manual_seed(0)
    named = {
        key: nn.Parameter(torch.randn(*shape, generator=generator).to(torch.bfloat16))
        for key, shape in (("a", (70, 100)), ("b", (33,)), ("c", (5, 7, 300)))
    }
    settings = OptimizerSettings(name=name, learning_rate=1e-3, **given)
    adam, norms = MasterOptimizer(named, settings), []
    for step in range(5):
        for _ in range(1 + step % 2):
            for parameter in named.values():
                noise = torch.randn(parameter.shape, generator=generator)
                (parameter * noise.to(torch.bfloat16)).sum().backward()
        norms.append(adam.step()[0])
    return [*(m.value() for m in adam.masters.values()), *named.values(), torch.tensor(norms)]


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_a_split_master_steps_as_a_float32_copy_does(
    name: str, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with one microbatch and with two, whatever fits into one piece of the step, and
    by the kernel. Norms are PyTorch's in each, because the kernel rounds less."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (extra quant)")
    copies = stepped(WideMaster, name, monkeypatch, max_grad_norm=limit, weight_decay=0.1)
    backends = [Reference()] * 3 + [Auto(without={"gradient_norm"})]
    for most, backend in zip((1 << 24, 8000, 1, 1), backends, strict=True):
        monkeypatch.setattr(optimizer, "STEPPED", most)
        with using(backend):
            halves = stepped(SplitMaster, name, monkeypatch, max_grad_norm=limit, weight_decay=0.1)
        assert all(torch.equal(*pair) for pair in zip(halves, copies, strict=True))


def test_gradients_are_kept_in_16_bits_until_there_are_two() -> None:
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    master = master_of(weight, offload=False)
    large, small = torch.tensor(256.0).bfloat16(), torch.tensor(1 / 256).bfloat16()
    (weight * large).sum().backward()
    assert master.grad is not None and master.grad.nbytes == 2 * weight.numel()
    (weight * small).sum().backward()
    assert master.grad.nbytes == 4 * weight.numel()
    assert weight.grad is None and master.grad is not None
    assert float(master.grad[0, 0]) == 256 + 1 / 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_of_float32_masters_resumes_to_the_bit(dtype: torch.dtype) -> None:
    """As an unbroken run, in a new model whose parameters are still those of the start."""
    results = []
    for break_after in (None, 3):
        torch.manual_seed(0)
        named = {"w": nn.Parameter(torch.randn(40, 50).to(dtype))}
        adam = MasterOptimizer(named, OptimizerSettings(learning_rate=1e-3))
        for step in range(6):
            if step == break_after:
                state = adam.state()
                assert state["masters"]["w"].dtype == torch.float32
                named = {"w": nn.Parameter(torch.zeros(40, 50, dtype=dtype))}
                adam = MasterOptimizer(named, OptimizerSettings(learning_rate=1e-3))
                adam.restore(state)
                assert torch.equal(named["w"], adam.masters["w"].value().to(dtype))
            named["w"].square().sum().backward()
            adam.step()
        results.append(adam.masters["w"].value())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        (torch.ones(3, 4, dtype=torch.bfloat16), SplitMaster),
        (torch.ones(3, 4, dtype=torch.bfloat16).t(), WideMaster),
        (torch.ones((), dtype=torch.bfloat16), SplitMaster),
        (torch.ones(1, 3, dtype=torch.bfloat16).t(), SplitMaster),
        (torch.ones(3, 4, dtype=torch.float16), WideMaster),
    ],
    ids=["bfloat16", "not contiguous", "a number", "one column", "float16"],
)
def test_bfloat16_is_split_where_its_halves_can_be_seen(parameter: Tensor, kind: type) -> None:
    weight = nn.Parameter(parameter)
    adam = MasterOptimizer({"w": weight}, OptimizerSettings(learning_rate=1e-4))
    assert isinstance(adam.masters["w"], kind)
    for _ in range(20):
        weight.sum().backward()
        adam.step()
    assert abs(float(adam.masters["w"].value().mean()) - (1 - 20e-4)) < 1e-5
    assert torch.equal(weight, adam.masters["w"].value().to(weight.dtype))
    held = 0 if kind is SplitMaster else weight.numel()
    assert adam.masters["w"].stepped.numel() == held, "halves are put together during a step alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_model_and_masters_are_freed_with_their_optimizer(dtype: torch.dtype) -> None:
    """Without the garbage collector, which never finds cycles through the hooks of a parameter."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    adam = MasterOptimizer({"w": weight}, OptimizerSettings())
    weight.sum().backward()
    adam.step()
    left = [weakref.ref(each) for each in (weight, adam, adam.masters["w"])]
    del weight, adam
    assert [each() for each in left] == [None] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_overwritten_parameters_are_trained_on_from_what_they_hold(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(64, 64).to(dtype))
    adam = MasterOptimizer({"w": weight}, OptimizerSettings(learning_rate=1e-3))
    for _ in range(3):
        weight.float().square().sum().backward()
        adam.step()
    with torch.no_grad():
        weight.zero_()
    adam.reread()
    assert not adam.masters["w"].value().any()
    weight.sum().backward()
    adam.step()
    assert float(weight.detach().abs().max()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_an_optimizer_train_as_it_does(dtype: torch.dtype, copied: Any) -> None:
    weight = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    adam = MasterOptimizer({"w": weight}, OptimizerSettings(learning_rate=1e-3))
    weight.square().sum().backward()
    adam.step()
    other = copied(adam)
    for each in (adam, other):
        each.parameters["w"].square().sum().backward()
        assert each.step()[0] > 0
    assert torch.equal(adam.masters["w"].value(), other.masters["w"].value())


def test_a_step_that_was_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {n: nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for n in ("a", "b")}
    adam = MasterOptimizer(named, OptimizerSettings(learning_rate=1e-3))
    named["a"].sum().backward()
    with using(Reference()), monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(adam.adam, "step", _out_of_memory)
        adam.step()
    adam.clear()
    named["b"].sum().backward()
    adam.step()
    assert adam.masters["a"].stepped not in adam.adam.state
    assert float(adam.masters["a"].value().min()) == 1.0


def _out_of_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize("kernels", [Auto(), Reference()], ids=["kernels", "torch"])
def test_gradients_of_microbatches_are_summed_in_float32(kernels: Reference) -> None:
    """A token that occurs 257 times in each of four: bfloat16 has no such number. With kernels, the
    last two are added to the float32 sum without being rounded before."""
    embedding, linear = nn.Embedding(3, 256).bfloat16(), nn.Linear(256, 256, bias=False).bfloat16()
    model = nn.Sequential(embedding, linear)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
        linear.weight.copy_(torch.eye(256))
    masters = MasterOptimizer(dict(model.named_parameters()), OptimizerSettings()).masters
    with using(kernels), kernels.training_layers(model):
        for _ in range(4):
            model(torch.full((257,), 1)).sum().backward()
    assert embedding.weight.grad is None and linear.weight.grad is None
    sums = [masters[name].grad for name in ("0.weight", "1.weight")]
    for found, exact in zip(
        sums, (torch.tensor([0.0, 4 * 257, 0.0])[:, None], 4 * 257), strict=True
    ):
        assert found is not None and found.dtype == torch.float32
        assert ((found - exact).abs() <= 4).all()
    if isinstance(kernels, Auto) and compiled() is not None:
        assert (sums[0][1] == 2 * (256 + 257)).all()


@pytest.mark.parametrize("another", [False, True], ids=["removed", "replaced"])
def test_a_gradient_ends_with_its_master(another: bool) -> None:
    """Otherwise kernels would add later ones to it, and the next optimizer would have none."""
    layer = nn.Embedding(3, 256).bfloat16()
    master: SplitMaster | None = SplitMaster(layer.weight)
    with using(Auto()), Auto().training_layers(layer):
        for _ in range(2):
            layer(torch.tensor([1])).sum().backward()
        assert master.grad is not None and master.grad.dtype == torch.float32
        if not another:
            master.remove_hook()
        master = None
        following = SplitMaster(layer.weight) if another else None
        layer(torch.tensor([1])).sum().backward()
    found = layer.weight.grad if following is None else following.grad
    assert found is not None and found.float().sum() == 256
