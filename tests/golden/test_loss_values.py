"""Every function of the losses against numbers worked by hand, one for each registered name."""

from __future__ import annotations

import math

import pytest
import torch

from devices import ON_EVERY_DEVICE, placed
from groupwise import (
    ADVANTAGES,
    CORRECTIONS,
    DIVERGENCES,
    FILTERS,
    RATIOS,
    SURROGATES,
    WEIGHTINGS,
)
from groupwise.algorithms import bind
from groupwise.errors import UsageError
from groupwise.registry import spec
from groupwise.types import Batch, Outputs

ATOL = 5e-6


def row(*values: float) -> torch.Tensor:
    """One row of float64 tokens."""
    return torch.tensor([values], dtype=torch.float64)


def assert_row(got: torch.Tensor, *expected: float, atol: float = ATOL) -> None:
    torch.testing.assert_close(got.double(), row(*expected), rtol=0, atol=atol)


YES3 = torch.ones(1, 3, dtype=torch.bool)
X3 = row(0.1, -0.2, 0.3)


RATIO_VALUES = [
    ("token", X3, [0.1, -0.2, 0.3]),  # e^x = 1.105171, .818731, 1.349859
    ("sequence", X3, [0.066667] * 3),  # (.1 − .2 + .3)/3, e^ that = 1.068939
]


@pytest.mark.parametrize(("name", "x", "expected"), RATIO_VALUES)
@ON_EVERY_DEVICE
def test_ratio_is_the_number_worked_by_hand(name, x, expected, device) -> None:
    x = x.to(device)
    got = RATIOS.get(name)(x - 1, torch.full_like(x, -1.0), YES3.to(device))
    assert_row(got.cpu(), *expected)


def surrogate(
    name: str, ratio: list[float], advantage: list[float], *, device: str = "cpu", **settings
) -> torch.Tensor:
    """Token losses at some ratios, with logp = log(ratio) − 1."""
    x = torch.tensor([ratio], dtype=torch.float64).log()
    data = {
        "log_ratio": x,
        "logp": x - 1,
        "advantage": torch.tensor([advantage], dtype=torch.float64),
        "mask": torch.ones_like(x, dtype=torch.bool),
    }
    return SURROGATES.bind(spec(name, **settings))(placed(data, device)).cpu()


PPO_RATIOS = [0.5, 1.5, 4.0, 0.5, 0.9, 1.5, 4.0]
PPO_SIGNS = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]

