"""Random numbers of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import groupwise
from groupwise.models.seeds import own_random_numbers


def test_numbers_outside_are_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    with own_random_numbers(5):
        torch.rand(7)
    assert torch.equal(torch.rand(3), wanted)


def test_only_the_current_of_several_cards_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: kept.append(device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.append(device))
    with own_random_numbers():
        assert kept == [3]
    assert kept == [3, 3]


def test_no_module_keeps_the_numbers_of_all_cards() -> None:
    sources = Path(groupwise.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "fork_rng()" in path.read_text("utf-8")] == []
