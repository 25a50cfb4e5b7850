"""Every advantage against numbers worked by hand.

GOLDEN is the whole table: (name, settings, data, expected). Rewards are one prompt per row. Unless
a comment says otherwise the number follows from the formula in the function's docstring by plain
arithmetic; z, w, K, f are as in the module docstring of the SoftRank family.
"""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch

from devices import ON_EVERY_DEVICE, placed
from groupwise import ADVANTAGES
from groupwise.algorithms.advantages import RewardRangeWarning, penalised
from groupwise.errors import UsageError

ATOL = 5e-6
NAN = float("nan")

GRADED = [[4.0, 2.5, 1.0, 0.5]]  # mean 2, population std 1.369306, sample std 1.581139
ONE = [[1.0, 0.0, 0.0, 0.0]]
TWO = [[1.0, 1.0, 0.0, 0.0]]
THREE = [[1.0, 1.0, 1.0, 0.0]]
ALL = [[1.0, 1.0, 1.0, 1.0]]
NONE = [[0.0, 0.0, 0.0, 0.0]]
NEGATIVE = [[-1.0, -2.0, -3.0]]
OF8 = [[1.0] + [0.0] * 7]
THREE_OF8 = [[1.0] * 3 + [0.0] * 5]
PAIR = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
EIGHT_GRADED = [[0.9, 0.6, 0.3, 0.0]]
UNEQUAL = [[[True, True, True], [True, True, False], [True, True, False], [True, False, False]]]


def one(best: float, rest: float, size: int = 4) -> list[list[float]]:
    """A group whose first sample gets `best` and the others `rest`."""
    return [[best] + [rest] * (size - 1)]


