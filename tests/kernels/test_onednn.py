"""oneDNN's products in place of PyTorch's: the same numbers, gradients included, and a model that
is as before after them."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from groupwise.algorithms.losses import FunctionObjective
from groupwise.kernels import onednn as module
from groupwise.kernels.onednn import reordered_layers
from groupwise.models import Policy
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts import GroupEngine
from groupwise.testing.engines import make_requests
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Batch, Sampling
from groupwise.updates import MasterOptimizer, OptimizerSettings, TorchLearner

pytestmark = pytest.mark.skipif(
    not module.dtypes(), reason="this build of PyTorch has no oneDNN for the CPU"
)
TYPES = [t for t in (torch.float32, torch.bfloat16) if t in module.dtypes()]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers that are large enough, with and without a bias, and one that is not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 384), nn.SiLU(), nn.Linear(384, 256, bias=False), nn.Linear(256, 8)
    ).to(dtype)


def laid_out(model: nn.Module) -> AbstractContextManager[None]:
    return reordered_layers(model, rows=64)


def gap(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@pytest.mark.parametrize("dtype", TYPES)
def test_laid_out_weights_give_the_same_numbers(dtype: torch.dtype) -> None:
    model, x = layers(dtype), numbers(5, 256, dtype=dtype)
    with torch.inference_mode():
        plain = model(x)
        with laid_out(model):
            assert [("forward" in vars(layer)) for layer in model] == [True, False, True, False]
            assert gap(model(x[None])[0], plain) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not any("forward" in vars(layer) for layer in model)


def test_gradients_flow_through_a_model_whose_weights_are_laid_out() -> None:
    model, x = layers(), numbers(5, 256)
    with laid_out(model):
        model(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_weights_are_laid_out_anew_for_every_block() -> None:
    model, x = layers(), numbers(5, 256)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(2)
            plain = model(x)
            with laid_out(model):
                assert gap(model(x), plain) < 1e-5


def test_a_model_is_as_before_after_an_error() -> None:
    model = layers()
    with pytest.raises(KeyError), laid_out(model):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in model)


def test_weights_beyond_the_room_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    monkeypatch.setattr(module, "COPY_LIMIT", model[0].weight.nbytes)
    with laid_out(model):
        assert [("forward" in vars(layer)) for layer in model] == [True, False, False, False]


@pytest.mark.parametrize("shape", [(256,), (0, 256), (1, 256), (2, 0, 256), (2, 3, 4, 256)])
def test_inputs_of_every_shape(shape: tuple[int, ...]) -> None:
    model, x = layers()[:1], numbers(*shape).requires_grad_()
    plain = model(x)
    plain.sum().backward()
    wanted, x.grad = x.grad, None
    with torch.no_grad(), laid_out(model):
        torch.testing.assert_close(model(x), plain, atol=1e-5, rtol=1e-5)
    with laid_out(model):
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, wanted, atol=1e-5, rtol=1e-5)


def test_inputs_that_are_views() -> None:
    model = layers()[:1]
    for x in (numbers(256, 9).t(), numbers(9, 512)[:, ::2], numbers(256).expand(9, -1)):
        assert not x.is_contiguous()
        with torch.no_grad():
            wanted = model(x)
            with laid_out(model):
                torch.testing.assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("x", [numbers(3, 255), numbers(3, 256).double(), numbers(3, 256).half()])
def test_what_pytorch_refuses_is_refused(x: Tensor) -> None:
    model = layers()[:1]
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded), laid_out(model), pytest.raises(RuntimeError):
            model(x)


def test_autocast_works_as_before() -> None:
    model, x = layers(), numbers(3, 256)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        with laid_out(model):
            found = model(x)
            found.float().square().sum().backward()
    assert gap(found.detach(), wanted.detach()) < 2e-2
    assert all(p.grad is not None for p in model.parameters())


def test_layers_that_only_look_plain_stay_what_they_are() -> None:
    """Number formats of other packages are weights of a class of their own in a plain layer."""

    class Packed(Tensor):
        def __tensor_flatten__(self) -> None: ...
        def __tensor_unflatten__(self) -> None: ...

    model = layers()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Packed))
    assert type(model[0].weight) is Packed
    with laid_out(model):
        assert [("forward" in vars(layer)) for layer in model] == [False, False, True, False]


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (0, 0),
        (1, 16),
        (16, 16),
        (17, 32),
        (128, 128),
        (129, 144),
        (257, 288),
        (1024, 1024),
        (1025, 1152),
    ],
)
def test_few_numbers_of_rows_are_computed(given: int, computed: int) -> None:
    """oneDNN keeps a kernel of half a megabyte for each."""
    for values in (numbers(given), numbers(given, 3)):
        found = module.pad_rows(values)
        assert torch.equal(found[:given], values)
        assert found.shape == (computed, *values.shape[1:]) and not found[given:].any()


def test_more_rows_than_were_asked_for_are_left_to_pytorch() -> None:
    model, x = layers()[:1], numbers(65, 256)
    with torch.no_grad():
        wanted = model(x)
        with laid_out(model):
            assert torch.equal(model(x), wanted)


def policy() -> Policy:
    """Its layers are large enough."""
    made = small_policy(hidden=256, layers=2, heads=2, key_value_heads=2, feed_forward=384)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return made


def test_while_a_rollout_waits_the_model_is_its_callers() -> None:
    """It can be copied, and trained: what is written afterwards is written with the new weights."""
    ours = policy()
    requests, sampling = make_requests(3), Sampling(max_tokens=8)
    engine = GroupEngine(ours, max_rows=4)
    waiting = engine.generate(requests, sampling)
    first = next(waiting)
    assert not any("forward" in vars(each) for each in ours.model.modules())
    before = copy.deepcopy(ours.model)
    optimizer = MasterOptimizer(
        dict(ours.model.named_parameters()), OptimizerSettings(learning_rate=0.01)
    )
    ids = torch.arange(12)[None]
    ours.model(ids).logits.square().mean().backward()
    optimizer.step()
    engine.publish(PublishedWeights(version=1, named={}))
    with torch.no_grad():
        assert not torch.allclose(before(ids).logits, ours.model(ids).logits, atol=0.1)
    # A group at a time, so that the last two began after the step.
    found = [c for group in waiting for c in group.completions]
    again = GroupEngine(ours, max_rows=4).generate(requests, sampling)
    assert next(again).completions[0].logprobs != first.completions[0].logprobs
    wanted = [c for group in again for c in group.completions]
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_rollout_that_is_given_up_leaves_nothing_behind() -> None:
    ours = policy()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = ours.model(ids).logits
        given_up = GroupEngine(ours, max_rows=4).generate(make_requests(3), Sampling(max_tokens=8))
        next(given_up)
        assert torch.equal(ours.model(ids).logits, wanted)
        given_up.close()
        assert torch.equal(ours.model(ids).logits, wanted)


NLL = FunctionObjective(loss=lambda outputs, batch: -outputs["logp"])


def test_log_probabilities_without_gradients_are_those_of_the_update() -> None:
    """To the bit, where the batch is split alike: the first ratio of a batch is 1."""
    learner = TorchLearner(policy(), optimizer=OptimizerSettings(learning_rate=0.0))
    tokens = torch.randint(12, 90, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        prompts=(tokens[0, :5], tokens[1, :3]),
        group=torch.tensor([0, 0, 1, 1]),
        tokens=tokens,
        length=torch.tensor([9] * 4),
        mask=torch.ones(4, 9, dtype=torch.bool),
        advantage=torch.ones(4, 9),
        weight=torch.ones(4, 9),
    )
    old = learner.evaluate(batch, {"logp"})["logp"]
    assert torch.equal(learner.update(batch, NLL).logp, old)
