"""Kernels of our own: the numbers of PyTorch, whatever the sizes, and PyTorch where they are not to
be had."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from groupwise.kernels import GroupCache, LayerCache, Reference, build, using
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled
from groupwise.kernels.cpu import PackedLinear as Linear
from groupwise.kernels.cpu import can_use_attention as attends
from groupwise.kernels.cpu import draw_tokens, rms_norm
from groupwise.models import Backbone, Policy, can_use_fused, only_known_parts
from groupwise.rollouts import GroupEngine
from groupwise.rollouts.engines.attention import Decode, Prefill
from groupwise.rollouts.sampling import draw
from groupwise.testing.engines import check_logprobs, make_requests
from groupwise.types import Sampling
from tiny_models import SHAPE, random_model, tiny_policy

needs_kernels = pytest.mark.skipif(
    compiled() is None, reason="no g++ whose programs this machine loads"
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


# Products, norms


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 129])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (15, 3), (16, 16), (33, 7), (96, 64)])
def test_a_product_is_the_product(rows: int, columns: int, depth: int) -> None:
    """With and without a bias, a gate and what it is added to; sizes that fill no tile."""
    x, onto = numbers(rows, depth), numbers(rows, columns, seed=1)
    weight, gate = numbers(columns, depth, seed=2), numbers(columns, depth, seed=3)
    bias, of_gate = numbers(columns, seed=4), numbers(columns, seed=5)
    plain = x.double() @ weight.double().t()
    gated = F.silu(x.double() @ gate.double().t() + of_gate)
    for found, wanted in (
        (Linear(weight, None)(x), plain),
        (Linear(weight, bias)(x), plain + bias),
        (Linear(weight, bias)(x, onto=onto), plain + bias + onto),
        (Linear(weight, bias, gate=(gate, of_gate))(x), gated * (plain + bias)),
        (Linear(weight, None, gate=(gate, of_gate))(x, onto=onto), gated * plain + onto),
    ):
        assert found.shape == wanted.shape
        assert gap(found, wanted) < 2e-6


@needs_kernels
def test_the_activation_of_any_number() -> None:
    """Far below nought it is nothing, where e^-x is more than a float32 holds."""
    x = torch.tensor([-1e30, -1e4, -200, -100, -89, -88.5, -20, -1, 0, 1, 20, 89, 200, 1e4])
    one = torch.ones(1, 1)
    found = Linear(torch.zeros(1, 1), torch.ones(1), gate=(one, None))(x[:, None])[:, 0]
    # Not one of the last, where up · 0 is none.
    torch.testing.assert_close(found[1:], F.silu(x[1:].double()).float(), rtol=5e-7, atol=1e-30)
    assert abs(found[0].item()) < 1e-6
    spread = torch.linspace(-80, 80, 10001)
    found = Linear(torch.zeros(1, 1), torch.ones(1), gate=(one, None))(spread[:, None])[:, 0]
    wanted = F.silu(spread.double())
    assert ((found - wanted) / wanted)[wanted != 0].abs().max() < 5e-7


@needs_kernels
def test_a_product_of_views() -> None:
    weight, x, onto = numbers(20, 6), numbers(6, 5).t(), numbers(20, 5, seed=1).t()
    assert gap(Linear(weight, None)(x, onto=onto), x.double() @ weight.double().t() + onto) < 1e-6
    assert gap(Linear(numbers(6, 20).t(), None)(x), x.double() @ numbers(6, 20).double()) < 1e-6
    assert Linear(weight, None)(x[:0]).shape == (0, 20)


@needs_kernels
@pytest.mark.parametrize("size", [1, 15, 16, 33, 896])
def test_a_norm_is_the_norm(size: int) -> None:
    x, weight = numbers(3, 2, size) * 5, numbers(size, seed=1)
    for given in (x, x.transpose(0, 1), x[:0]):
        exact = F.rms_norm(given.double(), (size,), weight.double(), 1e-5)
        torch.testing.assert_close(rms_norm(given, weight, 1e-5), exact.float())


@needs_kernels
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 128, 129, 1000, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_tokens_are_drawn_by_their_probabilities(size: int, temperature: float) -> None:
    logits, uniform = 3 * numbers(400, size), torch.linspace(0, 1, 400, dtype=torch.float64)
    logits[::2, 1::3], logits[1::2, : size // 2] = -torch.inf, -torch.inf
    uniform[-1] = 1 - 2**-53
    tokens, logp = draw_tokens(logits, uniform, temperature=temperature)
    probs = torch.softmax(logits.double() / temperature, -1)
    found = probs.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logp.double().exp(), found, rtol=1e-5, atol=1e-9)
    assert (logp > -torch.inf).all()
    after = probs.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    assert (after > uniform - 1e-6).all() and (after - logp.exp() < uniform + 1e-6).all()


@needs_kernels
@pytest.mark.parametrize("size", [100, 1000])
def test_the_largest_number_below_one_draws_what_can_be_drawn(size: int) -> None:
    """The sum of a block, rounded, may be more than that of its tokens one by one."""
    logits, uniform = numbers(400, size), torch.full((400,), 1 - 2**-53, dtype=torch.float64)
    logits[:, size - 30 :] = -torch.inf
    _, logp = draw_tokens(logits, uniform, temperature=1.0)
    assert (logp > -torch.inf).all()


@needs_kernels
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [40, 300])
def test_logits_that_are_no_numbers_are_told_of(number: float, size: int) -> None:
    """A row of nothing but -inf has no probabilities either; rows beside it do."""
    logits = numbers(3, size)
    logits[1] = number
    tokens, logp = draw_tokens(logits, torch.full((3,), 0.5), temperature=1.0)
    assert logp.isnan().tolist() == [False, True, False] and tokens[1] == size - 1


@needs_kernels
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_one_of_them_is_enough(number: float) -> None:
    logits = numbers(2, 300)
    logits[1, 200] = number
    _, logp = draw_tokens(logits, torch.tensor([0.5, 0.1]), temperature=1.0)
    assert logp.isnan().tolist() == [False, True]


@needs_kernels
def test_what_is_drawn_is_what_pytorch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniform = 3 * numbers(300, 2, 500)[:, 0], torch.rand(600, dtype=torch.float64)[::2]
    ours = draw(logits, uniform, Sampling(max_tokens=1, temperature=0.7))
    with using(Reference()):
        theirs = draw(logits, uniform, Sampling(max_tokens=1, temperature=0.7))
    assert (ours.tokens != theirs.tokens).sum() <= 1  # where rounding decides
    same = ours.tokens == theirs.tokens
    torch.testing.assert_close(ours.logp[same], theirs.logp[same], atol=1e-5, rtol=1e-5)
    assert (ours.tokens.dtype, ours.logp.dtype) == (theirs.tokens.dtype, theirs.logp.dtype)


@needs_kernels
@pytest.mark.parametrize("temperature", [-1.0, 0.0, torch.inf, torch.nan])
def test_no_token_is_drawn_at_such_a_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        draw_tokens(numbers(2, 40), torch.zeros(2), temperature=temperature)


@needs_kernels
def test_no_rows_no_tokens() -> None:
    tokens, logp = draw_tokens(numbers(0, 40), torch.zeros(0), temperature=1.0)
    assert tokens.shape == logp.shape == (0,)
    with pytest.raises(ValueError, match="no token"):
        draw_tokens(numbers(2, 0), torch.zeros(2), temperature=1.0)


@needs_kernels
def test_sizes_that_do_not_belong_together_are_refused() -> None:
    """A model is tried out by what is refused; beyond their end, weights are not to be read."""
    with pytest.raises(ValueError):
        Linear(numbers(4, 8), None)(numbers(2, 6))
    with pytest.raises((ValueError, TypeError)):
        Linear(numbers(4, 8), None)(numbers(2, 8), onto=numbers(1, 4))
    with pytest.raises((ValueError, TypeError)):
        Linear(numbers(4, 8), None)(numbers(2, 8).bfloat16())  # pyright: ignore[reportArgumentType]
    with pytest.raises((ValueError, TypeError)):
        rms_norm(numbers(2, 6), numbers(4), 1e-5)
    with pytest.raises((ValueError, TypeError)):
        draw_tokens(numbers(2, 6), torch.zeros(1).double(), temperature=1.0)


@pytest.mark.parametrize("part", ["embed_tokens", "norm"])
def test_parts_in_16_bits_are_left_to_the_models_own_layers(part: str) -> None:
    """Beside products in float32 they would be read as if they were as long."""
    policy = wide_policy(LlamaConfig(**SHAPE, head_dim=16))
    assert only_known_parts(Backbone.of(policy.model))
    getattr(policy.model.model, part).to(torch.bfloat16)
    assert not only_known_parts(Backbone.of(policy.model))


# Attention


def scene(
    *,
    lengths: tuple[int, ...] = (5, 0, 9, 1),
    ages: tuple[int, ...] = (0, 3, 17, 6),
    rows: tuple[int, ...] = (0, 2, 3, 4, 6, 7, 8),
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 16,
) -> tuple[Decode, tuple[Tensor, Tensor, Tensor]]:
    """A step of a grid of slots with three completions each, of which `rows` live; every cell of
    the grid holds something, whether it is to be seen or not."""
    used, group, clock = len(lengths), 3, 20
    grid = GroupCache(
        slots=used + 1, group=group, prompt_capacity=11, suffix_capacity=19,
        device=torch.device("cpu"),
    )  # fmt: skip
    grid.prompt_length[:used] = torch.tensor(lengths)
    grid.start[:used] = clock - torch.tensor(ages)
    live = torch.tensor(rows)
    query = numbers(len(rows), heads, dim)
    key, value = (numbers(len(rows), key_heads, dim, seed=seed) for seed in (1, 2))
    for seed, tensor in enumerate(grid.layer(0, key).tensors(), 3):
        tensor.copy_(numbers(*tensor.shape, seed=seed))
    decode = Decode(
        cache=grid, used=used, rows=live, slot=live // group, sample=live % group,
        time=torch.tensor(ages)[live // group], clock=clock, prompt=max(lengths),
        suffix=max(ages) + 1, aligned=len(set(lengths)) == len(set(ages)) == 1,
    )  # fmt: skip
    return decode, (query, key, value)


def both(
    decode: Decode, given: tuple[Tensor, Tensor, Tensor], *, window: int | None, scaling: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a step gives and the grid after it: by the kernel and by PyTorch."""
    assert attends(*given, softcap=None)
    store, found = decode.cache.layer(0, given[1]), []
    before = [tensor.clone() for tensor in store.tensors()]
    for ours in (True, False):
        for tensor, old in zip(store.tensors(), before, strict=True):
            tensor.copy_(old)
        with using(Auto() if ours else Reference()):
            out = decode(0, *given, scaling=scaling, window=window, softcap=None)
        found.append((out, *(tensor.clone() for tensor in store.tensors())))
    return found[0], found[1]


