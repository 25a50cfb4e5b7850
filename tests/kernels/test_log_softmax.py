"""Log-probabilities and their gradient from rows of logits: both backends against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise.kernels import Backend, Reference
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.kernels.cpu import draw_tokens
from groupwise.kernels.log_softmax import can_use_log_softmax, selective_log_softmax

needs_kernels = pytest.mark.skipif(compiled() is None, reason="there is no g++")
BACKENDS = [
    pytest.param(Auto(), marks=needs_kernels, id="auto"),
    pytest.param(Reference(), id="torch"),
]
INF = float("inf")
TYPES = [torch.float32, torch.bfloat16]


def exact(
    logits: Tensor, target: Tensor, grad: Tensor, grad_h: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and the gradient of the logits in float64."""
    z = logits.double().requires_grad_()
    logs = (z / temperature).log_softmax(-1)
    p = logs.exp()
    h = -(p * torch.where(p > 0, logs, 0)).sum(-1)
    logp = logs.gather(1, target[:, None])[:, 0]
    d = torch.nn.functional.one_hot(target, z.shape[1]) - p
    d = d * grad.double()[:, None]
    if grad_h is not None:
        d -= p * (torch.where(p > 0, logs, 0) + h[:, None]) * grad_h.double()[:, None]
    return logp.detach(), h.detach(), (d / temperature).detach()