SURROGATE_VALUES = [
    # objective min(ρA, clip(ρ)A), so the loss is its negative
    ("ppo_clip", PPO_RATIOS, PPO_SIGNS, {}, [-0.5, -1.2, -1.2, 0.8, 0.9, 1.5, 4.0]),
    ("ppo_clip", PPO_RATIOS, PPO_SIGNS, {"high": 0.28}, [-0.5, -1.28, -1.28, 0.8, 0.9, 1.5, 4.0]),
    ("dual_clip", PPO_RATIOS, PPO_SIGNS, {}, [-0.5, -1.2, -1.2, 0.8, 0.9, 1.5, 3.0]),
    ("dual_clip", [11.0, 9.0], [-1.0, -1.0], {"bound": 10.0}, [10.0, 9.0]),
    ("importance", PPO_RATIOS, PPO_SIGNS, {}, [-0.5, -1.5, -4.0, 0.5, 0.9, 1.5, 4.0]),
    # −A logp with logp = log ρ − 1
    ("reinforce", [1.0, math.e], [2.0, -1.0], {}, [2.0, 0.0]),
    ("nll", [1.0, math.e], [2.0, -1.0], {}, [1.0, 0.0]),
    # weights min(ρ, 5) = 5 and 1: 5 · 2 · (1 − log 6), then −1 · 1
    ("cispo", [6.0, 1.0], [2.0, -1.0], {}, [10 * (1 - math.log(6)), -1.0]),
    ("cispo", [0.5], [1.0], {"floor": 0.8}, [0.8 * (1 - math.log(0.5))]),
    # gates: σ(ρ − 1) · 4 and σ(1.05 (ρ − 1)) · 4/1.05
    ("sapo", [0.5, 1, 1.5, 3], [1.0] * 4, {}, [-1.510163, -2.0, -2.489837, -3.523188]),
    ("sapo", [0.5, 1, 1.5, 3], [-1.0] * 4, {}, [1.415938, 1.904762, 2.393585, 3.393917]),
    # log-ratios (.1, −.6, .9): A > 0 takes .9 → .4, exp(−.1/3); A < 0 takes −.6 → −.4, exp(.6/3)
    ("gmpo", [math.exp(x) for x in (0.1, -0.6, 0.9)], [1.0] * 3, {}, [-0.967216] * 3),
    ("gmpo", [math.exp(x) for x in (0.1, -0.6, 0.9)], [-1.0] * 3, {}, [1.221403] * 3),
    # π_old = π/ρ: e^(−1)·(ρ − 1) more probable than before: .184 of .2 allowed, then .221
    ("dppo", [1.5, 1.6], [1.0, 1.0], {}, [1.5 * (1 - math.log(1.5)), 0.0]),
    ("dppo", [0.5, 0.4], [-1.0, -1.0], {}, [-0.5 * (1 - math.log(0.5)), 0.0]),
    # a move in the direction that A opposes keeps its gradient, weight capped at 20
    ("dppo", [25.0], [-1.0], {}, [20 * (math.log(25) - 1)]),
    # φ(W) = W² e^{3(1−W)} where A > 0, W³ e^{2(1−W)} where A < 0; logp = log W − 1
    ("vespo", [0.5], [1.0], {}, [1.120422 * (1 - math.log(0.5))]),
    ("vespo", [4.0], [1.0], {}, [0.001975 * (1 - math.log(4))]),
    ("vespo", [0.5], [-1.0], {}, [-0.339785 * (1 - math.log(0.5))]),
    ("vespo", [2.0], [-1.0], {}, [-1.082682 * (1 - math.log(2))]),
    # two tokens make one W = 2 · 1: both weigh 2² e^{−3} = .199148
    ("vespo", [2.0, 1.0], [1.0] * 2, {}, [0.199148 * (1 - math.log(2)), 0.199148]),
    # k = 1, λ = 1: 2 e^{−1} and, for A < 0, .5⁰ e^{.5}
    (
        "vespo",
        [2.0],
        [1.0],
        {"power_positive": 1.0, "decay_positive": 1.0},
        [2 / math.e * (1 - math.log(2))],
    ),
    (
        "vespo",
        [0.5],
        [-1.0],
        {"power_negative": 0.0, "decay_negative": 1.0},
        [-math.exp(0.5) * (1 - math.log(0.5))],
    ),
    # tau .5, factor 1/(2 tau) = 1: (.5 − .5 · .1)² = .2025
    ("mirror_descent", [math.exp(0.1)], [0.5], {}, [0.2025]),
    # two tokens share the loss of a sequence: x = .2, (.5 − .1)² / 2
    ("mirror_descent", [math.exp(0.1)] * 2, [0.5] * 2, {}, [0.08] * 2),
    # tau 2: (.5 − 2 · .1)² / 4
    ("mirror_descent", [math.exp(0.1)], [0.5], {"tau": 2.0}, [0.0225]),
]


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "settings", "expected"),
    SURROGATE_VALUES,
    ids=[f"{case[0]}-{i}" for i, case in enumerate(SURROGATE_VALUES)],
)
@ON_EVERY_DEVICE
def test_surrogate_is_the_number_worked_by_hand(
    name, ratio, advantage, settings, expected, device
) -> None:
    assert_row(surrogate(name, ratio, advantage, device=device, **settings), *expected)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        # d loss / d log ρ = −ρA where the min takes the unclipped branch, else 0
        ("ppo_clip", [-0.5, 0, 0, 0, 0.9, 1.5, 4.0]),
        ("dual_clip", [-0.5, 0, 0, 0, 0.9, 1.5, 0]),
        ("importance", [-0.5, -1.5, -4.0, 0.5, 0.9, 1.5, 4.0]),
    ],
)
def test_gradient_stops_where_the_clip_says(name, gradient) -> None:
    x = torch.tensor([PPO_RATIOS], dtype=torch.float64).log().requires_grad_()
    mask = torch.ones_like(x, dtype=torch.bool)
    loss = SURROGATES.get(name)(log_ratio=x, advantage=row(*PPO_SIGNS), mask=mask)
    assert_row(torch.autograd.grad(loss.sum(), x)[0], *gradient)