GOLDEN: list[tuple[str, dict, dict, list]] = [
    # softrank: z = (r − 2)/1.369306 = (1.460593, .365148, −.730297, −1.095445); w = softmax(2 z)
    ("softrank", {}, {"rewards": GRADED}, [[3.538746, 0.247308, 0.011061, 0.002664]]),
    ("softrank", {"ddof": 1}, {"rewards": GRADED}, [[3.377238, 0.316538, 0.018988, 0.005044]]),
    ("softrank", {}, {"rewards": ONE}, one(0.971257, 0)),  # 1/(1 + 3 e^(−2/σ)), σ = √3/4
    ("softrank", {"ddof": 1}, {"rewards": ONE}, one(0.947915, 0)),
    ("softrank", {}, {"rewards": TWO}, [[0.491007, 0.491007, 0, 0]]),
    ("softrank", {}, {"rewards": [[1.0, 0, 0, 1.0]]}, [[0.491007, 0, 0, 0.491007]]),
    ("softrank", {"ddof": 1}, {"rewards": [[1.0, 0, 0, 1.0]]}, [[0.484824, 0, 0, 0.484824]]),
    ("softrank", {}, {"rewards": ALL}, [[0.25] * 4]),
    ("softrank", {}, {"rewards": NONE}, [[0.0] * 4]),
    ("softrank", {}, {"rewards": OF8}, one(0.983722, 0, 8)),
    ("softrank", {"ddof": 1}, {"rewards": OF8}, one(0.976129, 0, 8)),
    ("softrank", {}, {"rewards": [[1.0] * 7 + [0.0]]}, [[0.142809] * 7 + [0.0]]),
    # r + 1 changes it: w stays, the reward does not
    ("softrank", {}, {"rewards": [[5.0, 3.5, 2, 1.5]]}, [[4.423433, 0.346231, 0.022123, 0.007993]]),
    # the limits of tau: r_i/K and r_max/#best
    ("softrank", {"tau": 1e7}, {"rewards": GRADED}, [[1.0, 0.625, 0.25, 0.125]]),
    ("softrank", {"tau": 1e-3}, {"rewards": TWO}, [[0.5, 0.5, 0, 0]]),
    ("softrank_group", {}, {"rewards": GRADED}, [[3.799780] * 4]),
    ("softrank_group", {"ddof": 1}, {"rewards": GRADED}, [[3.717807] * 4]),
    ("softrank_group", {}, {"rewards": ONE}, [[0.971257] * 4]),
    ("softrank_group", {}, {"rewards": [[1.0, 0, 0, 1.0]]}, [[0.982014] * 4]),
    ("softrank_group", {"ddof": 1}, {"rewards": [[1.0, 0, 0, 1.0]]}, [[0.969649] * 4]),
    ("softrank_group", {}, {"rewards": ALL}, [[1.0] * 4]),
    ("softrank_group", {}, {"rewards": NONE}, [[0.0] * 4]),
    ("softrank_group", {"tau": 0.01}, {"rewards": GRADED}, [[4.0] * 4]),
    ("softrank_group", {"tau": 0.1}, {"rewards": GRADED}, [[3.999974] * 4]),
    ("softrank_group", {"tau": 1.0}, {"rewards": GRADED}, [[3.272435] * 4]),
    ("softrank_group", {"tau": 2.0}, {"rewards": GRADED}, [[2.701364] * 4]),
    ("softrank_group", {"tau": 10.0}, {"rewards": GRADED}, [[2.139092] * 4]),
    ("softrank_group", {"tau": 100.0}, {"rewards": GRADED}, [[2.013718] * 4]),
    # K w r − f(r): 4 · 3.538746 − 3.799780 = 10.355205
    (
        "softrank_centered",
        {},
        {"rewards": GRADED},
        [[10.355205, -2.810549, -3.755535, -3.789122]],
    ),
    ("softrank_centered", {}, {"rewards": ONE}, one(2.913770, -0.971257)),
    ("softrank_centered", {}, {"rewards": TWO}, [[0.982014, 0.982014, -0.982014, -0.982014]]),
    ("softrank_centered", {}, {"rewards": THREE}, [[0.332241] * 3 + [-0.996723]]),
    ("softrank_centered", {}, {"rewards": ALL}, [[0.0] * 4]),
    # f(r₋₁) of (2.5, 1, .5) at tau .5 is 2.440267: 14.154984 − 2.440267 = 11.714717
    ("softrank_loo", {}, {"rewards": GRADED}, [[11.714717, -2.914200, -3.768656, -3.850496]]),
    ("softrank_loo", {}, {"rewards": ONE}, one(3.885027, -0.972064)),
    ("softrank_loo", {}, {"rewards": ALL}, [[0.0] * 4]),
    ("softrank_loo", {"tau": 1e7}, {"rewards": GRADED}, [[2.666667, 0.666667, -1.333333, -2.0]]),
    # tau (K w − 1): .5 · (4 · .884687 − 1) = 1.269373
    ("softrank_zero_sum", {}, {"rewards": GRADED}, [[1.269373, -0.302154, -0.477877, -0.489342]]),
    ("softrank_zero_sum", {}, {"rewards": ONE}, one(1.442514, -0.480838)),
    ("softrank_zero_sum", {}, {"rewards": TWO}, [[0.482014, 0.482014, -0.482014, -0.482014]]),
    ("softrank_zero_sum", {}, {"rewards": THREE}, [[0.164482] * 3 + [-0.493445]]),
    ("softrank_zero_sum", {}, {"rewards": ALL}, [[0.0] * 4]),
    (
        "softrank_zero_sum",
        {"tau": 100.0},
        {"rewards": GRADED},
        [[1.466233, 0.360792, -0.732606, -1.094418]],
    ),
    ("softrank_zero_sum", {"tau": 0.01}, {"rewards": OF8}, one(0.07, -0.01, 8)),
    (
        "softrank_interpolated",
        {"tau": 0.01},
        {"rewards": GRADED},
        [[3.0, -1.0, -1.0, -1.0]],
    ),
    (
        "softrank_interpolated",
        {},
        {"rewards": GRADED},
        [[2.538746, -0.604307, -0.955755, -0.978684]],
    ),
    (
        "softrank_interpolated",
        {"tau": 1.0},
        {"rewards": GRADED},
        [[1.624983, -0.122230, -0.706482, -0.796271]],
    ),
    (
        "softrank_interpolated",
        {"tau": 100.0},
        {"rewards": GRADED},
        [[1.466233, 0.360792, -0.732606, -1.094418]],
    ),
    ("softrank_interpolated", {}, {"rewards": ONE}, one(2.885027, -0.961676)),
    ("softrank_interpolated", {"tau": 0.01}, {"rewards": OF8}, one(7.0, -1.0, 8)),
    # exp(±2z) = (18.5633, 2.0757, .2321, .1118) and its inverses: w⁺ = (.884687, .098923, .011061,
    # .005329), w⁻ = (.003907, .034943, .312498, .648653); the difference times 4/2.
    (
        "softrank_two_sided",
        {},
        {"rewards": GRADED},
        [[1.761559, 0.127961, -0.602874, -1.286646]],
    ),
    # z differs by 4/√3: w⁺ = 1/(1 + 3x), w⁻ = x/(3 + x) with x = exp(−8/√3) = .009865.
    ("softrank_two_sided", {}, {"rewards": ONE}, one(1.935959, -0.645320)),
    ("softrank_two_sided", {"tau": 0.01}, {"rewards": OF8}, one(4.0, -0.571429, 8)),
    (
        "softrank_two_sided",
        {"tau": 1000.0},
        {"rewards": GRADED},
        [[1.460593, 0.365148, -0.730297, -1.095445]],
    ),
    # ω = softmax(r / .5) = (.949507, .047273, .002354, .000866): .5 · (4 · .949507 − 1)
    ("entropic", {}, {"rewards": GRADED}, [[1.399015, -0.405454, -0.495293, -0.498268]]),
    ("entropic", {}, {"rewards": ONE}, one(0.922469, -0.307490)),
    ("entropic", {}, {"rewards": TWO}, [[0.380797, 0.380797, -0.380797, -0.380797]]),
    ("entropic", {}, {"rewards": ALL}, [[0.0] * 4]),
    # F(1,0,0,0) = .5 log((e² + 3)/4) = .477229, F(0,0,0) = 0: 4 · .477229 = 1.908917
    ("lse_loo", {}, {"rewards": ONE}, one(1.908917, -0.372948)),
    ("lse_loo", {}, {"rewards": GRADED}, [[5.396492, -0.478510, -0.570651, -0.573632]]),
    ("lse_loo", {}, {"rewards": TWO}, [[0.585697, 0.585697, -0.452461, -0.452461]]),
    ("lse_loo", {}, {"rewards": ALL}, [[0.0] * 4]),
    (
        "lse_loo",
        {"tau": 1e4},
        {"rewards": GRADED},
        [[2.666897, 0.666564, -1.333369, -1.999925]],
    ),
    ("softbok_loo", {}, {"rewards": GRADED}, [[5.438044, -0.414606, -0.052487, -0.245495]]),
    ("softbok_loo", {}, {"rewards": ONE}, one(3.885027, -0.003227)),
    ("softbok_loo", {}, {"rewards": ALL}, [[0.0] * 4]),
    ("softbok_loo", {"tau": 0.01}, {"rewards": GRADED}, [[6.0, 0.0, 0.0, 0.0]]),  # 4 (4 − 2.5)
    ("zscore", {}, {"rewards": GRADED}, [[1.460593, 0.365148, -0.730297, -1.095445]]),
    ("zscore", {"ddof": 1}, {"rewards": GRADED}, [[1.264911, 0.316228, -0.632456, -0.948683]]),
    ("zscore", {}, {"rewards": ONE}, one(1.732051, -0.577350)),  # .75 / (√3/4)
    ("zscore", {"ddof": 1}, {"rewards": ONE}, one(1.5, -0.5)),
    ("zscore", {"ddof": 1, "eps": 1e-4}, {"rewards": ONE}, one(1.499700, -0.499900)),
    ("zscore", {"ddof": 1, "eps": 1e-6}, {"rewards": ONE}, one(1.499997, -0.499999)),
    ("zscore", {}, {"rewards": ALL}, [[0.0] * 4]),
    ("zscore", {"raw_singletons": True}, {"rewards": [[3.0]]}, [[3.0]]),
    ("centered", {}, {"rewards": ONE}, one(0.75, -0.25)),
    ("leave_one_out", {}, {"rewards": ONE}, one(1.0, -0.333333)),
    ("leave_one_out", {}, {"rewards": GRADED}, [[2.666667, 0.666667, -1.333333, -2.0]]),
    ("maxrl", {}, {"rewards": ONE}, one(2.999988, -0.999996)),  # .75/.250001
    ("maxrl", {}, {"rewards": NONE}, [[0.0] * 4]),
    ("raw", {}, {"rewards": GRADED}, GRADED),
    ("successes", {}, {"rewards": TWO}, [[2.0, 2.0, 0, 0]]),  # c / mean(c) = 1/.5
    ("successes", {}, {"rewards": GRADED, "correct": THREE}, [[4 / 3] * 3 + [0.0]]),
    ("successes", {}, {"rewards": NONE}, [[0.0] * 4]),
    # 3 tokens of 8 are of the right answer, 5 of wrong ones; ±1 has mean −.5 and deviation √3/2, so
    # that wrong ones have z = −.577350: A⁺ = 8/3, A⁻ = .5 · 8/5 · z
    ("cloning", {}, {"rewards": ONE, "mask": UNEQUAL}, one(2.666667, -0.461880)),
    # leave-one-out of ±1: 1 + 1 = 2 and −1 − (−1/3) = −2/3
    (
        "cloning",
        {"shaping": "leave_one_out", "weigh_right": True, "negative": 0.25},
        {"rewards": ONE, "mask": UNEQUAL},
        one(5.333333, -0.266667),
    ),
    # the first group has no signal, but its tokens count: 8 in all, 6 right, and A = ±2 unweighted
    (
        "cloning",
        {"shaping": "leave_one_out", "negative": 1.0},
        {"rewards": [[1.0, 1.0], [1.0, 0.0]], "mask": [[[True] * 2] * 2] * 2},
        [[0.0, 0.0], [8 / 6, -8.0]],  # −8/2 · 2
    ),
    # running means (1, .25, 5/6, −.125), 2 σ − 1 = (.462117, .124353, .394119, −.062419); half of
    # 8 tokens are right: A⁺ = 2, A⁻ = −.5 · 2
    (
        "token_cloning",
        {},
        {
            "rewards": [[1.0, 0.0]],
            "token_scores": [[[1.0, -0.5, 2.0, -3.0]] * 2],
            "mask": [[[True] * 4] * 2],
        },
        [[[0.924234, 0.248706, 0.788237, 0.0], [0.0, 0.0, 0.0, -0.062419]]],
    ),
    # the same means over a token of a tool; A⁺ = 6/3 · 2, A⁻ = −.25 · 6/3 · 2
    (
        "token_cloning",
        {"shaping": "leave_one_out", "weigh_right": True, "negative": 0.25},
        {
            "rewards": [[1.0, 0.0]],
            "token_scores": [[[1.0, 9.0, -0.5, 2.0], [-1.0, 9.0, 0.5, -2.0]]],
            "mask": [[[True, False, True, True]] * 2],
        },
        [[[1.848469, 0.0, 0.497412, 1.576474], [-0.462117, 0.0, -0.124353, -0.394119]]],
    ),
    ("log_odds", {}, {"rewards": ONE}, one(4.0, -4 / 3)),  # .75/(.25 · .75)
    ("log_odds", {}, {"rewards": ALL}, [[0.0] * 4]),
    # baseline 2·1/20 = .1
    ("length_weighted", {}, {"rewards": ONE, "lengths": [[2, 4, 6, 8]]}, one(0.9, -0.1)),
    # tau log Z = .5 log((2e² + 2)/4) = .716890
    (
        "soft_centered",
        {},
        {"rewards": [[1.0, 0, 0, 1.0]]},
        [[0.283110, -0.716890, -0.716890, 0.283110]],
    ),
    # one success of four: tau log Z = .477229, the optimal value of A*-PO at β = .5
    ("soft_centered", {}, {"rewards": ONE}, one(1 - 0.477229, -0.477229)),
    # all rewards: mean .5, population std .5, sample std √(2/7)
    ("batch_zscore", {}, {"rewards": PAIR}, [*one(1.5, -0.5), [0.5, 0.5, 0.5, -1.5]]),
    (
        "batch_zscore",
        {"ddof": 1},
        {"rewards": PAIR},
        [*one(1.403119, -0.467706), [0.467706] * 3 + [-1.403119]],
    ),
    # centred: two of ±.75, six of ±.25, mean 0, sample std √(1.5/7) = .462910
    (
        "centered_whitened",
        {},
        {"rewards": PAIR},
        [*one(1.620185, -0.540062), [0.540062] * 3 + [-1.620185]],
    ),
    # one-token answers: mean .5, sample std √(2/7): ±.5/.534522
    (
        "discounted_whitened",
        {},
        {"rewards": PAIR, "mask": [[[True]] * 4] * 2},
        [[[0.935414]] + [[-0.935414]] * 3, [[0.935414]] * 3 + [[-0.935414]]],
    ),
    # ten-token answers: 80 returns of 0 or 1, sample std √(20/79): ±.5/.503155
    (
        "discounted_whitened",
        {},
        {"rewards": PAIR, "mask": [[[True] * 10] * 4] * 2},
        [[[0.993730] * 10] + [[-0.993730] * 10] * 3, [[0.993730] * 10] * 3 + [[-0.993730] * 10]],
    ),
    # gamma .5, two tokens: returns (.5, 1) and (0, 0), mean .375, sample variance .229167
    (
        "discounted_whitened",
        {"gamma": 0.5},
        {"rewards": [[1.0, 0.0]], "mask": [[[True, True]] * 2]},
        [[[0.261116, 1.305582], [-0.783349, -0.783349]]],
    ),
    # penalties (.5, 0 | 0, 0): returns (.5, 1 | 0, 0), as above
    (
        "discounted_whitened",
        {},
        {"rewards": [[1.0, 0.0]], "mask": [[[True, True]] * 2], "kl": [[[0.5, 0.0], [0.0, 0.0]]]},
        [[[0.261116, 1.305582], [-0.783349, -0.783349]]],
    ),
    # δ = (.3, .2, .3) of values (.2, .5, .7): A = (.3 + .95 · .485, .2 + .95 · .3, .3)
    (
        "gae",
        {"lam": 0.95},
        {"rewards": [[1.0]], "values": [[[0.2, 0.5, 0.7]]], "mask": [[[True] * 3]]},
        [[[0.76075, 0.485, 0.3]]],
    ),
    # rewards (1, 0) are centred to ±.5, and half of that is added to log π_T − log π
    (
        "distilled",
        {"reward_weight": 0.5},
        {
            "rewards": [[1.0, 0.0]],
            "teacher_gap": [[[-0.2, 0.1], [0.3, 9.0]]],
            "mask": [[[True, True], [True, False]]],
        },
        [[[0.05, 0.35], [0.05, 0.0]]],
    ),
    # The steps of the group earn 1, .5, 0 and .5: mean .5, deviation √.125, scores ±1.414214 and 0.
    # The first answer's tokens: its first step and what follows, then the second step alone.
    (
        "step_zscore",
        {},
        {
            "rewards": [[0.0, 0.0]],
            "step_rewards": [[[NAN, 1.0, 0.5, NAN], [0.0, 0.5, 9.0, NAN]]],
            "mask": [[[True, True, True, True], [True, True, False, False]]],
        },
        [[[1.414214, 1.414214, 0.0, 0.0], [-1.414214, 0.0, 0.0, 0.0]]],
    ),
    # The same with the sample deviation √(.5 / 3) and .1 added to it: 0.5 / .508248.
    (
        "step_zscore",
        {"ddof": 1, "eps": 0.1},
        {
            "rewards": [[0.0, 0.0]],
            "step_rewards": [[[NAN, 1.0, 0.5, NAN], [0.0, 0.5, 9.0, NAN]]],
            "mask": [[[True, True, True, True], [True, True, False, False]]],
        },
        [[[0.983772, 0.983772, 0.0, 0.0], [-0.983772, 0.0, 0.0, 0.0]]],
    ),
    # two groups, one with signal: alpha = 2
    ("signal_scaled", {}, {"rewards": [*ONE, *NONE]}, [*one(1.5, -0.5), [0.0] * 4]),
    ("signal_scaled", {"counting": "rewards"}, {"rewards": ONE}, one(3.0, -1.0)),  # 4/1 · .75
    # z (ddof 1) (1.5, −.5 ×3) + (.866, .866, −.866 ×2) = (2.366021, .366025, −1.366023 ×2)
    (
        "parts_zscore",
        {},
        {"parts": {"accuracy": ONE, "format": TWO}},
        [[1.332111, 0.206078, -0.769095, -0.769095]],
    ),
    # the format weighs 0: z of the accuracy (1.5, −.5 ×3), itself whitened
    (
        "parts_zscore",
        {"weights": {"format": 0.0}},
        {"parts": {"accuracy": ONE, "format": TWO}},
        one(1.5, -0.5),
    ),
    ("leader_minus_second", {}, {"rewards": EIGHT_GRADED}, [[0.3, 0, 0, 0]]),
    (
        "leader_minus_second",
        {"divide_by_std": True},
        {"rewards": EIGHT_GRADED},
        [[0.774595, 0, 0, 0]],  # .3/(.387298 + 1e-6)
    ),
    ("leader_minus_second", {}, {"rewards": TWO}, [[0.0] * 4]),
    # 8 · (.5 right, .442857 wrong): k/n and k/n · (1 − C(4,3)/C(7,3))
    (
        "pass_at_k_gradient",
        {"k": 4, "baseline": "none"},
        {"rewards": THREE_OF8},
        [[8 * 0.5] * 3 + [8 * 0.442857] * 5],
    ),
    # right: 4 (1 − ρ(7,2,4)) = 4 · 5/35; wrong: 4 (ρ(7,3,3) − ρ(7,3,4)) = 4 (31/35 − 34/35)
    ("pass_at_k_gradient", {}, {"rewards": THREE_OF8}, [[0.571429] * 3 + [-0.342857] * 5]),
    # subsets of 2 of (3, 2, 0): F = (3 + 3 + 2)/3; without i: 2, 3, 3; times K = 3
    ("pass_at_k_gradient", {"k": 2}, {"rewards": [[3.0, 2.0, 0.0]]}, [[2.0, -1.0, -1.0]]),
    ("pass_at_k_training", {}, {"rewards": THREE_OF8}, [[0.277350] * 3 + [-0.166410] * 5]),
    ("pass_at_k_training", {"k": 8}, {"rewards": THREE_OF8}, [[0.0] * 8]),
]