def differentiated(
    backend: Backend, z: Tensor, target: Tensor, grad: Tensor, grad_h: Tensor | None, t: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same by a backend, with the normaliser of the forward pass and without."""
    kept = z.clone()
    logp, h, norm = backend.selective_log_softmax(
        z, target, temperature=t, entropy=grad_h is not None
    )
    assert torch.equal(z.nan_to_num(7), kept.nan_to_num(7)), "logits are left as they are"
    entropy = None if h is None or grad_h is None else (h, grad_h)
    gradients = [kept.clone(), kept.clone()]
    for d, given in zip(gradients, (norm, None), strict=True):
        backend.selective_log_softmax_backward_(
            d, target, grad, temperature=t, entropy=entropy, norm=given
        )
    torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)
    return logp, h, gradients[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 128, 1000, 4099])
def test_they_are_those_of_float64(
    backend: Backend, dtype: torch.dtype, entropy: bool, temperature: float, size: int
) -> None:
    torch.manual_seed(size)
    z, target = (8 * torch.randn(5, size)).to(dtype), torch.randint(size, (5,))
    target[:2] = torch.tensor([0, size - 1])
    grad = torch.randn(5)
    grad_h = torch.randn(5) if entropy else None
    wanted = exact(z, target, grad, grad_h, temperature)
    logp, h, d = differentiated(backend, z, target, grad, grad_h, temperature)
    assert (logp.dtype, d.dtype, h is not None) == (torch.float32, dtype, entropy)
    torch.testing.assert_close(logp.double(), wanted[0], atol=2e-6, rtol=1e-6)
    if h is not None:
        torch.testing.assert_close(h.double(), wanted[1], atol=2e-6, rtol=1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(d.double(), wanted[2], atol=1e-6, rtol=rounding)
    if dtype == torch.bfloat16:  # to the nearest: not truncated, not rounded twice
        large = wanted[2].abs() > 1e-5
        assert (d != wanted[2].float().to(dtype))[large].sum() <= 0.01 * large.sum()


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
def test_large_logits_of_many_words_lose_nothing(dtype: torch.dtype) -> None:
    """No worse than PyTorch's softmax, and than half a unit in the last place of the logits."""
    torch.manual_seed(0)
    target = torch.randint(151_936, (8,))
    for z in (12 * torch.randn(8, 151_936), 40 + 0.1 * torch.randn(8, 151_936)):
        z = z.to(dtype)
        wanted = z.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
        errors = []
        for backend in (Auto(), Reference()):
            logp, _, _ = backend.selective_log_softmax(z, target, temperature=1.0, entropy=False)
            errors.append((logp - wanted).abs().max().item())
        assert errors[0] <= max(errors[1], 1e-6)
        _, _, norm = Auto().selective_log_softmax(z, target, temperature=1.0, entropy=False)
        lse = norm[:, 0].double() + norm[:, 1].double().log()
        torch.testing.assert_close(lse, z.double().logsumexp(-1), atol=5e-7, rtol=0)


@needs_kernels
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_the_learner_finds_what_the_sampler_has_found(temperature: float) -> None:
    """From the same logits, to the last bit."""
    logits = 4 * torch.randn(50, 1001)
    tokens, drawn = draw_tokens(logits, torch.rand(50), temperature=temperature)
    logp, _, _ = selective_log_softmax(logits, tokens, temperature=temperature, entropy=False)
    assert torch.equal(logp, drawn)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_outside_the_support_has_no_probability(
    backend: Backend, dtype: torch.dtype
) -> None:
    """Not even a small one, wherever the target is; and its entropy is a number."""
    z = (5 * torch.randn(4, 37)).to(dtype)
    target = torch.tensor([3, 36, 5, 0])
    z[0, 10:] = -INF
    z[1, :36] = -INF  # all but the target
    z[2, 5] = -INF  # the target itself
    z[3, 1:] = torch.finfo(dtype).min
    grad, grad_h = torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.ones(4)
    wanted = exact(z, target, grad, grad_h, 1.0)
    logp, h, d = differentiated(backend, z, target, grad, grad_h, 1.0)
    assert h is not None and logp[1] == 0 and logp[2] == -INF and logp[3] == 0
    torch.testing.assert_close(logp.double(), wanted[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(h.double(), wanted[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(d.double(), wanted[2], atol=1e-6, rtol=4e-3)
    assert not d[0, 10:].any() and not d[1].any() and d[2, 5] == 3 and not d[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("place", [0, 20, 36])
@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_no_number_stays_none(
    backend: Backend, dtype: torch.dtype, bad: float, place: int, entropy: bool
) -> None:
    """In its own row alone."""
    z = torch.randn(3, 37).to(dtype)
    z[1, place] = bad
    z[2] = -INF
    grad_h = torch.ones(3) if entropy else None
    logp, h, d = differentiated(backend, z, torch.tensor([1, 1, 1]), torch.ones(3), grad_h, 1.0)
    assert logp.isnan().tolist() == [False, True, True]
    assert h is None or h.isnan().tolist() == [False, True, True]
    assert not d[0].isnan().any() and d[1:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_rows_of_one_gradient(backend: Backend) -> None:
    z, none = torch.randn(0, 9), torch.zeros(0, dtype=torch.long)
    logp, h, d = differentiated(backend, z, none, torch.zeros(0), torch.zeros(0), 1.0)
    assert h is not None and logp.shape == h.shape == (0,) and d.shape == (0, 9)
    z, target, one = torch.randn(4, 9), torch.arange(8)[::2], torch.ones(()).expand(4)
    same = differentiated(backend, z, target.contiguous(), torch.ones(4), torch.ones(4), 1.0)
    found = differentiated(backend, z, target, one, one, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))  # pyright: ignore[reportArgumentType]


@needs_kernels
def test_what_would_be_read_out_of_bounds_is_refused() -> None:
    z, target = torch.randn(2, 9), torch.tensor([0, 8])
    how = {"temperature": 1.0, "entropy": False}
    for bad in (torch.tensor([0, 9]), torch.tensor([-1, 0]), target[:1], target.int()):
        with pytest.raises((ValueError, TypeError), match="target"):
            selective_log_softmax(z, bad, **how)
        with pytest.raises((ValueError, TypeError), match="target"):
            Auto().selective_log_softmax_backward_(
                z, bad, torch.ones(2), temperature=1.0, entropy=None, norm=torch.ones(2, 2)
            )
    with pytest.raises((ValueError, TypeError), match="grad"):
        Auto().selective_log_softmax_backward_(
            z, target, torch.ones(1), temperature=1.0, entropy=None, norm=None
        )
    for temperature in (0.0, -1.0, INF, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            selective_log_softmax(z, target, temperature=temperature, entropy=False)
    assert not any(map(can_use_log_softmax, (z.double(), z.half(), z.t(), z.to("meta"))))