def test_sapo_gate_has_the_slopes_of_its_paper() -> None:
    # df/dρ at ρ = .5, 1, 1.5, 3; d/d log ρ is ρ times that
    ratio = torch.tensor([[0.5, 1, 1.5, 3]], dtype=torch.float64)
    x = ratio.log().requires_grad_()
    loss = SURROGATES.get("sapo")(x, torch.ones_like(ratio), torch.ones_like(ratio) > 0)
    slope = -torch.autograd.grad(loss.sum(), x)[0] / ratio
    assert_row(slope, 0.940015, 1.0, 0.940015, 0.419974)


def test_mirror_descent_of_a_group() -> None:
    # r = (1,0,0,1), tau .5, log-ratios (.1,−.2,0,.3), one token each; mean over the four answers
    x = torch.tensor([[0.1], [-0.2], [0.0], [0.3]], dtype=torch.float64).requires_grad_()
    rewards = row(1, 0, 0, 1)
    mask = torch.ones(4, 1, dtype=torch.bool)
    for name, residuals, mean in (
        ("centered", [0.2025, 0.16, 0.25, 0.1225], 0.183750),
        ("soft_centered", [0.054340, 0.380554, 0.513932, 0.017718], 0.241636),
    ):
        advantage = ADVANTAGES.get(name)(rewards).mT
        loss = SURROGATES.get("mirror_descent")(log_ratio=x, advantage=advantage, mask=mask)
        assert_row(loss.detach().mT, *residuals)
        total = (WEIGHTINGS.get("sequence_sum")(mask) * loss).sum()
        assert abs(total.item() - mean) < ATOL
    # gradient coefficients (r − r̄) − tau x = (.45, −.4, −.5, .35)
    centered = SURROGATES.get("mirror_descent")(
        log_ratio=x, advantage=ADVANTAGES.get("centered")(rewards).mT, mask=mask
    )
    assert_row(-torch.autograd.grad(centered.sum(), x)[0].mT, 0.45, -0.4, -0.5, 0.35)


X4 = row(0.2, -0.1, 0.5, -1.0)
DIVERGENCE_VALUES = [
    ("none", {}, [0, 0, 0, 0]),
    ("k1", {}, [0.2, -0.1, 0.5, -1.0]),
    ("k2", {}, [0.02, 0.005, 0.125, 0.5]),
    ("k3", {}, [0.018731, 0.005171, 0.106531, 0.718282]),
    # ρ = 2
    ("k3_weighted", {"log_ratio": math.log(2)}, [0.037462, 0.010342, 0.213061, 1.436564]),
]


@pytest.mark.parametrize(("name", "extra", "expected"), DIVERGENCE_VALUES)
def test_divergence_is_the_number_worked_by_hand(name, extra, expected) -> None:
    data = {
        "logp": X4 - 2,
        "ref_logp": torch.full_like(X4, -2.0),
        "log_ratio": torch.full_like(X4, extra.get("log_ratio", 0.0)),
        "mask": torch.ones_like(X4, dtype=torch.bool),
    }
    assert_row(DIVERGENCES.bind(spec(name))(data), *expected)


