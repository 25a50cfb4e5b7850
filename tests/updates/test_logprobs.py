"""Log-probabilities in chunks: those of the whole, with gradients, however it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from groupwise.updates import Projection, logprobs, token_logprobs
from groupwise.updates.logprobs import HeadGradients, chunk_bytes

TOKENS, VOCAB, HIDDEN = 300, 50, 24
ROW = 4 * VOCAB


def dense(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    head: Projection,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same in float64, from all logits at once."""
    z = hidden @ weight.t() + bias
    if head.softcap is not None:
        z = head.softcap * (z / head.softcap).tanh()
    z = z / head.temperature
    if allowed is not None:
        z = z.masked_fill(~allowed, float("-inf"))
    logp = z.log_softmax(-1)
    spread = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
    return logp.gather(1, target[:, None])[:, 0], spread


def test_how_many_logits_are_kept() -> None:
    """Of a vocabulary of 152 thousand: 1,024 rows in 16 bits, and 224 MiB in float32, beside which
    chunks have room in 300 MB."""
    vocab = 151_936
    low = Projection(weight=torch.empty(vocab, 1, dtype=torch.bfloat16, device="meta"))
    assert low.kept(1024) == 1024 and low.kept(9999) * vocab * 2 <= 320 * 2**20
    wide = Projection(weight=torch.empty(vocab, 1, device="meta"))
    assert 224 * 2**20 - 16 * 4 * vocab < wide.kept(1024) * vocab * 4 <= 224 * 2**20


