"""What truncated sampling leaves to draw from, and how completions keep it."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from torch import Tensor

import groupwise.testing.engines as contract
from groupwise.errors import RunError
from groupwise.kernels.reference import rising
from groupwise.rollouts import make_engine
from groupwise.rollouts.sampling import draw, kept_ids
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


def drawn(logits: Tensor, uniform: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    found = draw(logits, uniform, Sampling(max_tokens=1, temperature=temperature))
    return found.tokens, found.logp


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 128, 129, 1000, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_tokens_are_drawn_by_their_probabilities(size: int, temperature: float) -> None:
    logits, uniform = 3 * numbers(400, size), torch.linspace(0, 1, 400, dtype=torch.float64)
    logits[::2, 1::3], logits[1::2, : size // 2] = -torch.inf, -torch.inf
    uniform[-1] = 1 - 2**-53
    tokens, logp = drawn(logits, uniform, temperature)
    probs = torch.softmax(logits.double() / temperature, -1)
    found = probs.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logp.double().exp(), found, rtol=1e-5, atol=1e-9)
    assert (logp > -torch.inf).all()
    after = probs.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    assert (after > uniform - 1e-6).all() and (after - logp.exp() < uniform + 1e-6).all()


@pytest.mark.parametrize("size", [100, 1000])
def test_the_largest_number_below_one_draws_a_token_of_positive_probability(size: int) -> None:
    logits, uniform = numbers(400, size), torch.full((400,), 1 - 2**-53, dtype=torch.float64)
    logits[:, size - 30 :] = -torch.inf
    _, logp = drawn(logits, uniform)
    assert (logp > -torch.inf).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [40, 300])
def test_rows_without_probabilities_get_a_logprob_of_nan(number: float, size: int) -> None:
    """A row of -inf alone has no probabilities either; the rows beside it do."""
    logits = numbers(3, size)
    logits[1] = number
    tokens, logp = drawn(logits, torch.full((3,), 0.5))
    assert logp.isnan().tolist() == [False, True, False] and tokens[1] == size - 1


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_one_logit_without_a_value_is_enough(number: float) -> None:
    logits = numbers(2, 300)
    logits[1, 200] = number
    _, logp = drawn(logits, torch.tensor([0.5, 0.1]))
    assert logp.isnan().tolist() == [False, True]


def test_no_rows_no_tokens() -> None:
    tokens, logp = drawn(numbers(0, 40), torch.zeros(0))
    assert tokens.shape == logp.shape == (0,)


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