def enumerated_divergence(name: str) -> tuple[float, list[float]]:
    """Value and gradient by the logits of E[estimator] over three symbols, sampled on-policy.

    The samples come from π, but the gradient only sees the estimator: the expectation uses π as
    constants, as a loss on sampled tokens does.
    """
    logits = row(0.5, 0.3, 0.2).log().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    data = {
        "logp": logp,
        "ref_logp": row(0.4, 0.4, 0.2).log(),
        "log_ratio": logp - logp.detach(),
        "mask": torch.ones(1, 3, dtype=torch.bool),
    }
    values = DIVERGENCES.bind(spec(name))(data)
    expected = (logp.detach().exp() * values).sum()
    return expected.item(), torch.autograd.grad(expected, logits)[0][0].tolist()


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        # ∇KL(p‖ref) = p_v (log(p_v/ref_v) − KL) = (.098938, −.093885, −.005053)
        # ∇KL(ref‖p) = p − ref = (.1, −.1, 0)
        ("k1", 0.025267, [0, 0, 0]),
        ("k2", 0.024862, [0.098938, -0.093885, -0.005053]),
        ("k3", 0.025267, [0.1, -0.1, 0]),
        ("k3_weighted", 0.025267, [0.098938, -0.093885, -0.005053]),
    ],
)
def test_divergence_has_the_gradient_it_promises(name, value, gradient) -> None:
    got, slope = enumerated_divergence(name)
    assert abs(got - value) < 1e-6
    assert slope == pytest.approx(gradient, abs=1e-6)


CORRECTION_VALUES = [
    ("none", {}, [1, 1, 1, 1, 1, 1]),
    ("tis", {}, [0.3, 0.5, 1, 2, 2, 2]),
    ("icepop", {}, [0, 0.5, 1, 2, 3, 0]),
    ("masked", {}, [0, 1, 1, 1, 0, 0]),
    # product .3 · .5 · 1 · 2 · 3 · 6 = 5.4
    ("sequence_tis", {}, [2.0] * 6),
    ("sequence_tis", {"cap": 6.0}, [5.4] * 6),
    ("sequence_icepop", {}, [0.0] * 6),
    ("sequence_icepop", {"high": 6.0}, [5.4] * 6),
    # geometric mean 5.4^(1/6) = 1.324590
    ("sequence_masked", {}, [0.0] * 6),
    ("sequence_masked", {"high": 1.33}, [1.0] * 6),
]


@pytest.mark.parametrize(("name", "settings", "expected"), CORRECTION_VALUES)
@ON_EVERY_DEVICE
def test_correction_is_the_number_worked_by_hand(name, settings, expected, device) -> None:
    old = row(0.3, 0.5, 1, 2, 3, 6).log().to(device).requires_grad_()
    algorithm = bind("grpo", {"correction": {"name": name, **settings}})
    data = {"old_logp": old, "sampler_logp": torch.zeros_like(old), "mask": old < 9}
    got = algorithm.objective.correction(data)
    assert not got.requires_grad
    assert_row(got.cpu(), *expected)


def test_sequence_is_kept_by_its_geometric_mean() -> None:
    # (1.001 · .998 · 1.004)^(1/3) = 1.000997, inside [.999, 1.002]
    old = row(1.001, 0.998, 1.004).log()
    keep = CORRECTIONS.get("sequence_masked")
    assert_row(keep(old, torch.zeros_like(old), YES3), 1, 1, 1)
    assert_row(keep(old, torch.zeros_like(old), YES3, high=1.0009), 0, 0, 0)


TWO_ANSWERS = torch.tensor([[True, True, True], [True, False, False]])
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
WEIGHTING_VALUES = [
    # token values (1, 2, 3) and (10)
    ("batch_token_mean", {}, [0, 0], 4.0),  # 16/4
    ("sequence_mean", {}, [0, 0], 6.0),  # (2 + 10)/2
    ("sequence_sum", {}, [0, 0], 8.0),  # (6 + 10)/2
    ("constant_length", {"length": 4}, [0, 0], 2.0),  # (6 + 10)/2/4
    ("token_sum", {}, [0, 0], 16.0),
    ("group_token_mean", {}, [0, 0], 4.0),  # one prompt: 16/4
    ("group_token_mean", {}, [5, 2], 6.0),  # two prompts: (6/3 + 10/1)/2
]


