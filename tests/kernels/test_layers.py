"""Linear layers of an update by products of our own: the numbers and gradients of PyTorch's."""

from __future__ import annotations

import copy
import importlib.util
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from groupwise.algorithms.losses import FunctionObjective
from groupwise.kernels import Reference, active, cpu, layers, onednn, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.kernels.cpu import matmul, rms_norm, rms_norm_backward, swiglu
from groupwise.kernels.layers import use_kernels
from groupwise.models import AdapterSettings, Policy, load_policy, save_policy
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Batch, Outputs
from groupwise.updates import OptimizerSettings, TorchLearner

pytestmark = pytest.mark.skipif(
    not isinstance(active(), Auto) or compiled() is None, reason="there are no CPU kernels here"
)


def turned(x: Tensor) -> Tensor:
    """The same matrix, laid out by columns."""
    return x.t().contiguous().t()


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of x and of the parameters that learn."""
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = [p for p in layer.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *weights])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("shape", [(2, 37, 300), (300,), (0, 300)])
def test_output_and_gradients_are_those_of_the_layer(
    bias: bool, learns: bool, shape: tuple[int, ...]
) -> None:
    layer = nn.Sequential(nn.Linear(300, 260, bias=bias), nn.Tanh(), nn.Linear(260, 300))
    layer[0].requires_grad_(learns)
    x = torch.randn(shape)
    with use_kernels(layer):
        found = gradients(layer, x)
    wanted = gradients(copy.deepcopy(layer).double(), x.double())
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_the_input_of_a_frozen_layer_is_not_saved() -> None:
    layer, x = nn.Linear(300, 260).requires_grad_(False), torch.randn(37, 300, requires_grad=True)
    saved: list[Tensor] = []
    with (
        use_kernels(nn.ModuleList([layer])),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: x),
    ):
        layer(x)
    assert not saved


def parts() -> list[tuple[nn.Module, Tensor]]:
    """A norm, two feed-forwards and an embedding as models have them, and what each is given."""
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=5, hidden_size=80, intermediate_size=144)
    with_bias = LlamaConfig(
        num_attention_heads=5, hidden_size=80, intermediate_size=16, mlp_bias=True
    )
    states = 3 * torch.randn(1, 5, 80)
    norm = LlamaRMSNorm(80, 1e-3)
    nn.init.normal_(norm.weight)
    padded = nn.Embedding(9, 80, padding_idx=8)
    nn.init.normal_(padded.weight)  # with a zero row, its gradient would be zero anyway
    return [
        (norm, states),
        (LlamaMLP(config), states),
        (LlamaMLP(with_bias), states),
        (nn.Embedding(9, 80), torch.tensor([[3, 3, 8, 0, 3]])),
        (padded, torch.tensor([[3, 3, 8, 0, 3]])),
    ]


@pytest.mark.parametrize("index", range(5))
def test_norms_feed_forwards_and_embeddings(index: int) -> None:
    """Twice, as two microbatches are: gradients are added to those that are there."""
    part, x = parts()[index]
    wide = copy.deepcopy(part).double()
    own = use_kernels(nn.ModuleList([part]))
    results = []
    for module in (part, wide):
        given = x
        if x.is_floating_point():
            given = x.to(next(module.parameters()).dtype, copy=True).requires_grad_()
        with own if module is part else nullcontext():
            assert ("forward" in vars(module)) == (module is part)
            for factor in (1.0, -0.3):
                out = module(given)
                (out.square().sum() * factor).backward()
        grads = [p.grad for p in module.parameters()]
        results.append([out, *grads, *([given.grad] if given.requires_grad else [])])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("index", range(3))
def test_norms_and_feed_forwards_in_16_bits_round_where_the_models_do(index: int) -> None:
    part, x = parts()[index]
    part, x = part.bfloat16(), x.bfloat16().requires_grad_()
    wide, wide_x = copy.deepcopy(part).double(), x.detach().double().requires_grad_()
    wanted = part(x)
    wide(wide_x).square().sum().backward()
    with use_kernels(nn.ModuleList([part])):
        assert "forward" in vars(part)
        found = part(x)
        found.square().sum().backward()
    # Neighbours at most, where the sum of a mean was taken in another order.
    assert (found == wanted).float().mean() > 0.97
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
    for one, other in zip([x, *part.parameters()], [wide_x, *wide.parameters()], strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.bfloat16
        assert (one.grad.double() - other.grad).norm() <= 0.02 * other.grad.norm()


class Shifted(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1e-3 * hidden_states


class Other(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class WithAGate(LlamaMLP):
    """A parameter that does nothing yet."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.more = nn.Parameter(torch.zeros(()))


