"""Groups are dealt whole and by cost, and nothing is lost."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.distributed.balance import Cost, deal
from groupwise.types import Batch


def batch_of(groups: list[list[int]], *, prompt: int = 3) -> Batch:
    """Groups of completions of the given lengths."""
    lengths = [length for group in groups for length in group]
    owner = [index for index, group in enumerate(groups) for _ in group]
    time = max(lengths, default=0)
    shape = (len(lengths), time)
    return Batch(
        prompts=tuple(torch.zeros(prompt, dtype=torch.long) for _ in groups),
        group=torch.tensor(owner, dtype=torch.long),
        tokens=torch.zeros(shape, dtype=torch.long),
        length=torch.tensor(lengths, dtype=torch.long),
        mask=torch.ones(shape, dtype=torch.bool),
        advantage=torch.zeros(shape),
        weight=torch.zeros(shape),
    )


GROUPS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=8)


@given(GROUPS, st.integers(1, 5), st.booleans())
def test_every_row_is_dealt_once_and_whole_groups_stay_whole(
    groups: list[list[int]], ranks: int, whole: bool
) -> None:
    batch = batch_of(groups)
    dealt = deal(batch, torch.arange(len(batch.length)), ranks, whole_groups=whole)
    assert sorted(row for rows in dealt for row in rows.tolist()) == list(range(len(batch.length)))
    if whole:
        owners = [set(batch.group[rows].tolist()) for rows in dealt]
        assert sum(map(len, owners)) == len(groups)


@given(GROUPS, st.integers(1, 5))
def test_no_rank_has_more_than_an_equal_share_and_one_unit(
    groups: list[list[int]], ranks: int
) -> None:
    batch, cost = batch_of(groups), Cost(pair=0.01)
    dealt = deal(batch, torch.arange(len(batch.length)), ranks, cost=cost, whole_groups=True)
    single = [cost(3, group) for group in groups]
    loads = [sum(single[owner] for owner in set(batch.group[rows].tolist())) for rows in dealt]
    assert max(loads) <= sum(single) / ranks + max(single) + 1e-9


def test_a_group_larger_than_a_share_is_divided_unless_it_must_stay_whole() -> None:
    batch = batch_of([[10, 10, 10, 10]])
    rows = torch.arange(4)
    assert [len(own) for own in deal(batch, rows, 2)] == [2, 2]
    assert [len(own) for own in deal(batch, rows, 2, whole_groups=True)] == [4, 0]


def test_long_completions_cost_more_than_their_tokens() -> None:
    groups = [[30], [10, 10, 10]]
    assert Cost()(3, groups[0]) == Cost()(3, groups[1])
    assert Cost(pair=0.1)(3, groups[0]) > Cost(pair=0.1)(3, groups[1])