def check(
    decode: Decode,
    given: tuple[Tensor, Tensor, Tensor],
    *,
    window: int | None = None,
    scaling: float | None = None,
) -> None:
    scaling = given[0].shape[-1] ** -0.5 if scaling is None else scaling
    found, wanted = both(decode, given, window=window, scaling=scaling)
    torch.testing.assert_close(found[0], wanted[0], atol=3e-6, rtol=1e-5)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(one, other)


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 2, 6, 10, 18, 22, 100])
def test_attention_of_slots_that_differ(window: int | None) -> None:
    """Windows that end in a suffix, at its first token, in a prompt and before it."""
    check(*scene(), window=window)


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 4, 7, 30])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_new_prompts_attend_as_pytorch_lets_them(window: int | None, kind: torch.dtype) -> None:
    found = []
    for ours in (True, False):
        grid = GroupCache(
            slots=4, group=2, prompt_capacity=9, suffix_capacity=1, device=torch.device("cpu")
        )
        attend = Prefill(cache=grid, slots=torch.tensor([3, 0, 2]), time=7)
        query = numbers(21, 4, 16).to(kind)
        key, value = (numbers(21, 2, 16, seed=seed).to(kind) for seed in (1, 2))
        with using(Auto() if ours else Reference()):
            out = attend(0, query, key, value, scaling=0.2, window=window, softcap=None)
        assert out.dtype == kind
        found.append((out, *grid.layers[0].tensors()))
    exact = kind == torch.float32
    torch.testing.assert_close(found[0][0], found[1][0], atol=3e-6 if exact else 1e-2, rtol=1e-5)
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