def tensors(data: dict) -> dict:
    """Lists as float64, integer or boolean tensors; a mapping entry by entry."""

    def convert(values):
        if isinstance(values, dict):
            return {key: convert(value) for key, value in values.items()}
        tensor = torch.tensor(values)
        return tensor.double() if tensor.is_floating_point() else tensor

    return {key: convert(values) for key, values in data.items()}


@pytest.mark.parametrize(
    ("name", "settings", "data", "expected"),
    GOLDEN,
    ids=[f"{row[0]}-{i}" for i, row in enumerate(GOLDEN)],
)
@ON_EVERY_DEVICE
def test_advantage_is_the_number_worked_by_hand(name, settings, data, expected, device) -> None:
    got = ADVANTAGES.get(name)(**placed(tensors(data), device), **settings)
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert got.dtype == torch.float64 and got.device.type == device
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=ATOL)


def test_every_advantage_has_a_number_worked_by_hand() -> None:
    assert set(ADVANTAGES.names()) == {row[0] for row in GOLDEN}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # z = (1.224745, 0, −1.224745), w = (.914251, .078934, .006815): the best is pushed down
        ("softrank", [-0.914251, -0.157868, -0.020445]),
        ("softrank_centered", [-1.650188, 0.618959, 1.031229]),
        ("softrank_loo", None),
        ("maxrl", [0.0, 0.0, 0.0]),
        ("log_odds", [0.0, 0.0, 0.0]),
    ],
)
def test_negative_rewards_are_named_in_a_warning(name, expected) -> None:
    with pytest.warns(RewardRangeWarning, match=rf"{name}: a reward is below 0"):
        got = ADVANTAGES.get(name)(torch.tensor(NEGATIVE, dtype=torch.float64))
    if expected is not None:
        torch.testing.assert_close(got, torch.tensor([expected]).double(), rtol=0, atol=ATOL)


