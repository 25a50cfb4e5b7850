"""Completions are continued at any position, with rows at different positions, as if they had never
been interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import groupwise.testing.engines as contract
from groupwise.errors import UsageError
from groupwise.kernels import GroupCache, Reference, active, using
from groupwise.kernels.cpu import can_use_attention
from groupwise.rollouts import GenerateEngine, GroupEngine, ScriptedEngine
from groupwise.rollouts.engines import group
from groupwise.rollouts.engines.attention import Decode
from groupwise.types import Limits, Request, Sampling
from small_runs import noisy
from tiny_models import tiny_model, tiny_policy

ENDS = (1, 7, 8, 9, 10, 11)  # Several, so that completions end at different steps.
SAMPLING = Sampling(max_tokens=10)
CUT = Sampling(max_tokens=10, temperature=0.8, top_k=20, top_p=0.9)


@pytest.mark.parametrize(
    "name, sampling", [("gemma2", SAMPLING), ("qwen2_window", CUT), ("multi_query", SAMPLING)]
)
def test_a_completion_cut_anywhere_equals_the_unbroken_one(name: str, sampling: Sampling) -> None:
    engine = GroupEngine(tiny_policy(tiny_model(name), ends=ENDS), max_rows=9)
    contract.check_continuation(engine, sampling)


@pytest.mark.parametrize("sampling", [SAMPLING, CUT], ids=["plain", "truncated"])
def test_compiled_kernels_continue_bit_for_bit(sampling: Sampling) -> None:
    engine = GroupEngine(noisy(ends=range(40, 48)), max_rows=9)
    if engine.calls is None:
        pytest.skip("no compiled kernels")
    assert engine.exact_continuation
    contract.check_continuation(engine, sampling)


def test_without_compiled_attention_no_bits_are_promised() -> None:
    assert not GroupEngine(tiny_policy(tiny_model("qwen2"))).exact_continuation
    assert not GroupEngine(tiny_policy(tiny_model("gemma2"))).exact_continuation


def test_the_generate_engine_continues() -> None:
    engine = GenerateEngine(tiny_policy(tiny_model("qwen2"), ends=ENDS), max_rows=9)
    contract.check_continuation(engine, CUT)


def test_the_scripted_engine_continues() -> None:
    engine = ScriptedEngine(lambda prompt, sample: f"{prompt.id} is {sample}")
    contract.check_continuation(engine, SAMPLING)
    contract.check_pieces(engine, SAMPLING)
    contract.check_lazy_requests(engine, SAMPLING)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 5), rows=st.integers(4, 16))
def test_any_cuts_chunks_and_samples(data: st.DataObject, chunk: int, rows: int) -> None:
    """Random rows begun anywhere, passed through the model in chunks of any size."""
    policy = POLICY
    requests = contract.make_requests(3)
    whole = {g.prompt.id: g for g in GroupEngine(policy).generate(requests, SAMPLING)}
    begun: list[Request] = []
    for request in requests:
        samples = data.draw(st.permutations(range(4)).map(lambda p: tuple(p[:3])))
        completions = [whole[request.prompt.id].completions[sample] for sample in samples]
        cuts = [data.draw(st.integers(0, len(one.tokens))) for one in completions]
        some = tuple(contract.cut(one, n) for one, n in zip(completions, cuts, strict=True))
        begun.append(replace(request, samples=samples, begun=some))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "CHUNK", chunk)
        for found in GroupEngine(policy, max_rows=rows).generate(begun, SAMPLING):
            for sample, one in zip(found.samples, found.completions, strict=True):
                wanted = whole[found.prompt.id].completions[sample]
                assert (list(one.tokens), one.finish) == (list(wanted.tokens), wanted.finish)
                assert one.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


POLICY = tiny_policy(tiny_model("qwen2_window"), ends=ENDS)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_window", "gemma2"])
@pytest.mark.parametrize("begun", [1, 2, 4])
def test_rows_of_one_prompt_begun_at_one_place_need_a_mask(name: str, begun: int) -> None:
    """A second rollout in the same slots, so that a key beyond a token is not 0."""
    policy = tiny_policy(tiny_model(name), ends=())
    first, second, third = contract.make_requests(3)
    wanted = {g.prompt.id: g for g in GroupEngine(policy).generate([first, second, third], CUT)}
    cuts = [
        replace(request, begun=tuple(contract.cut(one, begun) for one in wanted[id].completions))
        for request, id in ((r, r.prompt.id) for r in (second, third))
    ]
    for found in GroupEngine(policy, max_rows=4).generate([first, *cuts], CUT):
        for one, other in zip(found.completions, wanted[found.prompt.id].completions, strict=True):
            assert list(one.tokens) == list(other.tokens)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_nothing_begun_is_no_work_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given tokens are looked for when requests enter, not in every step."""
    monkeypatch.setattr(group._Rollout, "_feed", None)
    engine = GroupEngine(POLICY)
    assert list(engine.generate(contract.make_requests(3), SAMPLING))
    [whole] = engine.generate(contract.make_requests(1), SAMPLING)
    begun = tuple(contract.cut(one, 1) for one in whole.completions)
    with pytest.raises(TypeError):
        list(engine.generate([replace(contract.make_requests(1)[0], begun=begun)], SAMPLING))