@pytest.mark.parametrize(("name", "settings", "group", "expected"), WEIGHTING_VALUES)
@ON_EVERY_DEVICE
def test_weighting_is_the_number_worked_by_hand(name, settings, group, expected, device) -> None:
    algorithm = bind("grpo", {"weighting": {"name": name, **settings}})
    weight = algorithm.weighting(TWO_ANSWERS.to(device), torch.tensor(group, device=device)).cpu()
    assert weight.dtype == torch.float32
    assert (weight * VALUES).sum().item() == pytest.approx(expected, abs=1e-6)
    assert (weight[~TWO_ANSWERS] == 0).all()


@pytest.mark.parametrize(("name", "settings"), [case[:2] for case in WEIGHTING_VALUES])
def test_rows_without_tokens_count_for_nothing(name, settings) -> None:
    algorithm = bind("grpo", {"weighting": {"name": name, **settings}})
    extra = torch.cat([TWO_ANSWERS, torch.zeros(2, 3, dtype=torch.bool)])
    plain = algorithm.weighting(TWO_ANSWERS, torch.tensor([0, 0]))
    padded = algorithm.weighting(extra, torch.tensor([0, 0, 0, 7]))
    torch.testing.assert_close(padded[:2], plain)
    empty = algorithm.weighting(torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1]))
    assert (empty == 0).all()


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        # with an empty third row the divisor of the rows is 3: 12/3, 16/3, 16/3/4
        ("sequence_mean", {}, 4.0),
        ("sequence_sum", {}, 16 / 3),
        ("constant_length", {"length": 4}, 4 / 3),
    ],
)
def test_rows_without_tokens_can_be_counted(name, settings, expected) -> None:
    algorithm = bind("grpo", {"weighting": {"name": name, "empty_rows": True, **settings}})
    mask = torch.cat([TWO_ANSWERS, torch.zeros(1, 3, dtype=torch.bool)])
    weight = algorithm.weighting(mask, torch.tensor([0, 0, 0]))
    assert (weight[:2] * VALUES).sum().item() == pytest.approx(expected, abs=1e-6)
    assert (weight[2] == 0).all()


def test_every_registered_function_has_a_number_worked_by_hand() -> None:
    assert set(RATIOS) == {case[0] for case in RATIO_VALUES}
    assert set(SURROGATES) == {case[0] for case in SURROGATE_VALUES}
    assert set(DIVERGENCES) == {case[0] for case in DIVERGENCE_VALUES}
    assert set(CORRECTIONS) == {case[0] for case in CORRECTION_VALUES}
    assert set(WEIGHTINGS) == {case[0] for case in WEIGHTING_VALUES}
    assert set(FILTERS) == {"all", "spread", "not_truncated"}


# One prompt, answers of 3 tokens and 1, r = (1, 0): the loss of six advantages in four weightings,
# ε = .2, β = .04, k3. ρ = (1.105171, 1.349859, .904837 | .670320) and
# k3 = (.018731, .004837, 0 | .021403). SoftRank, ddof 0, sequence mean, by hand: the clipped ρ sum
# to 1.105171 + 1.2 + .904837 = 3.210008; −(.982014 · 3.210008 − .04 · .023568)/3 = −1.050445, the
# wrong answer costs .04 · .021403, their mean is −.524794.
LOSS_TABLE = [
    ("softrank", {}, [-0.787618, -0.524794, -1.575237, -0.393809]),
    ("softrank", {"ddof": 1}, [-0.757267, -0.504559, -1.514534, -0.378633]),
    ("zscore", {}, [-0.602052, -0.134416, -1.204105, -0.301026]),
    ("zscore", {"ddof": 1}, [-0.425584, -0.094875, -0.851167, -0.212792]),
    ("centered", {}, [-0.300801, -0.066916, -0.601603, -0.150401]),
    ("softrank_zero_sum", {}, [-0.289965, -0.064487, -0.579929, -0.144982]),
]
WEIGHTED = [
    ("batch_token_mean", {}),
    ("sequence_mean", {}),
    ("sequence_sum", {}),
    ("constant_length", {"length": 4}),
]
LOGP = torch.tensor([[-1, -0.5, -2], [-0.7, 0, 0]], dtype=torch.float64)
OLD = torch.tensor([[-1.1, -0.8, -1.9], [-0.3, 0, 0]], dtype=torch.float64)
REF = torch.tensor([[-1.2, -0.6, -2], [-0.5, 0, 0]], dtype=torch.float64)