def test_shift_below_zero_gives_the_best_answer_nothing() -> None:
    shifted = torch.tensor([[0.0, -1.5, -3.0, -3.5]], dtype=torch.float64)  # (4, 2.5, 1, .5) − 4
    with pytest.warns(RewardRangeWarning):
        got = ADVANTAGES.get("softrank")(shifted)
    wanted = torch.tensor([[0.0, -0.148385, -0.033184, -0.018651]]).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=ATOL)


def test_rewards_of_zero_or_more_do_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ADVANTAGES.get("softrank")(torch.tensor(GRADED))
    assert [str(warning.message) for warning in caught] == []


def test_group_code_of_the_softrank_authors() -> None:
    # w with z/(std + 1e-5), ddof 1: 3.717803 rather than 3.717807
    got = ADVANTAGES.get("softrank_group")(torch.tensor(GRADED).double(), ddof=1, eps=1e-5)
    assert abs(got[0, 0].item() - 3.717803) < 1e-6


@pytest.mark.parametrize("name", ["zscore", "centered", "softrank_zero_sum", "maxrl"])
def test_rounding_noise_is_no_signal(name) -> None:
    # .1 + .2 is not .3, by 5.6e-17: dividing by that spread would give advantages of size 1
    noise = torch.tensor([[0.1 + 0.2, 0.3, 0.3]], dtype=torch.float64)
    assert (noise[0, 0] != noise[0, 1]).item()
    assert (ADVANTAGES.get(name)(noise) == 0).all()
    single = torch.tensor(0.3)
    neighbours = torch.stack([single, single.nextafter(single * 2)])[None]
    assert (ADVANTAGES.get(name)(neighbours) == 0).all()