def narrow(grid: GroupCache) -> GroupCache:
    """The same in bfloat16."""
    (layer,) = grid.layers.values()
    stored = {f.name: getattr(layer, f.name).to(torch.bfloat16) for f in fields(layer)}
    made = replace(grid, layers={0: LayerCache(**stored)})
    made.prompt_length, made.start = grid.prompt_length, grid.start
    return made


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 8])
def test_attention_in_16_bits_is_that_in_float32_rounded(window: int | None) -> None:
    decode, given = scene(heads=6, dim=32)
    small = tuple(x.to(torch.bfloat16) for x in given)
    in_16_bits = replace(decode, cache=narrow(decode.cache))
    call = {"scaling": 0.2, "window": window, "softcap": None}
    found = in_16_bits(0, *small, **call)
    assert found.dtype == torch.bfloat16
    stored = in_16_bits.cache.layers[0].tensors()
    for mine, other in zip(decode.cache.layers[0].tensors(), stored, strict=True):
        mine.copy_(other)
    wanted = decode(0, *(x.float() for x in small), **call)
    assert torch.equal(found, wanted.to(torch.bfloat16))
    for mine, other in zip(decode.cache.layers[0].tensors(), stored, strict=True):
        assert torch.equal(mine, other.float())


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(1, 1, 16), (3, 3, 48), (7, 1, 80), (14, 2, 128), (8, 4, 256)]
)
def test_attention_of_heads_of_every_kind(heads: int, key_heads: int, dim: int) -> None:
    check(*scene(heads=heads, key_heads=key_heads, dim=dim))
    check(*scene(heads=heads, key_heads=key_heads, dim=dim), window=8)