def test_requests_that_cannot_be_are_refused() -> None:
    request = contract.make_requests(1)[0]
    engine = GroupEngine(POLICY)
    [whole] = engine.generate([request], SAMPLING)
    few = replace(request, begun=whole.completions[:2])
    twice = replace(request, samples=(1, 1))
    for wrong, message in ((few, "2 completions are begun and 4"), (twice, "different indices")):
        with pytest.raises(UsageError, match=message):
            list(engine.generate([wrong], SAMPLING))
    limits = Limits(prompt=64, group=4, suffix=5, slots=1)
    with pytest.raises(UsageError, match="suffix = 10: is beyond the stated limit of 5"):
        list(engine.generate([request], SAMPLING, limits))


@pytest.mark.parametrize("kind", [GroupEngine, GenerateEngine])
def test_completions_beyond_their_budget_or_the_context_have_ended(kind: type) -> None:
    """A reply may be longer than what the context leaves, and a budget smaller than what is
    there: such completions come back as they are."""
    request, engine = contract.make_requests(1)[0], kind(POLICY)
    [whole] = engine.generate([request], SAMPLING)
    some, reply = contract.cut(whole.completions[0], 2), POLICY.context
    filled = replace(
        some,
        tokens=[*some.tokens, *[20] * reply],
        mask=[*some.mask, *[False] * reply],
        logprobs=[*some.logprobs, *[0.0] * reply],
    )
    requests = [
        replace(request, samples=(0,), begun=(filled,)),
        replace(request, begun=whole.completions, budget=1),
    ]
    for asked, found in zip(requests, engine.generate(requests, SAMPLING), strict=True):
        for one, before in zip(found.completions, asked.begun, strict=True):
            assert list(one.tokens) == list(before.tokens)
            ended = before.tokens[-1] in ENDS and before.mask[-1]
            assert one.finish == ("stop" if ended else "length")