def test_small_honest_differences_are_kept() -> None:
    got = ADVANTAGES.get("zscore")(torch.tensor([[0.0, 0.0, 0.0, 1e-7]], dtype=torch.float64))
    assert abs(got[0, 3].item() - math.sqrt(3)) < 1e-6


@pytest.mark.parametrize(
    "name",
    sorted(
        set(ADVANTAGES.names())
        - {"raw", "successes", "softrank", "softrank_group", "gae", "distilled", "step_zscore"}
    ),
)
def test_a_group_of_one_is_refused_where_a_baseline_needs_two(name) -> None:
    data = {"rewards": [[1.0]], "lengths": [[3]], "parts": {"only": [[1.0]]}, "mask": [[[True]]]}
    data["token_scores"] = [[[0.5]]]
    function = ADVANTAGES.get(name)
    wanted = {key: data[key] for key in inspect.signature(function).parameters if key in data}
    if name == "discounted_whitened":  # its baseline is the batch
        assert (function(**tensors(wanted)) == 0).all()
        return
    with pytest.raises(UsageError, match="at least"):
        function(**tensors(wanted))


def test_ddof_only_rescales_tau() -> None:
    # z with ddof 1 = z with ddof 0 · √(3/4) for K = 4, so tau .5 acts as tau .5 · √(4/3) = .577350
    rewards = torch.tensor(GRADED, dtype=torch.float64)
    softrank = ADVANTAGES.get("softrank")
    same = softrank(rewards, tau=0.5 * math.sqrt(4 / 3))
    torch.testing.assert_close(softrank(rewards, ddof=1), same, rtol=0, atol=1e-12)