@needs_kernels
@pytest.mark.parametrize(
    ("lengths", "ages", "rows"),
    [
        ((9, 9), (4, 4), (0, 1, 2, 3, 4, 5)),
        ((9,), (0,), (2,)),
        ((1, 3), (16, 15), (1, 3, 4, 5)),
        ((0, 11, 2), (18, 0, 1), (0, 8)),
    ],
    ids=["alike", "one row", "whole vectors", "a slot without rows"],
)
def test_attention_of_grids_of_every_kind(
    lengths: tuple[int, ...], ages: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    check(*scene(lengths=lengths, ages=ages, rows=rows))


@needs_kernels
def test_attention_of_inputs_that_are_views() -> None:
    """Layers of `transformers` hand in heads by rows, turned round; fused ones slices of one
    product."""
    decode, given = scene()
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
    product = torch.cat(given, 1)
    slices = product.split([x.shape[1] for x in given], 1)
    for views in (turned, slices):
        assert not views[1].is_contiguous()
        check(decode, (views[0], views[1], views[2]))


@needs_kernels
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e15, -1e4])
def test_attention_to_extreme_scores(scale: float) -> None:
    """All weight is that of the highest one; none overflows. Sums of both are rounded apart, so
    queries and keys are whole numbers, of which no two are as good."""
    decode, (query, key, value) = scene(heads=2)
    store = decode.cache.layer(0, key)
    for place, tensor in enumerate((store.prompt_key, store.suffix_key, key)):
        whole = numbers(tensor.numel(), seed=place).argsort().view(tensor.shape) % 8191
        tensor.zero_()[..., 0] = whole[..., 0].float()
    query.zero_()[..., 0] = scale
    check(decode, (query, key, value), scaling=1.0)


