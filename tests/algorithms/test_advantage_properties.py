"""Properties of every registered advantage, found by enumeration.

A function that lacks a property by design says so (`groupwise.algorithms.properties`), and is then
tested to break it.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from groupwise import ADVANTAGES
from groupwise.algorithms.advantages.statistics import judged
from groupwise.algorithms.properties import PROPERTIES, breaks, broken
from groupwise.errors import UsageError
from groupwise.registry import spec

NAN = float("nan")
P, G, T = 3, 6, 5
NAMES = ADVANTAGES.names()


def made(seed: int = 0, *, prompts: int = P, group: int = G) -> dict[str, Any]:
    """Groups of distinct rewards in (0, 1), answers of 1 to 5 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = 1 + (rand(prompts, group) * T).long()
    return {
        "rewards": rand(prompts, group),
        "valid": torch.ones(prompts, group, dtype=torch.bool),
        "correct": (rand(prompts, group) > 0.5).double(),
        "lengths": lengths,
        "kl": 0.1 * rand(prompts, group, T),
        "parts": {"accuracy": rand(prompts, group), "format": rand(prompts, group)},
        "mask": torch.arange(T) < lengths[..., None],
        "values": 0.2 * rand(prompts, group, T),
        "bootstrap": 0.2 * rand(prompts, group),
        "teacher_gap": rand(prompts, group, T) - 0.5,
        "step_rewards": torch.where(rand(prompts, group, T) < 0.5, rand(prompts, group, T), NAN),
        "token_scores": 4 * rand(prompts, group, T) - 2,
    }


def chosen(data: dict[str, Any], prompts: slice, samples: Any) -> dict[str, Any]:
    """Some prompts and samples of the data, in the order given."""
    cut: dict[str, Any] = {
        key: value[prompts][:, samples] for key, value in data.items() if key != "parts"
    }
    return {**cut, "parts": {k: v[prompts][:, samples] for k, v in data["parts"].items()}}


def call(name: str, data: dict[str, Any], **settings: Any) -> torch.Tensor:
    return ADVANTAGES.bind(spec(name, **settings))(data)


def equal_rewards(data: dict[str, Any], value: float) -> dict[str, Any]:
    """The same data with every reward, correctness and part equal, without penalties and values."""
    flat = torch.full_like(data["rewards"], value)
    parts = {key: flat for key in data["parts"]}
    values, bootstrap = torch.zeros_like(data["values"]), torch.zeros_like(flat)
    none = {"kl": None, "values": values, "teacher_gap": values, "bootstrap": bootstrap}
    none["step_rewards"] = values
    return {**data, "rewards": flat, "correct": flat, "parts": parts, **none}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_shape_dtype_and_finite(name: str, dtype: torch.dtype) -> None:
    data = made()
    for key in data.keys() - {"valid", "lengths", "parts", "mask"}:
        data[key] = data[key].to(dtype)
    data["parts"] = {k: v.to(dtype) for k, v in data["parts"].items()}
    got = call(name, data)
    assert got.shape in {(P, G), (P, G, T)}
    assert got.dtype == dtype
    assert torch.isfinite(got).all()
    if got.ndim == 3:
        assert (got[~data["mask"]] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_rewards_that_differ_get_advantages_that_differ(name: str) -> None:
    got = call(name, made())
    if name == "softrank_group":  # one number for the whole group is what it is
        assert (got == got[:, :1]).all()
    else:
        assert (got.flatten(1) != got.flatten(1)[:, :1]).any()


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name: str) -> None:
    data, again = made(), made()
    call(name, data)
    for key, value in data.items():
        if key != "parts":
            assert torch.equal(value.nan_to_num(9.0), again[key].nan_to_num(9.0)), key
    assert all(torch.equal(data["parts"][k], again["parts"][k]) for k in data["parts"])