def test_penalised_rewards() -> None:
    # x = (.2, −.1, .5), β = .1: 1 − .1 · .6 = .94; what the mask hides may be anything
    kl = torch.tensor([[[0.2, -0.1, 0.5, NAN]]], dtype=torch.float64)
    mask = torch.tensor([[[True, True, True, False]]])
    got = penalised(torch.ones(1, 1, dtype=torch.float64), kl, mask, coefficient=0.1)
    assert abs(got.item() - 0.94) < 1e-12


def enumerated_gradient(name: str, settings: dict, *, size: int, p: float) -> float:
    """E[(1/K) Σ A_i s_i] over all 0/1 groups; s_i = a_i − p is the score of a Bernoulli policy."""
    total = 0.0
    for code in range(2**size):
        group = [(code >> i) & 1 for i in range(size)]
        advantage = ADVANTAGES.get(name)(torch.tensor([group]).double(), **settings)[0]
        chance = math.prod(p if a else 1 - p for a in group)
        total += chance * sum(float(advantage[i]) * (group[i] - p) for i in range(size)) / size
    return total


def test_lse_loo_is_the_gradient_of_its_objective() -> None:
    # K = 3, p = .3, tau = .5: dJ/dlogit of J = E[tau log mean exp(r/tau)], by the derivative of
    # Σ_n C(3,n) pⁿ(1−p)^(3−n) F(n), times p(1 − p)
    assert abs(enumerated_gradient("lse_loo", {}, size=3, p=0.3) - 0.254415745) < 1e-9