def step_loss(algorithm, rewards: list[float], **changes) -> float:
    """The loss of a step on the two answers above, by the same calls as a trainer makes."""
    advantage = algorithm.advantage({"rewards": torch.tensor([rewards], dtype=torch.float64)})
    group = torch.tensor([0, 0])
    batch = Batch(
        prompts=(torch.tensor([1]),),
        group=group,
        tokens=torch.zeros(2, 3, dtype=torch.long),
        length=torch.tensor([3, 1]),
        mask=TWO_ANSWERS,
        advantage=advantage[0, :, None].expand(2, 3),
        weight=algorithm.weighting(TWO_ANSWERS, group),
        **{"old_logp": OLD, "ref_logp": REF, **changes},
    )
    return (batch.weight * algorithm.objective(Outputs(logp=LOGP), batch)).sum().item()


@pytest.mark.parametrize(("name", "settings", "expected"), LOSS_TABLE)
def test_loss_of_a_step(name, settings, expected) -> None:
    for (weighting, length), wanted in zip(WEIGHTED, expected, strict=True):
        algorithm = bind(
            "grpo",
            {
                "advantage": {"name": name, **settings},
                "weighting": {"name": weighting, **length},
            },
        )
        assert step_loss(algorithm, [1.0, 0.0]) == pytest.approx(wanted, abs=ATOL)


def test_softrank_row_is_the_equation_of_its_paper() -> None:
    # the first cell of the table above, with β = .04 given: one prompt, so 1/Σ|o_i| is its own
    algorithm = bind("softrank", {"divergence": {"coefficient": 0.04}})
    assert step_loss(algorithm, [1.0, 0.0]) == pytest.approx(-0.787618, abs=ATOL)


def test_loss_with_a_correction_scales_the_policy_gradient_only() -> None:
    # sampler = old − log 2 everywhere, so every weight is 2 (tis caps at 2): twice the surrogate,
    # once the KL: 2 · (−.602052 − .04 · .044971/4) + .04 · .044971/4
    algorithm = bind(
        "grpo", {"weighting": {"name": "batch_token_mean"}, "correction": {"name": "tis"}}
    )
    kl = 0.04 * (0.018731 + 0.004837 + 0.021403) / 4
    got = step_loss(algorithm, [1.0, 0.0], sampler_logp=OLD - math.log(2))
    assert got == pytest.approx(2 * (-0.602052 - kl) + kl, abs=ATOL)


def test_gspo_ratio_is_clipped_as_a_sequence() -> None:
    # e^(mean of .1, −.2, .3) = 1.068939, clipped to 1.0004
    algorithm = bind("gspo")
    data = {"logp": X3, "old_logp": torch.zeros_like(X3), "mask": YES3}
    x = algorithm.objective.ratio(data)
    assert x.exp()[0, 0].item() == pytest.approx(1.068939, abs=ATOL)
    assert_row(
        algorithm.objective.surrogate({"log_ratio": x, "advantage": row(1, 1, 1), "mask": YES3}),
        *[-1.0004] * 3,
    )


def test_entropy_bonus_raises_the_entropy() -> None:
    # z = (1, 0, −1): π = (.665241, .244728, .090031), H = .832396, ∂H/∂z = −π (log π + H)
    z = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(z, -1)
    entropy = -(logp.exp() * logp).sum()[None, None]
    assert entropy.item() == pytest.approx(0.832396, abs=ATOL)
    algorithm = bind("dapo", {"entropy": {"coefficient": 0.01}})
    assert "entropy" in algorithm.needs
    batch = Batch(
        prompts=(torch.tensor([1]),),
        group=torch.tensor([0]),
        tokens=torch.zeros(1, 1, dtype=torch.long),
        length=torch.tensor([1]),
        mask=torch.tensor([[True]]),
        advantage=torch.zeros(1, 1),
        weight=torch.ones(1, 1),
    )
    loss = algorithm.objective(Outputs(logp=logp[None, :1], entropy=entropy), batch)
    assert loss.item() == pytest.approx(-0.01 * 0.832396, abs=1e-7)
    slope = torch.autograd.grad(loss.sum(), z)[0] / -0.01
    assert slope.tolist() == pytest.approx([-0.282587, 0.140770, 0.141817], abs=ATOL)
    with pytest.raises(UsageError, match="entropy"):
        algorithm.objective(Outputs(logp=logp[None, :1].detach()), batch)