class Gated(LlamaRMSNorm):
    """As in Mamba's layers; without a gate it is the plain norm."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


class Mandatory(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states * gate)


class Failing(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise RuntimeError(hidden_states.shape)


def begun_at_nothing() -> LlamaMLP:
    """Whatever its activation is, it gives 0."""
    config = LlamaConfig(
        hidden_act="gelu", num_attention_heads=5, hidden_size=80, intermediate_size=144
    )
    module = LlamaMLP(config)
    nn.init.zeros_(module.down_proj.weight)
    return module


class Dropping(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(input, 0.5, self.training))


def test_an_adapters_dropout_does_not_hide_a_feed_forward() -> None:
    module = LlamaMLP(LlamaConfig(num_attention_heads=5, hidden_size=80, intermediate_size=144))
    module.gate_proj = Dropping(80, 144)
    own = use_kernels(nn.ModuleList([module]))
    assert module.gate_proj.training
    with own:
        assert "forward" in vars(module)


def released_during_forward(module: LlamaMLP, x: Tensor) -> bool:
    """Whether what the last product was given is gone before the backward pass."""
    given: list[weakref.ref[Any]] = []
    handle = module.down_proj.register_forward_pre_hook(
        lambda _, inputs: given.append(weakref.ref(inputs[0].untyped_storage()))
    )
    out = module(x.requires_grad_())
    handle.remove()
    gone = given[0]() is None
    out.square().sum().backward()
    return gone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feed_forward_keeps_gate_and_up_alone_with_the_same_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """silu(gate) · up is computed again, to the same bits; not so within other hooks."""
    torch.manual_seed(0)
    module = LlamaMLP(LlamaConfig(num_attention_heads=5, hidden_size=80, intermediate_size=1024))
    module, x = module.to(dtype), torch.randn(1, 9, 80, dtype=dtype)
    found = []
    for again in (True, False):
        module.zero_grad()
        if not again:
            monkeypatch.setattr(layers, "_computed_again", lambda *_: nullcontext())
        with use_kernels(nn.ModuleList([module])):
            assert released_during_forward(module, x) is again
        found.append([p.grad for p in module.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_what_a_layer_changes_in_place_is_not_computed_again() -> None:
    """It would come out as it was before, and the gradient of the layer's weight with it."""
    module = LlamaMLP(LlamaConfig(num_attention_heads=5, hidden_size=80, intermediate_size=1024))
    module.down_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].mul_(2.0),))
    x, found = torch.randn(1, 9, 80), []
    for own in (use_kernels(nn.ModuleList([module])), nullcontext()):
        module.zero_grad()
        with own:
            module(x).square().sum().backward()
        found.append(module.down_proj.weight.grad)
    torch.testing.assert_close(*found)


def test_feed_forwards_with_an_adapter_have_the_kernel(tmp_path: Path) -> None:
    """Also where the model is in 16 bits and its adapter in float32, or in 4 bits."""
    wide = small_policy(hidden=64, layers=1, heads=2, key_value_heads=1, feed_forward=128)
    save_policy(wide, tmp_path)
    ways: list[dict[str, Any]] = [{"dtype": "bfloat16"}]
    if importlib.util.find_spec("bitsandbytes"):
        ways.append({"quantization": "nf4"})
    for how in ways:
        model = load_policy(tmp_path, adapter=AdapterSettings(rank=4), **how).model
        inner = model.get_base_model().model.layers[0].mlp
        with use_kernels(model):
            assert "forward" in vars(inner)


def test_what_computes_something_else_is_left_alone() -> None:
    config = LlamaConfig(num_attention_heads=5, hidden_size=80, intermediate_size=144)
    strange = [
        Shifted(80),
        Other(config),
        WithAGate(config),
        Gated(80),
        Mandatory(80),
        Failing(80),
        begun_at_nothing(),
        nn.Embedding(9, 80, max_norm=1.0),
        nn.Embedding(9, 80, sparse=True),
        nn.Embedding(9, 80, scale_grad_by_freq=True),
        LlamaRMSNorm(80).double(),
        LlamaMLP(config).half(),
        LlamaMLP(LlamaConfig(num_attention_heads=5, hidden_size=80, intermediate_size=100)),
        nn.Linear(300, 300).half(),
        nn.Embedding(9, 80).half(),
    ]
    with use_kernels(nn.ModuleList(strange)):
        assert not any("forward" in vars(module) for module in strange)