def test_maxrl_is_the_gradient_of_the_truncated_log_series() -> None:
    # W = E[g]/∇p = (1 − .7²)/.3 = 1.7, and ∇p = p(1 − p) = .21
    got = enumerated_gradient("maxrl", {"eps": 0.0}, size=3, p=0.3)
    assert abs(got - 1.7 * 0.21) < 1e-12


@pytest.mark.parametrize(
    ("k", "baseline"),
    [(2, "leave_one_out"), (2, "none"), (3, "leave_one_out")],
)
def test_pass_at_k_gradient_is_the_gradient_of_pass_at_k(k, baseline) -> None:
    # ∇(1 − (1 − p)^k) = k (1 − p)^(k−1) · p(1 − p)
    p, size = 0.3, 4
    exact = k * (1 - p) ** (k - 1) * p * (1 - p)
    got = enumerated_gradient("pass_at_k_gradient", {"k": k, "baseline": baseline}, size=size, p=p)
    assert abs(got - exact) < 1e-12


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # W(p) = E[g]/∇p for K = 8, tau = .5 at p = .05, .25, .5, .9
        ("raw", [1, 1, 1, 1]),
        ("centered", [0.875, 0.875, 0.875, 0.875]),
        ("leave_one_out", [1, 1, 1, 1]),
        ("zscore", [2.4731, 2.0261, 1.8557, 2.3277]),
        ("softrank", [0.8260, 0.4397, 0.2448, 0.1387]),
        ("successes", [6.7316, 3.5995, 1.9922, 1.1111]),
        ("maxrl", [6.0333, 3.4661, 1.9844, 1.1111]),
    ],
)
def test_expected_weight_on_the_success_probability(name, weights) -> None:
    groups = torch.tensor([[1.0] * n + [0.0] * (8 - n) for n in range(9)], dtype=torch.float64)
    advantage = ADVANTAGES.get(name)(groups)
    for p, wanted in zip([0.05, 0.25, 0.5, 0.9], weights, strict=True):
        chance = torch.tensor([math.comb(8, n) * p**n * (1 - p) ** (8 - n) for n in range(9)])
        gradient = (chance * (advantage * (groups - p)).mean(-1)).sum().item()
        assert abs(gradient / (p * (1 - p)) - wanted) < 1e-4  # maxrl's eps costs 4e-5
