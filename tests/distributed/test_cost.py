"""The cost model reproduces worked cases and published ranges, and refuses what cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groupwise.distributed.cost import CARDS, Work, best_split, step_cost
from groupwise.errors import UsageError

SEVEN = Work(
    parameters=7.6e9,
    cache=2 * 28 * 4 * 128 * 2,
    prompts=128,
    group=16,
    prompt=300,
    mean=3000,
    longest=16384,
)


def test_a_worked_case_by_hand() -> None:
    """2,048 completions on 40 cards: 51 on each; 8·N·tokens over 24 cards at 40 % of the peak."""
    cost = step_cost(SEVEN, CARDS["h100"], cards=64, sampling=40)
    assert cost.rows == pytest.approx(51.2)
    tokens = 2048 * 3000 + 128 * 300
    assert cost.train == pytest.approx(8 * 7.6e9 * tokens / (24 * 0.4 * 989e12))
    assert cost.train == pytest.approx(39.6, abs=0.1)
    row = SEVEN.cache * (300 / 16 + 1800)
    decoding = (15.2e9 + 51.2 * row) / (0.6 * 3.35e12) + 0.002
    assert cost.bulk == pytest.approx(3000 * decoding)
    assert cost.weights == pytest.approx(15.2e9 / 50e9)


def test_the_gain_of_overlapping_stages_is_in_the_published_range() -> None:
    """Asynchronous training is reported to be 2.35 to 2.77 times as fast at 128 cards, where the
    synchronous side already overlaps some; without any overlap it is more."""
    cost = best_split(SEVEN, "h100", cards=64)
    assert 2.0 < cost.synchronous / cost.asynchronous < 6.0
    assert cost.sampling + cost.learning == 64


def test_more_cards_shorten_everything_but_the_tail() -> None:
    few, many = (best_split(SEVEN, "h100", cards=cards) for cards in (64, 512))
    assert many.asynchronous < few.asynchronous
    assert many.tail > 0.5 * few.tail
    assert many.age > few.age


@pytest.mark.parametrize(
    ("kind", "cards", "parameters", "message"),
    [
        ("h10", 64, 7e9, "did you mean h100"),
        ("h100", 1, 7e9, "at least 2"),
        ("h100", 64, 70e9, "cannot hold 140 GB"),
    ],
)
def test_what_cannot_run_is_refused(kind: str, cards: int, parameters: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        best_split(replace(SEVEN, parameters=parameters), kind, cards=cards)