def test_a_program_whose_default_type_is_another_tries_kernels_all_the_same() -> None:
    modules = nn.ModuleList([Shifted(80), LlamaRMSNorm(80)])
    torch.set_default_dtype(torch.float64)
    try:
        with use_kernels(modules):
            assert ["forward" in vars(module) for module in modules] == [False, True]
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_has_become_another_type_is_left_alone() -> None:
    """A kernel for float32 would read beyond the end of half as many numbers of 16 bits."""
    model = nn.ModuleList([nn.Linear(300, 300), LlamaRMSNorm(80), nn.Embedding(9, 80)])
    own = use_kernels(model)
    model.double()
    with own:
        assert not any("forward" in vars(module) for module in model)
    model.float()
    with own:
        assert all("forward" in vars(module) for module in model)


def test_inputs_of_another_type_go_through_the_layer_itself() -> None:
    norm, layer = LlamaRMSNorm(80), nn.Linear(300, 300)
    narrow, wide = torch.randn(2, 80).bfloat16(), torch.randn(2, 300).double()
    wanted = norm(narrow)
    with use_kernels(nn.ModuleList([norm, layer])):
        found = norm(narrow)
        with pytest.raises(RuntimeError):
            layer(wide)
        with pytest.raises((ValueError, TypeError, BeartypeCallHintViolation)):
            layer(torch.randn(2, 200))
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_a_block_inside_the_same_block_changes_nothing() -> None:
    model = nn.ModuleList([nn.Linear(300, 300), LlamaRMSNorm(80)])
    model[1].forward = (kept := lambda x: x)
    own = use_kernels(model)
    with own:
        with own:
            assert "forward" in vars(model[0])
        assert "forward" in vars(model[0])
        assert vars(model[1])["forward"] is kept
    assert "forward" not in vars(model[0])


def test_a_copy_has_weights_of_its_own() -> None:
    model = nn.ModuleList([nn.Linear(300, 300)])
    own, x = use_kernels(model), torch.randn(2, 300)
    other, same = copy.deepcopy((own, model))
    nn.init.zeros_(same[0].weight)
    nn.init.zeros_(same[0].bias)
    with own, other:
        assert model[0](x).any()
        assert not same[0](x).any()
        assert not copy.deepcopy(same)[0](x).any()


def test_gradients_of_a_weight_laid_out_by_columns() -> None:
    """It has a gradient laid out like it, which is added to by PyTorch."""
    layer = nn.Linear(300, 300, bias=False)
    layer.weight = nn.Parameter(turned(layer.weight.detach()))
    x = torch.randn(5, 300)
    with use_kernels(nn.ModuleList([layer])):
        for _ in range(2):
            layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, (2 * x.sum(0)).expand(300, 300))


def test_what_does_not_belong_together_is_refused() -> None:
    x, other = torch.ones(4, 16), torch.ones(4, 32)
    for call in (
        lambda: matmul(x, other),
        lambda: matmul(x, x.t(), onto=other),
        lambda: matmul(x, x.t().double()),
        lambda: swiglu(x, x.bfloat16()),
        lambda: swiglu(x, other),
        lambda: swiglu(x[:, :3], x[:, :3]),
        lambda: rms_norm_backward(x, other[0], 1e-6, x),
        lambda: rms_norm_backward(x, x[0], 1e-6, other),
        lambda: rms_norm(x.half(), x[0].half(), 1e-6),
    ):
        with pytest.raises((ValueError, TypeError, BeartypeCallHintViolation)):
            call()


def test_a_trial_leaves_modes_and_gradients_as_they_were() -> None:
    model = nn.ModuleList(
        [LlamaRMSNorm(80), LlamaMLP(LlamaConfig(num_attention_heads=5, hidden_size=80))]
    )
    model[0].eval()
    use_kernels(model)
    assert [module.training for module in model] == [False, True]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_layers_are_used_where_they_suit_and_given_back() -> None:
    inside = [nn.Linear(300, 300), nn.Linear(8, 8), nn.Linear(300, 300).to(torch.bfloat16)]
    model = nn.ModuleList(inside)
    with pytest.raises(KeyError), use_kernels(model):
        narrow = torch.bfloat16 not in onednn.dtypes() or cpu.multiplies_tiles()
        assert ["forward" in vars(layer) for layer in model] == [True, False, narrow]
        raise KeyError
    assert not any("forward" in vars(layer) for layer in model)


