"""Advantages and losses of a critic against numbers worked by hand and against those of other
projects' functions, executed on equal inputs in float64."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from groupwise import ADVANTAGES, VALUE_LOSSES
from groupwise.algorithms.advantages.critic import value_targets
from groupwise.algorithms.losses.outcomes import outcome_cross_entropy
from groupwise.algorithms.losses.values import explained_variance
from groupwise.errors import UsageError
from groupwise.registry import spec

gae = ADVANTAGES.get("gae")

# Rewards (0, 0, 1), values (.2, .5, .7). gamma = 1, λ = .95: δ = (.3, .2, .3),
# A = (.3 + .95 · .485, .2 + .95 · .3, .3).
VALUES = torch.tensor([[[0.2, 0.5, 0.7]]], dtype=torch.float64)
SOLID = torch.ones(1, 1, 3, dtype=torch.bool)
ONE = torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantage", "whitened"),
    [
        (1.0, 1.0, [0.8, 0.5, 0.3], [1.059626, -0.132453, -0.927173]),
        (1.0, 0.95, [0.76075, 0.485, 0.3], [1.058830, -0.130467, -0.928363]),
        (0.99, 0.95, [0.741879, 0.47515, 0.3], [1.061511, -0.137187, -0.924324]),
        (1.0, 0.0, [0.3, 0.2, 0.3], [0.577349, -1.154699, 0.577349]),
    ],
)
def test_gae_is_the_number_worked_by_hand(gamma, lam, advantage, whitened) -> None:
    got = gae(ONE, VALUES, SOLID, gamma=gamma, lam=lam)
    torch.testing.assert_close(got[0, 0], torch.tensor(advantage).double(), rtol=0, atol=5e-7)
    targets = value_targets(ONE, VALUES, SOLID, gamma=gamma, lam=lam)
    torch.testing.assert_close(targets, got + VALUES, rtol=0, atol=0)
    white = gae(ONE, VALUES, SOLID, gamma=gamma, lam=lam, whitened=True)
    torch.testing.assert_close(white[0, 0], torch.tensor(whitened).double(), rtol=0, atol=2e-6)


# Two answers with injected tokens, whose values and penalties may be anything.
REWARDS = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
HOLED_VALUES = torch.tensor(
    [[[0.2, 0.5, 9.0, 0.7, 0.1], [0.3, -0.4, 0.8, 0.6, 7.0]]], dtype=torch.float64
)
HOLED = torch.tensor([[[1, 1, 0, 1, 1], [1, 0, 0, 1, 0]]], dtype=torch.bool)
KL = torch.tensor([[[0.01, -0.02, 5, 0.03, 0], [0.05, 3, 2, -0.01, 1]]], dtype=torch.float64)
WHITENED_BY_VERL = [
    *(0.8211493801633203, 0.4785115093736477, 0.21857933153320633, 0.9629305680762885),
    *(-1.0928966566617482, -1.3882741314804317),
]
TARGETS_BY_VERL = [0.5521472, 0.65576, 0.708, 1.0, -0.2948, -0.49]
ADVANTAGES_BY_OPENRLHF = [0.223977984, -0.0222528, 0.008, 0.9, -0.47690432, -1.09]


def test_gae_carries_values_over_injected_tokens_as_verl_does() -> None:
    # compute_gae_advantage_return of verl b178a3cd5, with its masked whitening
    got = gae(REWARDS, HOLED_VALUES, HOLED, kl=KL, whitened=True)[HOLED]
    torch.testing.assert_close(got, torch.tensor(WHITENED_BY_VERL).double(), rtol=0, atol=2e-7)
    targets = value_targets(REWARDS, HOLED_VALUES, HOLED, kl=KL, gamma=0.9, lam=0.8)[HOLED]
    torch.testing.assert_close(targets, torch.tensor(TARGETS_BY_VERL).double(), rtol=0, atol=1e-7)


def test_gae_with_zeroed_values_is_that_of_openrlhf() -> None:
    # get_advantages_and_returns of OpenRLHF 3c3be623
    got = gae(REWARDS, HOLED_VALUES, HOLED, kl=KL, gamma=0.9, lam=0.8, injected="zero")[HOLED]
    wanted = torch.tensor(ADVANTAGES_BY_OPENRLHF).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)


def test_a_longer_tool_reply_changes_no_advantage() -> None:
    longer = torch.cat(
        [HOLED[..., :3], HOLED[..., 2:3].expand(-1, -1, 4) & False, HOLED[..., 3:]], -1
    )
    values = torch.full(longer.shape, 123.0, dtype=torch.float64)
    values[longer] = HOLED_VALUES[HOLED]
    kl = torch.full(longer.shape, 9.0, dtype=torch.float64)
    kl[longer] = KL[HOLED]
    got = gae(REWARDS, values, longer, kl=kl, gamma=0.9, lam=0.8)
    assert torch.equal(
        got[longer], gae(REWARDS, HOLED_VALUES, HOLED, kl=KL, gamma=0.9, lam=0.8)[HOLED]
    )


def test_without_values_gae_is_reinforce_and_with_the_group_mean_dr_grpo() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.25, 0.5, 0.0, 1.0]])
    mask = torch.arange(3) < torch.tensor([[3, 2, 1, 3], [1, 1, 2, 3]])[..., None]
    none = gae(rewards, torch.zeros(2, 4, 3), mask)
    assert torch.equal(none, torch.where(mask, ADVANTAGES.get("raw")(rewards)[..., None], 0))
    means = rewards.mean(-1, keepdim=True)[..., None].expand(2, 4, 3)
    centred = torch.where(mask, ADVANTAGES.get("centered")(rewards)[..., None], 0)
    # λ = 1 telescopes: the values of later tokens cancel, exactly where sums of them are exact.
    assert torch.equal(gae(rewards, means, mask), centred)


def test_length_alpha_is_the_lambda_of_every_answer_and_never_negative() -> None:
    # α = .5: one token λ = max(0, −1) = 0, three tokens λ = 1 − 1/1.5 = 1/3
    rewards = torch.ones(1, 2, dtype=torch.float64)
    values = VALUES.expand(1, 2, 3)
    mask = torch.tensor([[[True, False, False], [True, True, True]]])
    got = gae(rewards, values, mask, length_alpha=0.5)
    assert torch.equal(got[0, 0], torch.tensor([0.8, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(got[0, 1:], gae(ONE, VALUES, SOLID, lam=1 / 3)[0])


def test_truncated_answers_bootstrap_from_the_value_after_the_last_token() -> None:
    # δ of the last token: 0 + .9 · .6 − .7 = −.16
    bootstrap = torch.tensor([[0.6]], dtype=torch.float64)
    got = gae(0 * ONE, VALUES, SOLID, bootstrap=bootstrap, gamma=0.9, lam=0.0)
    torch.testing.assert_close(got[0, 0, -1].item(), -0.16)
    assert got[0, 0, -1] != gae(0 * ONE, VALUES, SOLID, gamma=0.9, lam=0.0)[0, 0, -1]


@pytest.mark.parametrize(
    "settings", [{"gamma": 1.1}, {"gamma": -0.1}, {"lam": 2.0}, {"length_alpha": 0.0}]
)
def test_settings_of_gae_out_of_range_are_refused(settings) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(settings))} = "):
        gae(ONE, VALUES, SOLID, **settings)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_masks_of_numbers_as_other_projects_have_them_are_read(dtype: torch.dtype) -> None:
    wanted = gae(REWARDS, HOLED_VALUES, HOLED, kl=KL, gamma=0.9, lam=0.8)
    got = gae(REWARDS, HOLED_VALUES, HOLED.to(dtype), kl=KL, gamma=0.9, lam=0.8)
    assert torch.equal(got, wanted)
    targets = value_targets(REWARDS, HOLED_VALUES, HOLED.to(dtype), gamma=0.9)
    assert torch.equal(targets, value_targets(REWARDS, HOLED_VALUES, HOLED, gamma=0.9))


@pytest.mark.parametrize(
    ("rewards", "values", "mask"),
    [
        (torch.ones(1, 2), VALUES, SOLID),
        (ONE, VALUES.expand(1, 2, 3), SOLID.expand(1, 2, 3)),
        (ONE, VALUES, SOLID[..., :2]),
        (ONE, VALUES[0], SOLID[0]),
    ],
)
def test_gae_broadcasts_no_reward_to_other_answers(rewards, values, mask) -> None:
    plain = inspect.unwrap(gae)  # The suite's own check of annotations comes before.
    with pytest.raises(UsageError, match=r"values \(.*must be \[prompt, group, time\]"):
        plain(rewards, values, mask)


def test_value_losses_are_the_numbers_worked_by_hand() -> None:
    # V_old = (.2, .5, .7), V = (.5, .55, .6), R = 1, clip .2: V clipped (.4, .55, .6);
    # halves of the squares (.25, .2025, .16) and of the larger ones (.36, .2025, .16)
    data = {
        "values": torch.tensor([[0.5, 0.55, 0.6]], dtype=torch.float64),
        "old_values": VALUES[0],
        "returns": torch.ones(1, 3, dtype=torch.float64),
        "mask": SOLID[0],
    }
    for name, wanted in {
        "squared": [0.125, 0.10125, 0.08],
        "clipped": [0.18, 0.10125, 0.08],
    }.items():
        got = VALUE_LOSSES.bind(spec(name))(data)
        torch.testing.assert_close(
            got, torch.tensor([wanted], dtype=torch.float64), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", VALUE_LOSSES.names())
def test_value_losses_leave_hidden_tokens_out(name: str) -> None:
    values = torch.tensor([[0.5, float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    data = {"values": values, "old_values": torch.zeros(1, 2), "returns": torch.ones(1, 2)}
    loss = VALUE_LOSSES.bind(spec(name))({**data, "mask": mask})
    loss.sum().backward()
    assert loss[0, 1] == 0 and values.grad is not None and values.grad[0, 1] == 0


def test_explained_variance_of_exact_constant_and_opposite_values() -> None:
    returns, mask = torch.tensor([0.0, 1.0, 1.0, 9.0]), torch.tensor([1, 1, 1, 0]) > 0
    assert explained_variance(returns, returns, mask) == 1
    assert abs(explained_variance(torch.full((4,), 0.3), returns, mask)) < 1e-12
    assert abs(explained_variance(1 - returns, returns, mask) + 3) < 1e-12
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))


def test_returns_that_are_equal_up_to_rounding_have_no_variance_to_explain() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    rounded = torch.tensor([1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0])
    assert rounded.unique().numel() == 3
    assert math.isnan(explained_variance(torch.zeros(4), rounded, mask))
    assert not math.isnan(explained_variance(torch.zeros(4), torch.tensor([0, 0, 0, 1e-5]), mask))


def test_the_loss_of_a_token_reward_model_is_the_number_worked_by_hand() -> None:
    # the mean of (1, −.5, 2, −3) is −.125: log(1 + e^.125) and log(1 + e^−.125)
    scores = torch.tensor([[1.0, -0.5, 2.0, -3.0]] * 2, dtype=torch.float64)
    outcome = torch.tensor([1.0, 0.0], dtype=torch.float64)
    wanted = torch.tensor([0.757599, 0.632599], dtype=torch.float64)
    got = outcome_cross_entropy(scores, outcome, torch.ones(2, 4) > 0)
    torch.testing.assert_close(got, wanted, rtol=0, atol=5e-7)
    # a token outside the mask counts for nothing, whatever its score
    poisoned = torch.cat([scores, torch.full((2, 1), torch.inf)], 1).requires_grad_()
    hidden = outcome_cross_entropy(poisoned, outcome, torch.arange(5) < torch.tensor([[4], [4]]))
    (gradient,) = torch.autograd.grad(hidden.sum(), poisoned)
    assert torch.equal(hidden, got) and torch.isfinite(gradient).all()
    assert (gradient[:, 4] == 0).all() and (gradient[:, :4] != 0).all()
