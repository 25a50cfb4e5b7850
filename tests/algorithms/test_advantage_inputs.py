"""Each name that an advantage may ask for: computed from a step, and exemplified."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupwise import ADVANTAGES
from groupwise.algorithms.advantages.inputs import INPUTS, advantage_inputs, example_inputs
from groupwise.registry import FunctionSpec
from groupwise.types import Completion, ScoredGroups
from groupwise.updates import sequences
from made_up import one_group


def with_injected_tokens() -> ScoredGroups:
    """Three completions of four tokens; of the second a tool wrote two, the third is excluded."""
    scored = one_group({"a": [1.0, 0.0, 0.5]}, [[1, 2, 3, 4]] * 3)
    first, second, third = scored.groups[0].completions
    second = replace(second, mask=[True, False, False, True], finish="length")
    group = replace(scored.groups[0], completions=(first, second, third))
    return replace(scored, groups=(group,), keep=torch.tensor([[True, True, False]]))


def test_lengths_count_the_tokens_that_the_policy_wrote() -> None:
    scored = with_injected_tokens()
    found = advantage_inputs(scored, sequences(scored))
    assert found["lengths"].tolist() == [[4, 2, 4]], "an excluded row counts in its group"
    assert found["truncated"].tolist() == [[False, True, False]]
    assert found["mask"][0, 1].tolist() == [True, False, False, True]


def test_inputs_that_a_step_has_no_data_for_are_none() -> None:
    scored = with_injected_tokens()
    found = advantage_inputs(scored, sequences(scored))
    assert {name for name, value in found.items() if value is None} == {
        "kl",
        "values",
        "bootstrap",
        "teacher_gap",
        "step_rewards",
        "token_scores",
    }


def test_values_come_from_the_columns_of_the_batch_and_kl_from_its_log_probabilities() -> None:
    scored = with_injected_tokens()
    batch = sequences(scored)
    columns = {"values": torch.full((3, 4), 0.5), "bootstrap": torch.tensor([0.0, 0.25, 0.0])}
    logp = {"old_logp": torch.full((3, 4), -1.0), "ref_logp": torch.full((3, 4), -1.5)}
    found = advantage_inputs(scored, replace(batch, columns=columns, **logp))
    assert found["values"].shape == (1, 3, 4) and found["bootstrap"].tolist() == [[0.0, 0.25, 0.0]]
    assert found["kl"][0, 1].tolist() == [0.5, 0.0, 0.0, 0.5], "nothing on injected tokens"


def test_examples_have_the_shapes_of_computed_inputs() -> None:
    scored = with_injected_tokens()
    batch = sequences(scored)
    tokens = torch.zeros(3, 4)
    columns = {"values": tokens, "teacher_gap": tokens, "bootstrap": torch.zeros(3)}
    columns |= {"step_rewards": tokens, "token_scores": tokens}
    logp = {"old_logp": torch.zeros(3, 4), "ref_logp": torch.zeros(3, 4)}
    computed = advantage_inputs(scored, replace(batch, columns=columns, **logp))
    for name, example in example_inputs(3, {}).items():
        value = computed[name]
        if name == "parts":
            value, example = value["a"], example["total"]
        assert (value.ndim, value.dtype) == (example.ndim, example.dtype), name


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_advantage_runs_on_the_examples(name: str) -> None:
    settings = ADVANTAGES.settings(name)
    given = {"weights": {"total": 1.0}} if "weights" in settings else {}
    size = 1 + max(3, *(p.default for key, p in settings.items() if key == "k"), 0)
    data = example_inputs(size, given)
    found = ADVANTAGES.bind(FunctionSpec(name=name, settings=given))(data)
    assert found.shape[:2] == (1, size) and bool(torch.isfinite(found).all())


def test_every_input_states_its_shape() -> None:
    assert all("[prompt, group" in entry.meaning for entry in INPUTS.values())


def test_a_completion_without_tokens_has_length_0() -> None:
    scored = one_group({"a": [1.0, 0.0]}, [[1], [2]])
    empty = Completion(tokens=[], mask=[], logprobs=[], text="", finish="error")
    group = replace(scored.groups[0], completions=(scored.groups[0].completions[0], empty))
    scored = replace(scored, groups=(group,))
    assert advantage_inputs(scored, sequences(scored))["lengths"].tolist() == [[1, 0]]
