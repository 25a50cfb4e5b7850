"""Random numbers belong to a completion and to nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.rollouts import uniforms
from groupwise.types import Prompt, Request, ScoredGroups, Stream
from small_runs import prepared


def request(name: str = "a", *, stream: Sequence[int] = (0, 3, 0, 1), group: int = 4) -> Request:
    return Request(prompt=Prompt(id=name, text=""), tokens=[1], group=group, stream=Stream(*stream))


def split_mix(name: str, position: int) -> float:
    """SplitMix64 in plain integers, from the paper's constants."""
    mask = 2**64 - 1
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    x = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def test_numbers_are_pinned() -> None:
    """A changed generator would change every run."""
    found = uniforms(request(), 2)
    assert found.shape == (4, 2) and found.dtype == torch.float64
    name = "0\x1f3\x1f0\x1f1\x1fa\x1f"
    assert found.tolist() == [[split_mix(f"{name}{s}", t) for t in (0, 1)] for s in range(4)]
    assert found[0].tolist() == [0.20771032865039518, 0.6729798102676481]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), first=st.integers(0, 3), some=st.integers(1, 4))
def test_neither_how_many_are_drawn_nor_which_rows_changes_a_number(
    count: int, first: int, some: int
) -> None:
    whole = uniforms(request(group=8), 40)
    samples = tuple(range(first, first + some))
    part = uniforms(replace(request(group=8), samples=samples), count)
    assert torch.equal(part, whole[first : first + some, :count])
    assert torch.equal(uniforms(request(group=2), 40), whole[:2])


def test_every_part_of_the_name_has_its_own_stream() -> None:
    """Seed, step, draw and place; the prompt; and digits that only move from one to the next."""
    rows = [
        uniforms(request(name, stream=stream), 8)
        for name, stream in [
            ("a", (0, 3, 0, 1)),
            ("b", (0, 3, 0, 1)),
            ("a", (1, 3, 0, 1)),
            ("a", (0, 4, 0, 1)),
            ("a", (0, 3, 1, 1)),
            ("a", (0, 3, 0, 2)),
            ("a", (0, 31, 0, 1)),
            ("1a", (0, 3, 0, 0)),
            ("a", (0, 3, 0, 11)),
        ]
    ]
    every = torch.cat(rows).flatten()
    assert len(every.unique()) == len(every)


def test_numbers_are_uniform_and_neighbours_apart() -> None:
    found = uniforms(request(group=200), 500)
    assert 0 <= float(found.min()) and float(found.max()) < 1
    # Mean 1/2 with deviation 1/√(12 n); n = 100,000.
    assert abs(float(found.mean()) - 0.5) < 5 * (1 / (12 * found.numel())) ** 0.5
    for one, other in ((found[:, :-1], found[:, 1:]), (found[:-1], found[1:])):
        # A correlation of independent numbers has deviation 1/√n.
        pairs = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / one.numel() ** 0.5


def first_batch(folder: Path, *settings: str) -> ScoredGroups:
    ready = prepared(folder, "steps=1", *settings)
    try:
        return ready.trainer.source.take(ready.config.prompts_per_step, step=0)
    finally:
        ready.close()


def spoken(found: ScoredGroups) -> list[tuple[str, list[list[int]]]]:
    return [(g.prompt.id, [list(c.tokens) for c in g.completions]) for g in found.groups]


def test_two_algorithms_see_the_same_first_batch(tmp_path: Path) -> None:
    wanted = spoken(first_batch(tmp_path / "a", "algorithm.name=softrank"))
    for place, name in enumerate(("grpo", "rloo", "kimi")):
        found = first_batch(tmp_path / str(place), f"algorithm.name={name}", "engine.max_rows=5")
        assert spoken(found) == wanted


@pytest.mark.parametrize("repeated", [3, 7])
def test_one_prompt_drawn_again_in_a_batch_is_answered_anew(tmp_path: Path, repeated: int) -> None:
    found = first_batch(tmp_path, "data.limit=1", f"prompts_per_step={repeated}")
    assert len({g.prompt.id for g in found.groups}) == 1
    assert [g.stream.place for g in found.groups] == list(range(repeated))
    answers = [tuple(c.tokens) for g in found.groups for c in g.completions]
    assert len(set(answers)) > 0.9 * len(answers)


def test_a_group_can_be_asked_for_in_pieces() -> None:
    """Twice as many completions begin with the same ones."""
    small, large = request(group=3), replace(request(), group=6)
    assert torch.equal(uniforms(small, 16), uniforms(large, 16)[:3])
