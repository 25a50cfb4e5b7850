"""The order of prompts: a bijection per epoch that one number resumes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.errors import UsageError
from groupwise.prompts.order import PromptOrder


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
)
def test_the_order_does_not_depend_on_how_it_is_cut(count: int, seed: int, cuts: list[int]) -> None:
    cut = PromptOrder(count, seed=seed)
    pieces = [index for number in cuts for index in cut.next(number)]
    assert pieces == PromptOrder(count, seed=seed).next(sum(cuts))


@given(count=st.integers(1, 40), before=st.integers(0, 100))
def test_a_restored_order_goes_on_where_the_first_stopped(count: int, before: int) -> None:
    first = PromptOrder(count, seed=1)
    first.next(before)
    resumed = PromptOrder(count, seed=1)
    resumed.restore(first.state())
    assert resumed.next(50) == first.next(50)


def test_every_epoch_shows_every_prompt_once_in_another_order() -> None:
    order = PromptOrder(50, seed=0)
    epochs = [order.next(50) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))
    assert order.epoch == 3.0
    assert PromptOrder(50, seed=1).next(50) != epochs[0]


def test_a_million_prompts_cost_one_array() -> None:
    order = PromptOrder(1_000_000, seed=0)
    order.restore({"count": 1_000_000, "seed": 0, "position": 1_999_998})
    drawn = order.next(4)
    assert len(drawn) == 4 and all(0 <= index < 1_000_000 for index in drawn)


def test_another_data_set_or_seed_cannot_be_resumed() -> None:
    state = PromptOrder(10, seed=0).state()
    with pytest.raises(UsageError, match="prompts.count = 11: the run to resume had 10"):
        PromptOrder(11, seed=0).restore(state)
    with pytest.raises(UsageError, match="prompts.seed = 1"):
        PromptOrder(10, seed=1).restore(state)


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(UsageError, match="prompts = 0"):
        PromptOrder(0, seed=0)
    with pytest.raises(UsageError, match="seed = -1"):
        PromptOrder(1, seed=-1)