def test_layers_in_16_bits_have_the_output_and_the_gradients_of_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where oneDNN does not multiply bfloat16."""
    monkeypatch.setattr(onednn, "dtypes", lambda: frozenset({torch.float32}))
    for bias in (True, False):
        layer = nn.Linear(300, 260, bias=bias).bfloat16()
        x, found = torch.randn(2, 7, 300).bfloat16().requires_grad_(), []
        for context in (nullcontext(), use_kernels(nn.ModuleList([layer]))):
            with context:
                assert ("forward" in vars(layer)) == bool(found)
                out = layer(x)
                out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16())
            found.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
            x.grad = None
            layer.zero_grad()
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype == torch.bfloat16
            torch.testing.assert_close(one, other, atol=2e-2, rtol=1e-2)


def test_a_rollout_in_16_bits_multiplies_as_an_update_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN does not multiply bfloat16; float32 layers are laid out for it as elsewhere."""
    monkeypatch.setattr(onednn, "dtypes", lambda: frozenset({torch.float32}))
    for dtype, name in ((torch.bfloat16, "_linear"), (torch.float32, "_forward.<locals>.forward")):
        model = nn.Sequential(nn.Linear(300, 260)).to(dtype)
        with Auto().inference_layers(model, rows=8), torch.inference_mode():
            assert vars(model[0])["forward"].__qualname__ == name
            assert model(torch.randn(8, 300).to(dtype)).dtype == dtype
        assert "forward" not in vars(model[0])


def test_without_a_compiler_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "compiled", lambda: None)
    model = nn.Sequential(nn.Linear(300, 300))
    with use_kernels(model):
        assert "forward" not in vars(model[0])


def two_prompts() -> tuple[Policy, Batch]:
    """A policy whose layers are large enough, and what it learns from."""
    policy = small_policy(hidden=256, layers=2, heads=2, key_value_heads=2, feed_forward=384)
    tokens = torch.randint(12, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        prompts=(tokens[0, :5], tokens[1, :4]),
        group=torch.tensor([0, 1]),
        tokens=tokens,
        length=torch.tensor([9, 9]),
        mask=torch.ones(2, 9, dtype=torch.bool),
        advantage=torch.ones(2, 9),
        weight=torch.ones(2, 9),
    )
    return policy, batch


NLL = FunctionObjective(loss=lambda outputs, batch: -outputs["logp"])


def test_layers_may_be_computed_again_in_the_backward_pass() -> None:
    policy, batch = two_prompts()
    wanted = TorchLearner(policy, optimizer=OptimizerSettings()).gradient(batch, NLL)
    again = TorchLearner(policy, optimizer=OptimizerSettings(), gradient_checkpointing=True)
    assert (again.gradient(batch, NLL) - wanted).norm() <= 1e-6 * wanted.norm()


def test_a_batch_that_was_not_finished_leaves_nothing() -> None:
    policy, batch = two_prompts()
    learner = TorchLearner(policy, optimizer=OptimizerSettings(), tokens_per_microbatch=20)
    wanted, calls = learner.gradient(batch, NLL), iter([True, False])

    def failing(outputs: Outputs, batch: Batch) -> Tensor:
        if next(calls):
            return -outputs["logp"]
        raise KeyError

    with pytest.raises(KeyError):
        learner.gradient(batch, FunctionObjective(loss=failing))
    assert torch.equal(learner.gradient(batch, NLL), wanted)


def test_an_objective_may_ask_for_log_probabilities() -> None:
    policy, batch = two_prompts()
    learner = TorchLearner(policy, optimizer=OptimizerSettings())

    def asking(outputs: Outputs, part: Batch) -> Tensor:
        learner.evaluate(batch, {"logp"})["logp"]
        return -outputs["logp"]

    asking_objective = FunctionObjective(loss=asking)
    assert torch.equal(learner.gradient(batch, asking_objective), learner.gradient(batch, NLL))
    assert not any("forward" in vars(module) for module in learner.model.modules())


def test_an_update_uses_them_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = two_prompts()
    calls: list[bool] = []

    def counted(left: Tensor, right: Tensor, *, onto: Tensor | None = None) -> Tensor:
        calls.append(onto is not None)
        return matmul(left, right, onto=onto)

    def gradient(microbatches: int) -> Tensor:
        learner = TorchLearner(
            policy, optimizer=OptimizerSettings(), tokens_per_microbatch=40 // microbatches
        )
        return learner.gradient(batch, NLL)

    for module in (layers, cpu):
        monkeypatch.setattr(module, "matmul", counted)
    own = gradient(1)
    products, head = 7 * 2, 1  # 7 of a layer
    assert (len(calls), sum(calls)) == (3 * (products + head), 0)
    calls.clear()
    in_two = gradient(2)
    assert (len(calls), sum(calls)) == (2 * 3 * (products + head), products + head)
    calls.clear()
    with using(Reference()):
        plain = gradient(1)
    assert not calls
    assert (own - plain).norm() <= 1e-5 * plain.norm()
    assert (in_two - plain).norm() <= 1e-5 * plain.norm()
