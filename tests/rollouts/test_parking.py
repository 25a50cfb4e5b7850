"""Completions that wait for a tool in the group engine: the same as those continued by requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import groupwise.testing.engines as contract
from groupwise.environments import Reply
from groupwise.kernels import Reference, using
from groupwise.rollouts import GroupEngine
from groupwise.rollouts.tools import InlineCalls
from groupwise.types import Completion, Engine, Group, Limits, Metrics, Request, Requests, Sampling
from talkers import POLICY, SAMPLING, Talker, asked, by_prompt, counted, tools


class Continuing:
    """The group engine without the ability to let completions wait."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests = 0

    @property
    def exact_continuation(self) -> bool:
        return self.engine.exact_continuation

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        def noted() -> Iterator[Request | None]:
            for request in requests:
                self.requests += request is not None
                yield request

        return self.engine.generate(noted(), sampling, limits)

    def publish(self, weights: Any) -> Metrics:
        return self.engine.publish(weights)

    def close(self) -> None:
        self.engine.close()


EXACT = GroupEngine(POLICY).exact_continuation
"""Whether log-probabilities have the same bits whatever other rows are in a decoding step."""


class Near(list[float]):
    """Log-probabilities that are equal to others up to rounding."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, list)
        return list(self) == pytest.approx(list(other), abs=1e-4)


def written(completion: Completion) -> dict[str, Any]:
    """All that a completion holds but for the seconds of its calls."""
    found = {field.name: getattr(completion, field.name) for field in fields(completion)}
    if not EXACT:
        found["logprobs"] = Near(completion.logprobs)
    found["values"] = {k: v for k, v in completion.values.items() if "seconds" not in k}
    return found


def both(
    environment: Any, requests: list[Request], sampling: Sampling
) -> tuple[dict[str, Group], dict[str, Group]]:
    """The same rollout natively and by continuations."""
    slow = Continuing(GroupEngine(POLICY, max_rows=9))
    native = tools(environment(), engine=GroupEngine(POLICY, max_rows=9))
    wrapped = tools(environment(), engine=slow)
    found = by_prompt(native.generate(requests, sampling))
    wanted = by_prompt(wrapped.generate(requests, sampling))
    calls = sum(c.values["calls"] for g in found.values() for c in g.completions)
    assert calls > len(requests) and slow.requests > 2 * len(requests)
    assert found.keys() == wanted.keys() and len(found) == len(requests)
    return found, wanted


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([{}, {"top_k": 20}, {"stop": ("ab",)}, {"max_tokens": 40}]),
)
def test_completions_that_wait_are_those_that_are_continued_bit_for_bit(
    seed: int, delay: float, fail: float, more: dict[str, Any]
) -> None:
    if not GroupEngine(POLICY).exact_continuation:
        pytest.skip("needs the compiled kernels")
    sampling = SAMPLING.model_copy(update=more)
    found, wanted = both(lambda: Talker(seed=seed, delay=delay, fail=fail), asked(8), sampling)
    for name, group in found.items():
        there = wanted[name]
        assert (group.stream, group.samples) == (there.stream, there.samples)
        pairs = zip(group.completions, there.completions, strict=True)
        assert all(written(a) == written(b) for a, b in pairs)


def test_without_kernels_they_are_the_same_but_for_rounding() -> None:
    with using(Reference()):
        found, wanted = both(lambda: Talker(delay=0.01), asked(6), SAMPLING)
    for name, group in found.items():
        for a, b in zip(group.completions, wanted[name].completions, strict=True):
            assert (list(a.tokens), list(a.mask)) == (list(b.tokens), list(b.mask))
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_replies_in_any_order_give_the_same_and_every_token_drawn_is_counted() -> None:
    first = None
    for delay in (0.0, 0.005, 0.03):
        engine = tools(Talker(delay=delay, fail=0.1))
        with counted() as drawn:
            found = by_prompt(engine.generate(asked(9), SAMPLING))
        completions = [c for group in found.values() for c in group.completions]
        assert sum(c.own_tokens for c in completions) == sum(drawn)
        shown = {name: list(map(written, group.completions)) for name, group in found.items()}
        first = first or shown
        assert shown == first


def test_one_that_waits_holds_up_no_other() -> None:
    """The first call is answered when all other completions of all prompts have ended."""
    requests = asked(8)
    others_done = threading.Event()

    class Held(Talker):
        first = True

        def reply(self, state: list[str], text: str) -> Reply:
            with self.lock:
                held, self.first = self.first, False
            if held:
                assert others_done.wait(20)
            return super().reply(state, text)

    groups = []
    for group in tools(Held(), timeout_s=30.0).generate(requests, SAMPLING):
        groups.append(group)
        if len(groups) == len(requests) - 1:
            others_done.set()
    assert others_done.is_set() and len(groups) == len(requests)
    wanted = by_prompt(tools(Talker()).generate(requests, SAMPLING))
    assert {g.prompt.id: list(map(written, g.completions)) for g in groups} == {
        name: list(map(written, group.completions)) for name, group in wanted.items()
    }


def test_begun_completions_go_on_and_call_again() -> None:
    """Wherever a completion with calls is cut between two tokens of the policy."""
    request = asked(1)[0]
    [whole] = tools(Talker(seed=3)).generate([request], SAMPLING)
    several = max(whole.completions, key=lambda c: c.values["calls"])
    sample, mask = whole.completions.index(several), list(several.mask)
    cuts = [n for n in range(1, len(mask)) if mask[n - 1] and mask[n]]
    assert several.values["calls"] > 1 and len(cuts) >= 4
    for count in cuts:
        calls = sum(mask[n] and not mask[n + 1] for n in range(count - 1))
        begun = replace(contract.cut(several, count), values={"calls": float(calls)})
        one = replace(request, samples=(sample,), begun=(begun,))
        [group] = tools(Talker(seed=3)).generate([one], SAMPLING)
        assert list(group.completions[0].tokens) == list(several.tokens)
        assert list(group.completions[0].mask) == mask


def test_tokens_after_a_wait_have_the_weights_of_their_time() -> None:
    engine = GroupEngine(POLICY, max_rows=9)

    class Publishing(Talker):
        def reply(self, state: list[str], text: str) -> Reply:
            engine.publish(contract.published(POLICY, version=1))
            return super().reply(state, text)

    groups = tools(Publishing(), engine=engine, workers=1).generate(asked(2), SAMPLING)
    found = [c for group in groups for c in group.completions]
    called = [c for c in found if c.values["calls"] and c.mask[-1] and not all(c.mask)]
    assert called
    for c in called:
        first_injected = list(c.mask).index(False)
        versions = dict(c.versions)
        assert set(versions.values()) <= {0, 1} and 1 in versions.values()
        new = min(place for place, version in versions.items() if version == 1)
        assert new <= first_injected + list(c.mask[first_injected:]).index(True)


def test_no_more_are_written_at_a_time_than_the_engine_takes() -> None:
    """Though many more wait, and all their replies come at once."""
    together = threading.Condition()

    class Gathering(Talker):
        inside = 0

        def reply(self, state: list[str], text: str) -> Reply:
            with together:
                self.inside += 1
                together.notify_all()
                assert together.wait_for(lambda: self.inside >= 18, timeout=20)
            return super().reply(state, text)

    engine = tools(Gathering(), workers=64)
    with counted() as drawn:
        found = by_prompt(engine.generate(asked(12), SAMPLING))
    assert max(drawn) <= 9
    wanted = by_prompt(tools(Talker()).generate(asked(12), SAMPLING))
    assert {name: list(map(written, group.completions)) for name, group in found.items()} == {
        name: list(map(written, group.completions)) for name, group in wanted.items()
    }


def test_a_tool_that_runs_in_the_engines_thread_may_compute_gradients() -> None:
    class Learning(Talker):
        def reply(self, state: list[str], text: str) -> Reply:
            weight = torch.ones(2, requires_grad=True)
            (weight * weight).sum().backward()
            assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]
            return super().reply(state, text)

    engine = tools(Learning())
    engine.calls = InlineCalls()
    found = [c for group in engine.generate(asked(2), SAMPLING) for c in group.completions]
    assert any(c.values["calls"] for c in found)