@pytest.mark.parametrize("keep", [0, 80, 208, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_any_cut_gives_the_whole(
    keep: int, softcap: float | None, truncated: bool, entropy: bool, trained: bool
) -> None:
    torch.manual_seed(keep)
    parts = [torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)]
    target = torch.randint(VOCAB, (TOKENS,))
    allowed = torch.rand(TOKENS, VOCAB) < 0.7
    allowed[torch.arange(TOKENS), target] = True
    hidden = nn.Parameter(parts[0])
    weight, bias = (nn.Parameter(x, requires_grad=trained) for x in parts[1:])
    wide = [x.double().requires_grad_() for x in parts]
    head = Projection(
        weight=weight, bias=bias, softcap=softcap, temperature=0.7,
        chunk_bytes=16 * ROW, keep_bytes=keep * ROW,
    )  # fmt: skip
    kept = head.kept(TOKENS)
    assert kept == (0 if softcap is not None else min(keep, TOKENS))
    for backward in (False, True):
        chunks = head.chunks(TOKENS, backward=backward)
        assert [row for rows in chunks for row in range(TOKENS)[rows]] == list(range(TOKENS))
    logp, spread = token_logprobs(
        hidden, target, head, entropy=entropy,
        support=(lambda rows: allowed[rows]) if truncated else None,
    )  # fmt: skip
    wanted, of_wanted = dense(*wide, target, head, allowed if truncated else None)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(logp.double(), wanted, atol=1e-5, rtol=1e-5)
    slope = torch.randn(TOKENS)
    loss, of_loss = (logp * slope).sum(), (wanted * slope).sum()
    if spread is not None:
        torch.testing.assert_close(spread.double(), of_wanted, atol=1e-5, rtol=1e-5)
        loss, of_loss = loss + spread.square().sum(), of_loss + of_wanted.square().sum()
    loss.backward()
    of_loss.backward()
    assert (weight.grad is not None) is (bias.grad is not None) is trained
    for one, other in zip((hidden, weight, bias) if trained else (hidden,), wide, strict=False):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-5 * other.grad.norm()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_in_16_bits_gradients_are_rounded_once_however_they_are_cut(
    entropy: bool, trained: bool, wide: bool
) -> None:
    """Logits of bf16 factors, rounded or in float32; everything after them is as in float64."""
    torch.manual_seed(0)
    state, matrix = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(VOCAB, HIDDEN).bfloat16()
    target, slope = torch.randint(VOCAB, (TOKENS,)), torch.randn(TOKENS)
    logits = state.double() @ matrix.double().t()
    z = (logits if wide else logits.bfloat16().double()).requires_grad_()
    logs = (z / 0.7).log_softmax(-1)
    wanted, spread = logs.gather(1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    ((wanted * slope).sum() + (spread.square().sum() if entropy else 0)).backward()
    assert z.grad is not None
    exact = (z.grad @ matrix.double(), z.grad.t() @ state.double())
    for keep in (0, 80, 1000):
        hidden, weight = state.clone().requires_grad_(), nn.Parameter(matrix, requires_grad=trained)
        head = Projection(
            weight=weight, temperature=0.7, fp32_logits=wide,
            chunk_bytes=16 * ROW, keep_bytes=keep * VOCAB * (6 if wide else 2),
        )  # fmt: skip
        assert head.kept(TOKENS) == min(keep, TOKENS)
        logp, h = token_logprobs(hidden, target, head, entropy=entropy)
        ((logp * slope).sum() + (h.square().sum() if h is not None else 0)).backward()
        # A few bf16 logits are rounded to the other side.
        assert (logp - wanted).norm() <= (1e-6 if wide else 1e-3) * wanted.norm()
        for one, other in zip((hidden, weight) if trained else (hidden,), exact, strict=False):
            assert one.grad is not None and one.grad.dtype == torch.bfloat16
            assert (one.grad.double() - other).norm() <= 4e-3 * other.norm()


@pytest.mark.parametrize(("keep", "dtype"), [(64, torch.bfloat16), (0, torch.float32)])
def test_the_gradient_of_a_16_bit_weight_is_summed_in_float32_where_there_are_chunks(
    keep: int, dtype: torch.dtype
) -> None:
    """That of one chunk is no sum, and takes no float32 buffer of the weight's size."""
    hidden = torch.randn(64, 24).bfloat16()
    weight = nn.Parameter(torch.randn(50, 24).bfloat16())
    head = Projection(weight=weight, chunk_bytes=1, keep_bytes=keep * VOCAB * 2)
    found = HeadGradients(hidden, head, (True, True, False), added=None)
    for rows in head.chunks(64):
        found.add(rows, torch.randn(64, 50).bfloat16()[rows])
    assert found.d_weight is not None and found.d_weight.dtype == dtype
    assert [x.dtype for x in found.results()[:2] if x is not None] == [torch.bfloat16] * 2


def test_gradients_are_added_where_they_are_wanted() -> None:
    hidden, weight = torch.randn(20, 24), nn.Parameter(torch.randn(50, 24))
    for _ in range(2):
        logp, _ = token_logprobs(
            hidden, torch.arange(20), Projection(weight=weight, accumulate_into_grad=True)
        )
        logp.sum().backward()
    assert weight.grad is not None
    once = nn.Parameter(weight.detach().clone())
    token_logprobs(hidden, torch.arange(20), Projection(weight=once))[0].sum().backward()
    assert once.grad is not None
    torch.testing.assert_close(weight.grad, 2 * once.grad)


def test_they_may_be_gone_back_from_twice() -> None:
    """The first time spoils what was kept; the second computes it again."""
    hidden, weight = torch.randn(20, 24, requires_grad=True), nn.Parameter(torch.randn(50, 24))
    logp, _ = token_logprobs(hidden, torch.arange(20), Projection(weight=weight))
    first = torch.autograd.grad(logp.sum(), [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(logp.sum(), [hidden, weight])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_not_trained_multiplies_twice_and_keeps_no_logits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    state, weight = torch.randn(64, 24).to(dtype), torch.randn(500, 24).to(dtype)
    target, slope = torch.randint(500, (64,)), torch.randn(64)
    products: list[int] = []
    real = logprobs.head_product
    monkeypatch.setattr(
        logprobs, "head_product", lambda *a, **k: products.append(len(a[0])) or real(*a, **k)
    )
    found, saved = {}, []
    for trained in (True, False):
        products.clear()
        hidden = state.clone().requires_grad_()
        head = Projection(weight=nn.Parameter(weight, requires_grad=trained), keep_bytes=0)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            logp, _ = token_logprobs(hidden, target, head)
        (logp * slope).sum().backward()
        found[trained] = (logp.detach(), hidden.grad)
        assert sum(products) == (128 if trained else 64), "logits are computed once"
    assert max(x.numel() for x in saved) < 64 * 500
    assert torch.equal(found[True][0], found[False][0])
    (wanted, given) = (found[each][1] for each in (True, False))
    assert wanted is not None and given is not None and given.dtype == dtype
    rounding = 1e-6 if dtype == torch.float32 else 1e-2
    assert (given - wanted).norm() <= rounding * wanted.norm()


def test_chunks_have_rows_for_a_card_and_fit_the_caches_of_a_cpu() -> None:
    assert chunk_bytes("cpu", vocab=152_000) == chunk_bytes("cpu", vocab=1000) == 30 * 2**20
    assert chunk_bytes("cuda", vocab=152_000) == 512 * 4 * 152_000
    assert chunk_bytes("cuda", vocab=1000) == 30 * 2**20
    # A device without numbers stands for a card: its weight decides.
    for device, rows in (("cpu", 48), ("meta", 512)):
        head = Projection(weight=torch.empty(152_000, 1, device=device))
        first, *_, last = head.pieces(slice(0, 1024))
        assert first.stop == rows and last.stop == 1024


@pytest.mark.parametrize("trained", [True, False])
def test_products_of_a_large_vocabulary_have_more_rows_than_fit_into_the_caches(
    trained: bool,
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(250, 4, requires_grad=True), torch.randn(152_000, 4)
    target, slope = torch.randint(152_000, (250,)), torch.randn(250)
    found = []
    for size, rows in ((None, [96, 96, 58]), (4 * 152_000 * 128, [128, 122])):
        head = Projection(
            weight=nn.Parameter(weight, requires_grad=trained), keep_bytes=0, chunk_bytes=size
        )
        assert [each.stop - each.start for each in head.chunks(250)] == rows
        logp, _ = token_logprobs(hidden, target, head)
        (grad,) = torch.autograd.grad((logp * slope).sum(), hidden)
        found.append((logp.detach(), grad))
    assert (
        max(each.stop - each.start for each in Projection(weight=weight).pieces(slice(0, 96))) == 48
    )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