def test_begun_completions_whose_parts_do_not_match_are_refused() -> None:
    request, engine = contract.make_requests(1)[0], GroupEngine(POLICY)
    [plain] = engine.generate([request], SAMPLING)
    [truncated] = engine.generate([request], CUT)
    some, sets = contract.cut(plain.completions[0], 2), contract.cut(truncated.completions[0], 1)
    injected = {"tokens": [*sets.tokens, 20], "mask": [True, False], "logprobs": [-1.0, 0.0]}
    for begun, sampling, message in (
        (replace(some, mask=[True]), SAMPLING, "mask .* has 1 entries for 2 tokens"),
        (replace(some, logprobs=[]), SAMPLING, "logprobs .* has 0 entries for 2 tokens"),
        (replace(sets, **injected), CUT, "support .* has 1 entries for 2 tokens"),
        (some, CUT, "drawn from the whole vocabulary"),
    ):
        with pytest.raises(UsageError, match=message):
            list(engine.generate([replace(request, samples=(0,), begun=(begun,))], sampling))
    with pytest.raises(UsageError, match="budget = -1"):
        list(engine.generate([replace(request, budget=-1)], SAMPLING))
    nothing = list(engine.generate([replace(request, budget=0)], SAMPLING))
    assert [len(one.tokens) for one in nothing[0].completions] == [0] * 4


def test_no_more_than_one_request_is_taken_ahead() -> None:
    taken = 0
    requests = contract.make_requests()

    def source():
        nonlocal taken
        for request in requests:
            taken += 1
            yield request

    limits = Limits(prompt=20, group=4, suffix=10, slots=2)
    groups = GroupEngine(POLICY, max_rows=4).generate(source(), SAMPLING, limits)
    for answered, _ in enumerate(groups, 1):
        assert taken <= answered + 1


# Attention of rows that stand at different times


def scene() -> tuple[list[tuple[int, int, int]], GroupCache, list[Tensor]]:
    """Places (slot, sample, time) of new tokens, several of one completion, and a cache in which
    everything before them is filled."""
    places = [(0, 0, 2), (0, 1, 6), (0, 1, 7), (0, 1, 8), (0, 2, 0), (1, 0, 11), (1, 1, 3),
              (1, 1, 4), (2, 2, 9)]  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    cache = GroupCache(
        slots=3, group=3, prompt_capacity=9, suffix_capacity=13, device=torch.device("cpu")
    )
    cache.prompt_length[:] = torch.tensor([5, 1, 9])
    given = [torch.randn(len(places), n, 16, generator=generator) for n in (4, 2, 2)]
    for tensor in cache.layer(0, given[1]).tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return places, cache, given


def attended(
    places: list[tuple[int, int, int]], cache: GroupCache, given: list[Tensor], window: int | None
) -> Tensor:
    slot, sample, time = torch.tensor(places).T.contiguous()
    rows = slot * 3 + sample
    order = torch.tensor([sum(p[:2] == q[:2] for q in places[:n]) for n, p in enumerate(places)])
    step = Decode(
        cache=cache, used=3, rows=rows, slot=slot.contiguous(), sample=sample.contiguous(),
        time=time.contiguous(), clock=0, prompt=9, suffix=12, aligned=False, in_step=False,
        order=order if order.any() else None,
    )  # fmt: skip
    return step(0, given[0], given[1], given[2], scaling=0.25, window=window, softcap=None)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 12, 100])
@pytest.mark.parametrize("compiled", [True, False])
def test_rows_out_of_step_attend_as_they_do_alone(window: int | None, compiled: bool) -> None:
    """Together or one token at a time: the same, and to the bit by the kernel."""
    with using(active() if compiled else Reference()):
        places, cache, given = scene()
        together = attended(places, cache, given, window)
        stored = [tensor.clone() for tensor in cache.layers[0].tensors()]
        _, cache, given = scene()
        alone = torch.cat(
            [
                attended([place], cache, [x[n : n + 1] for x in given], window)
                for n, place in enumerate(places)
            ]
        )
    if compiled and can_use_attention(given[0], given[1], given[2], softcap=None):
        assert torch.equal(together, alone)
    torch.testing.assert_close(together, alone, atol=3e-6, rtol=1e-5)
    for one, other in zip(stored, cache.layers[0].tensors(), strict=True):
        assert torch.equal(one, other)


def test_the_kernel_attends_as_pytorch_does() -> None:
    for window in (None, 1, 3, 8, 12, 100):
        found = attended(*scene(), window)
        with using(Reference()):
            wanted = attended(*scene(), window)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)
