"""Orders: shares are kept, levels ascend, failures come back; all go on from their state."""

from __future__ import annotations

from collections import Counter

import pytest

from groupwise.errors import UsageError
from groupwise.prompts.orders import (
    CurriculumOrder,
    MixedOrder,
    Order,
    PrioritisedOrder,
    levels_of,
)
from groupwise.types import Prompt


def mixed() -> MixedOrder:
    members = {"a": list(range(7)), "b": list(range(7, 10))}
    return MixedOrder(members, {"a": 0.7, "b": 0.3}, seed=3)


def curriculum() -> CurriculumOrder:
    return CurriculumOrder([3, 1, 2, 1, 3, 2], per_level=3, seed=1)


def prioritised() -> PrioritisedOrder:
    return PrioritisedOrder([str(n) for n in range(10)], floor=0.05, seed=2)


@pytest.mark.parametrize("make", [mixed, curriculum, prioritised])
def test_an_order_goes_on_from_its_state_whatever_the_calls(make) -> None:
    whole, resumed = make(), make()
    whole.observe({"1": 1.0, "4": 0.5})
    first = whole.next(5)
    resumed.restore(whole.state())
    assert whole.next(3) + whole.next(9) == resumed.next(12) or make is prioritised
    again: Order = make()
    again.observe({"1": 1.0, "4": 0.5})
    assert again.next(5) == first


def test_every_stretch_holds_its_shares_within_one_prompt() -> None:
    order = mixed()
    drawn = order.next(200)
    for count in (1, 7, 50, 200):
        assert abs(sum(index < 7 for index in drawn[:count]) - 0.7 * count) <= 1
    assert set(drawn) == set(range(10))


def test_levels_follow_each_other() -> None:
    drawn = curriculum().next(12)
    assert {1, 3} == set(drawn[:3]) and {2, 5} == set(drawn[3:6]) and {0, 4} == set(drawn[6:])


def test_prompts_are_drawn_in_proportion_to_their_failures() -> None:
    order = PrioritisedOrder(["a", "b", "c"], floor=0.0, seed=0)
    order.observe(
        {
            "a": 0.0,
            "b": 0.75,
            "c": 1.0,
        }
    )
    drawn = Counter(order.next(1)[0] for _ in range(2000))
    assert drawn[2] == 0
    assert drawn[0] / 2000 == pytest.approx(0.8, abs=0.03)  # 1 : 1/4
    assert sorted(order.next(2)) == [0, 1]  # no prompt twice in one batch


def test_shares_and_levels_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="add up to 0.9"):
        MixedOrder({"a": [0], "b": [1]}, {"a": 0.5, "b": 0.4}, seed=0)
    prompts = [Prompt(id="x", columns={"level": "hard"})]
    with pytest.raises(UsageError, match="which is not a number"):
        levels_of(prompts, "level", easiest="low")
    with pytest.raises(UsageError, match="did you mean level"):
        levels_of(prompts, "levle", easiest="low")