@pytest.mark.parametrize("name", NAMES)
def test_order_within_a_group_does_not_matter(name: str) -> None:
    data = made(1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = call(name, chosen(data, slice(None), order))
    torch.testing.assert_close(moved, call(name, data)[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_independent(name: str) -> None:
    data, other = made(2), made(3)
    mixed: dict[str, Any] = {}
    for key, value in data.items():
        if key == "parts":
            mixed[key] = {k: torch.cat([v[:1], other[key][k][1:]]) for k, v in value.items()}
        else:
            mixed[key] = torch.cat([value[:1], other[key][1:]])
    same = torch.allclose(call(name, data)[0], call(name, mixed)[0], rtol=0, atol=1e-12)
    # `counting = "groups"` of signal_scaled only sees whether other groups have a signal.
    if name == "signal_scaled":
        same = torch.allclose(
            call(name, data)[0], call(name, _without_signal_elsewhere(data))[0], atol=1e-12
        )
    assert same is ("prompts_independent" not in broken(ADVANTAGES.get(name)))


def _without_signal_elsewhere(data: dict[str, Any]) -> dict[str, Any]:
    rewards = data["rewards"].clone()
    rewards[1:] = 0.5
    return {**data, "rewards": rewards}


@pytest.mark.parametrize("value", [0.1 + 0.2, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_no_signal_no_advantage(name: str, value: float) -> None:
    data = made(4)
    flat = equal_rewards(data, value)
    # One group without signal among others with: what a batch baseline would not see otherwise.
    flat["rewards"][1:] = data["rewards"][1:]
    flat["parts"] = {k: torch.cat([flat["rewards"][:1], v[1:]]) for k, v in data["parts"].items()}
    zero = bool((call(name, flat)[0] == 0).all())
    assert zero is ("zero_without_signal" not in broken(ADVANTAGES.get(name)))


@pytest.mark.parametrize("name", NAMES)
def test_zero_rewards_give_zero_everywhere(name: str) -> None:
    assert (call(name, equal_rewards(made(5), 0.0)) == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_excluded_samples_enter_no_statistic(name: str) -> None:
    data = made(6)
    kept = torch.tensor([0, 1, 2, 4, 5])
    smaller = call(name, chosen(data, slice(None), kept))
    for hidden in (123.0, float("nan")):
        rewards, valid = data["rewards"].clone(), data["valid"].clone()
        rewards[:, 3], valid[:, 3] = hidden, False
        parts = {k: v.clone() for k, v in data["parts"].items()}
        for values in parts.values():
            values[:, 3] = hidden
        got = call(name, {**data, "rewards": rewards, "valid": valid, "parts": parts})
        assert (got[:, 3] == 0).all()
        torch.testing.assert_close(got[:, kept], smaller, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_nan_reward_alone_excludes_a_sample(name: str) -> None:
    data = made(7)
    rewards = data["rewards"].clone()
    rewards[:, 3] = float("nan")
    parts = {k: torch.where(torch.isnan(rewards), rewards, v) for k, v in data["parts"].items()}
    marked = {**data, "valid": ~torch.isnan(rewards), "rewards": rewards, "parts": parts}
    unmarked = {**marked, "valid": None}
    torch.testing.assert_close(call(name, unmarked), call(name, marked), rtol=0, atol=0)


@pytest.mark.parametrize("judged", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_groups_with_one_judged_sample_or_none_stay_finite(name: str, judged: int) -> None:
    data = made(8)
    data["valid"][0] = torch.arange(G) < judged
    got = call(name, data)
    assert torch.isfinite(got).all()
    assert (got[0, judged:] == 0).all()
    alone = {**data, "valid": data["valid"] & (torch.arange(P)[:, None] == 0)}
    assert torch.isfinite(call(name, alone)).all()


@pytest.mark.parametrize("name", NAMES)
def test_hidden_tokens_do_not_matter(name: str) -> None:
    data = made(9)
    hidden = ("kl", "values", "teacher_gap", "token_scores")
    poisoned = {k: torch.where(data["mask"], data[k], NAN) for k in hidden}
    poisoned["step_rewards"] = torch.where(data["mask"], data["step_rewards"], 9.0)
    got = call(name, {**data, **poisoned})
    torch.testing.assert_close(got, call(name, data), rtol=0, atol=0)


ORDERED = sorted(
    set(NAMES)
    - {"softrank_group", "softbok_loo", "leader_minus_second", "discounted_whitened"}
    - {"step_zscore"}
    - {"gae", "distilled", "parts_zscore", "successes", "pass_at_k_training", "pass_at_k_gradient"}
    - {"cloning", "token_cloning"}
)


@pytest.mark.parametrize("name", ORDERED)
def test_a_better_answer_never_gets_less(name: str) -> None:
    data = made(10)
    data["rewards"] = data["rewards"].sort(-1).values
    got = call(name, data)
    assert (got.diff(dim=-1) >= -1e-12).all()


def test_softbok_loo_is_not_ordered() -> None:
    # its docstring's warning: the second best of (4, 2.5, 1, .5) gets the lowest value
    got = call("softbok_loo", {"rewards": torch.tensor([[4.0, 2.5, 1.0, 0.5]])})
    assert got[0].argmin().item() == 1


def test_injected_tokens_are_stepped_over() -> None:
    # a reward at the end reaches the tokens before a tool's output, undiscounted by it
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    solid = torch.tensor([[[True, True, True, False]] * 2])
    holed = torch.tensor([[[True, False, True, True]] * 2])
    one = call("discounted_whitened", {"rewards": rewards, "mask": solid}, gamma=0.5)
    two = call("discounted_whitened", {"rewards": rewards, "mask": holed}, gamma=0.5)
    torch.testing.assert_close(one[solid], two[holed])


def test_broken_properties_are_known() -> None:
    declared = {broke for name in NAMES for broke in broken(ADVANTAGES.get(name))}
    assert declared <= set(PROPERTIES)
    with pytest.raises(ValueError, match="did you mean zero_without_signal"):
        breaks("zero_without_signals")


@pytest.mark.parametrize("rewards", [[[1.0, 0.0]], np.ones((1, 2))], ids=["list", "array"])
def test_rewards_that_are_no_tensor_are_refused(rewards: Any) -> None:
    plain = inspect.unwrap(judged)  # The suite's own check of annotations comes before.
    with pytest.raises(UsageError, match=r"takes tensors; use torch\.tensor\(rewards\)"):
        plain(rewards, None)