def test_supervised_loss_is_the_mean_negative_log_likelihood() -> None:
    # logits (2,1,0), (0,0,3), (1,1,1) with targets 0, 2, 1: .407606, .094923, 1.098612
    logits = torch.tensor([[2, 1, 0], [0, 0, 3], [1, 1, 1]], dtype=torch.float64)
    logp = torch.log_softmax(logits, -1)[torch.arange(3), torch.tensor([0, 2, 1])][None]
    for mask, wanted in (([True] * 3, 0.533714), ([False, True, True], 0.596768)):
        keep = torch.tensor([mask])
        loss = SURROGATES.get("nll")(logp, keep)
        weight = WEIGHTINGS.get("batch_token_mean")(keep)
        assert (weight * loss).sum().item() == pytest.approx(wanted, abs=ATOL)


def test_dynamic_sampling_keeps_groups_that_are_partly_right() -> None:
    rewards = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]])
    spread = FILTERS.get("spread")
    assert spread(rewards).tolist() == [[False] * 4, [False] * 4, [True] * 4, [True] * 4]
    # a length penalty makes the rewards of the first group differ; its correctness does not
    shaped = rewards - torch.tensor([0.0, 0.1, 0.2, 0.3])
    assert spread(shaped, correct=rewards).any(1).tolist() == [False, False, True, True]
    assert spread(shaped).any(1).tolist() == [True] * 4
    # where correctness is not defined the reward decides, group by group
    unknown = rewards.clone()
    unknown[0, 0] = float("nan")
    assert spread(shaped, correct=unknown).any(1).tolist() == [True, False, True, True]


def test_filters_drop_what_was_not_judged_and_what_was_cut_off() -> None:
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.0, nan], [1.0, nan, nan]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert FILTERS.get("all")(rewards, valid).tolist() == valid.tolist()
    spread = FILTERS.get("spread")
    assert spread(rewards, valid).tolist() == [[True, True, False], [False] * 3]
    # correctness missing only where nothing was judged still decides: both right, so dropped
    correct = torch.tensor([[1.0, 1.0, nan], [1.0, nan, nan]])
    assert not spread(rewards, valid, correct).any()
    truncated = torch.tensor([[False, True, False], [False, True, False]])
    kept = FILTERS.get("not_truncated")(rewards, truncated, valid)
    assert kept.tolist() == [[True, False, False], [True, False, False]]


def test_kl_penalty_of_the_reward() -> None:
    # β .1, x = (.2, −.1, .5): 1 − .06 = .94 against 0 − 0: leave-one-out ±.94
    algorithm = bind("rloo", {"divergence": {"coefficient": 0.1}})
    assert algorithm.kl_in_reward == 0.1
    assert "ref_logp" in algorithm.needs
    kl = torch.zeros(1, 2, 3, dtype=torch.float64)
    kl[0, 0] = row(0.2, -0.1, 0.5)
    data = {"rewards": row(1, 0), "kl": kl, "mask": torch.ones(1, 2, 3, dtype=torch.bool)}
    assert_row(algorithm.advantage(data), 0.94, -0.94)
    with pytest.raises(UsageError, match="kl"):
        algorithm.advantage({"rewards": row(1, 0)})


def test_token_penalty_goes_to_its_token() -> None:
    # β .5 makes penalties (.5, 0 | 0, 0) of k1 = (1, 0 | 0, 0); worked among the advantages
    algorithm = bind("reinforce++", {"divergence": {"coefficient": 0.5}})
    kl = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    got = algorithm.advantage({"rewards": row(1, 0), "kl": kl, "mask": mask})
    assert_row(got.reshape(1, 4), 0.261116, 1.305582, -0.783349, -0.783349)