@needs_kernels
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FC0017F])
@pytest.mark.parametrize(
    ("place", "rows", "heads"),
    [
        ("query", [0], [0]),
        ("key", [0], [0, 1]),
        ("value", [0], [0, 1]),
        ("prompt_key", [0, 1], [0, 1]),
        ("prompt_value", [0, 1], [0, 1]),
        ("suffix_key", [], []),
        ("suffix_value", [], []),
    ],
)
def test_what_is_no_number_shows(place: str, rows: list[int], heads: list[int], bits: int) -> None:
    """In the heads that see it and in no other, whatever the last bits of a NaN are; the first cell
    of a suffix is the one that the first row writes."""
    decode, given = scene()
    store = decode.cache.layer(0, given[1])
    held = {"query": given[0], "key": given[1], "value": given[2], **vars(store)}[place]
    held.view(-1)[3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found, _ = both(decode, given, window=None, scaling=0.25)
    shown = torch.zeros(found[0].shape[:2], dtype=torch.bool)
    shown[torch.tensor(rows, dtype=torch.long)[:, None], heads] = True
    assert torch.equal(found[0].isnan().any(-1), shown)


@needs_kernels
def test_what_cannot_be_attended_is_left_to_pytorch() -> None:
    _, (query, key, value) = scene()
    assert attends(query, key, value, softcap=None)
    assert not attends(query, key, value, softcap=2.0)
    assert not attends(*(x[..., :8] for x in (query, key, value)), softcap=None)
    assert not attends(query.double(), key.double(), value.double(), softcap=None)
    assert not attends(query, key, value.repeat(1, 1, 2), softcap=None)
    assert not attends(query, key, value.to("meta"), softcap=None)
    assert not attends(query, key, value.mT.contiguous().mT, softcap=None)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (query, key, value)]
        assert not attends(fake[0], fake[1], fake[2], softcap=None)


# Threads


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything() -> list[Tensor]:
    """What every kernel gives, of sizes that are worth a second thread."""
    x, weight = numbers(300, 96), numbers(200, 96, seed=1)
    decode, given = scene(
        lengths=(11, 7) * 20, ages=(18, 3) * 20, rows=tuple(range(120)), heads=8, dim=64
    )
    found, _ = both(decode, given, window=None, scaling=0.25)
    gated = Linear(weight, None, gate=(weight, None))
    drawn = draw_tokens(x, torch.linspace(0, 1, 300).double(), temperature=1.0)
    return [Linear(weight, None)(x), gated(x), rms_norm(x, weight[0], 1e-5), *drawn, *found]


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits(threads: None) -> None:
    torch.set_num_threads(1)
    wanted = everything()
    for count in (2, 5, 1):
        torch.set_num_threads(count)
        assert all(map(torch.equal, everything(), wanted))


@needs_kernels
def test_threads_of_python_do_not_hinder_each_other() -> None:
    weight, x = numbers(200, 96), numbers(33, 96, seed=1)
    linear = Linear(weight, None)
    wanted, found = linear(x), []

    def work() -> None:
        with torch.inference_mode():
            found.extend(torch.equal(linear(x), wanted) for _ in range(50))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 200 and all(found)


@needs_kernels
def test_a_row_does_not_depend_on_its_company() -> None:
    """To the bit: a completion is the same whoever is written beside it."""
    x, weight = numbers(19, 96), numbers(40, 96, seed=1)
    linear = Linear(weight, None, gate=(weight, None))
    whole = linear(x)
    for row in range(19):
        assert torch.equal(linear(x[row : row + 1])[0], whole[row])


# Engines


def wide_policy(config: PreTrainedConfig) -> Policy:
    """With heads of 16 dimensions, which kernels attend, where those of other tests have 8."""
    return tiny_policy(random_model(config), ends=(1, 5, 9))


CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=16),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "window": lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=7),
}
Written = list[tuple[list[int], list[float]]]


def written(policy: Policy, *, fused: bool) -> Written:
    """What an engine writes of which every token is the most probable; few rows, so that prompts
    wait for each other."""
    engine = GroupEngine(policy, max_rows=8)
    assert (engine.calls is not None) == fused
    groups = list(engine.generate(make_requests(), Sampling(max_tokens=16, temperature=0.0)))
    groups.sort(key=lambda group: group.prompt.id)
    return [(list(c.tokens), list(c.logprobs)) for group in groups for c in group.completions]


