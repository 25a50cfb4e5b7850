"""What truncated sampling leaves to draw from, and how completions keep it."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

import groupwise.testing.engines as contract
from groupwise.errors import RunError
from groupwise.kernels.reference import rising
from groupwise.rollouts import make_engine
from groupwise.rollouts.sampling import kept_ids
from groupwise.settings import EngineSettings
from groupwise.types import Sampling
from groupwise.updates.packing import support_mask
from small_runs import prepared, tiny


def test_kept_sets_take_four_bytes_for_each_token() -> None:
    support = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    kept = kept_ids(support)
    assert kept == [array("i", [0, 2]), array("i"), array("i", [1])]
    assert {each.itemsize for each in kept} == {4}
    again = support_mask([kept, None], torch.tensor([0, 0, 1]), torch.tensor([0, 2, 0]), vocab=3)
    assert again.tolist() == [[True, False, True], [False, True, False], [True, True, True]]


@pytest.mark.parametrize("name", ["group", "generate"])
def test_engines_keep_the_sets_compact(name: str) -> None:
    engine = make_engine(tiny(), EngineSettings(name=name))  # pyright: ignore[reportArgumentType]
    sampling = Sampling(max_tokens=4, top_k=3)
    for group in engine.generate(contract.make_requests(1), sampling):
        for completion in group.completions:
            assert completion.support is not None
            for token, kept in zip(completion.tokens, completion.support, strict=True):
                assert isinstance(kept, array) and len(kept) == 3 and int(token) in kept


def test_no_token_of_probability_0_is_drawn_from_a_scan_that_wavers() -> None:
    """As a parallel scan in float32 gives it: 2e-8 too much at a token that cannot be drawn."""
    probs = torch.tensor([[0.5, 0.0, 0.0, 0.5]])
    cdf = torch.tensor([[0.5, 0.5 + 1e-7, 0.5 - 1e-7, 1.0]])
    target = torch.tensor([[0.5 + 6e-8]])
    assert int(torch.searchsorted(cdf.cummax(-1).values, target, right=True)) == 1, (
        "cannot be drawn"
    )
    assert int(torch.searchsorted(rising(cdf, probs), target, right=True)) == 3
    exact = probs.cumsum(-1)
    assert torch.equal(rising(exact, probs), exact)


def test_a_batch_of_truncated_answers_is_called_that(tmp_path: Path) -> None:
    given = ["sampling.max_tokens=1", "algorithm.filter.name=not_truncated", "seed=1"]
    run = prepared(tmp_path, *given, "algorithm.max_draws=2")
    with pytest.raises(RunError, match=r"every completion ran out of tokens .*max_tokens = 1\)"):
        run.trainer.step()
    run.close()