def check_alike(found: Written, wanted: Written) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.fixture
def unknown() -> Iterator[None]:
    """Whether there is a compiler is asked anew in a test, and after it."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unknown: None) -> Path:
    """Nothing has been compiled yet, into "a cache" here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return tmp_path


@needs_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_writes_the_same_without_them(
    name: str, unknown: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = wide_policy(CONFIGS[name]())
    found = written(policy, fused=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled.cache_clear()
    assert compiled() is None and can_use_fused(Backbone.of(policy.model)) is None
    check_alike(found, written(policy, fused=False))


@needs_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_completions_of_different_lengths(name: str) -> None:
    """Drawn, so that rows of one prompt end apart; a draw itself is not compared, which rounding
    may turn."""
    policy = wide_policy(CONFIGS[name]())
    check_logprobs(GroupEngine(policy, max_rows=8), policy)


@needs_kernels
def test_layers_of_a_model_are_attended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not fused hand their heads to the kernel as well."""
    policy = wide_policy(LlamaConfig(**SHAPE, head_dim=16, hidden_act="gelu"))
    found = written(policy, fused=False)
    with using(Reference()):
        check_alike(found, written(policy, fused=False))


# Where they are compiled


def compiler(folder: Path, script: str) -> str:
    """A folder with a `g++` that does what a script says."""
    made = folder / "bin" / "g++"
    made.parent.mkdir()
    made.write_text(script)
    made.chmod(0o755)
    return str(made.parent)


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\nexit 1\n",
        "#!/bin/sh\nexit 0\n",
        '#!/bin/sh\nfor last; do :; done\necho no library > "$last"\n',
        "no program",
    ],
    ids=["fails", "writes nothing", "writes something else", "is none"],
)
def test_a_broken_compiler_is_as_good_as_none(
    script: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", compiler(fresh, script) + os.pathsep + os.environ["PATH"])
    assert compiled() is None
    assert can_use_fused(Backbone.of(wide_policy(CONFIGS["llama"]()).model)) is None
    assert not attends(*(numbers(1, 2, 16) for _ in range(3)), softcap=None)


@needs_kernels
def test_a_cache_that_cannot_be_written_is_done_without(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not hold for everybody, a file in its place does."""
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert compiled() is not None


@needs_kernels
def test_so_is_a_file_that_is_no_library(fresh: Path) -> None:
    """As one that was being written when the power went."""
    assert compiled() is not None
    (made,) = (fresh / "a cache" / "groupwise").iterdir()
    made.unlink()  # and not cut short: it is in use
    made.touch()
    compiled.cache_clear()
    assert compiled() is not None


@needs_kernels
def test_a_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process finds it, and needs no compiler that works; another processor does."""
    assert compiled() is not None
    (made,) = (fresh / "a cache" / "groupwise").iterdir()
    monkeypatch.setenv("PATH", compiler(fresh, "#!/bin/sh\nexit 1\n") + ":" + os.environ["PATH"])
    compiled.cache_clear()
    assert compiled() is not None
    monkeypatch.setattr(build, "_processor", lambda: "another")
    compiled.cache_clear()
    assert compiled() is None
    assert list(made.parent.iterdir()) == [made]


def multiply(start: threading.Event, results: multiprocessing.SimpleQueue[bool]) -> None:
    """What another process does: compile, and use what it has."""
    start.wait()
    found = compiled() is not None and Linear(torch.eye(3), None)(torch.ones(2, 3)).sum() == 6
    results.put(bool(found))


@needs_kernels
def test_processes_may_compile_at_once(fresh: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.SimpleQueue()
    others = [context.Process(target=multiply, args=(start, results)) for _ in range(2)]
    for other in others:
        other.start()
    start.set()
    assert all(results.get() for _ in others)
    for other in others:
        other.join()
    assert [path.suffix for path in (fresh / "a cache" / "groupwise").iterdir()] == [".so"]
