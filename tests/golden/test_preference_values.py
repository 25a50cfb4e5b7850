"""Preference and ranking losses against numbers worked by hand, one for each registered name, and
the properties their docstrings claim."""

from __future__ import annotations

import math

import pytest
import torch

from devices import ON_EVERY_DEVICE, placed
from groupwise import PREFERENCES, RANKINGS
from groupwise.errors import UsageError
from groupwise.registry import spec

NAN = float("nan")


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# With beta = .1 and Δ(chosen) = 3, Δ(rejected) = −2 the margin is 5 and beta · margin = .5:
# −log σ(.5) = .474077, −log σ(−.5) = .974077.
PAIR = {
    "margin": vector(5.0),
    "chosen": vector(3.0),
    "rejected": vector(-2.0),
    "chosen_mean": vector(-0.5),
    "rejected_mean": vector(-1.5),
    "delta": vector(3.0, -2.0),
    "desirable": torch.tensor([True, False]),
}

GOLDEN: list[tuple[str, dict, list[float]]] = [
    ("logistic", {}, [0.474077]),
    ("logistic", {"beta": 0.5}, [0.078889]),  # log(1 + e^−2.5)
    ("hinge", {}, [0.5]),
    ("hinge", {"beta": 1.0}, [0.0]),
    ("square", {}, [0.0]),  # the target is 1/(2 · .1) = 5
    ("square", {"beta": 0.25}, [9.0]),  # (5 − 2)²
    ("smoothed", {}, [0.524077]),  # .9 · .474077 + .1 · .974077
    ("smoothed", {"noise": 0.0}, [0.474077]),
    ("robust", {}, [0.411577]),  # (.9 · .474077 − .1 · .974077)/.8
    ("anchored", {}, [0.875723]),  # 1 − σ(.3) + σ(−.2) = 1 − .574443 + .450166
    ("anchored", {"direction": "down"}, [0.951983]),  # σ(.3) + 1 − σ(.5) = .574443 + .377541
    ("sppo", {}, [13.0]),  # (3 − 5)² + (−2 + 5)²
    ("kto", {}, [0.425557, 0.450166]),  # 1 − σ(.3), 1 − σ(.2)
    ("kto", {"desirable_weight": 2.0}, [0.851115, 0.450166]),
    ("simpo", {}, [0.313262]),  # −log σ(2 · 1 − 1)
    ("simpo", {"gap": 2.0}, [0.693147]),
    # odds e^−.5/(1 − e^−.5) = 1.541494 and e^−1.5/(1 − e^−1.5) = 0.287217; log of their ratio
    # 1.680270; .5 + .1 · log(1 + e^−1.680270) = .5 + .1 · 0.170859
    ("orpo", {}, [0.517086]),
]


@pytest.mark.parametrize(("name", "settings", "expected"), GOLDEN)
@ON_EVERY_DEVICE
def test_preference_is_the_number_worked_by_hand(name, settings, expected, device) -> None:
    got = PREFERENCES.bind(spec(name, **settings))(placed(PAIR, device))
    torch.testing.assert_close(got.cpu(), vector(*expected), rtol=0, atol=2e-6)


def test_every_preference_has_a_golden_value() -> None:
    assert {name for name, _, _ in GOLDEN} == set(PREFERENCES.names())


PAIRED = [name for name in PREFERENCES.names() if name != "kto"]
FINITE_MARGIN = {"square", "smoothed", "sppo"}
"""Losses that are smallest at a finite margin instead of falling for ever."""


@pytest.mark.parametrize("name", PAIRED)
def test_a_preference_pushes_the_answers_apart_at_the_reference(name: str) -> None:
    chosen = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    rejected = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    data = {
        "margin": chosen - rejected,
        "chosen": chosen,
        "rejected": rejected,
        "chosen_mean": chosen - 1,
        "rejected_mean": rejected - 1,
    }
    PREFERENCES.bind(spec(name))(data).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad < 0 < rejected.grad


@pytest.mark.parametrize("name", [n for n in PAIRED if n not in FINITE_MARGIN])
def test_a_preference_never_rises_with_the_margin(name: str) -> None:
    gap = torch.linspace(-30, 30, 241, dtype=torch.float64)
    data = {
        "margin": gap,
        "chosen": gap / 2,
        "rejected": -gap / 2,
        "chosen_mean": gap.clamp(max=0) / 40 - 0.1,
        "rejected_mean": -gap.clamp(min=0) / 40 - 0.1,
    }
    if name == "robust":  # may rise past the margin where a flipped pair is more likely than noise
        data = {key: value[:140] for key, value in data.items()}
    loss = PREFERENCES.bind(spec(name))(data)
    assert (loss.diff() <= 1e-12).all()


def test_smoothed_labels_are_satisfied_at_the_log_odds_of_the_noise() -> None:
    margin = torch.tensor([math.log(9.0) / 0.1], dtype=torch.float64, requires_grad=True)
    PREFERENCES.get("smoothed")(margin, beta=0.1, noise=0.1).sum().backward()
    assert margin.grad is not None and abs(margin.grad.item()) < 1e-12


def test_robust_is_unbiased_under_flips() -> None:
    margin, noise = vector(-3.0, 0.7, 8.0), 0.2
    robust, clean = PREFERENCES.get("robust"), PREFERENCES.get("logistic")
    mean = (1 - noise) * robust(margin, noise=noise) + noise * robust(-margin, noise=noise)
    torch.testing.assert_close(mean, clean(margin), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {"beta": 0.0}) for name in PREFERENCES.names()]
    + [("smoothed", {"noise": 0.5}), ("robust", {"noise": -0.1})],
)
def test_preference_settings_out_of_range_are_refused(name, settings) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(settings))} = "):
        PREFERENCES.bind(spec(name, **settings))(PAIR)


SCORES = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
ORDER = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)

RANKING_VALUES = [
    # Δ = 1 three times, 2 twice, 3 once: (3 · .313262 + 2 · .126928 + .048587)/6
    ("bradley_terry", {}, {"scores": SCORES, "ranks": ORDER}, [0.207038]),
    ("bradley_terry", {}, {"scores": SCORES[:, :2], "ranks": ORDER[:, :2]}, [0.313262]),
    # .313262 + .01 · (2 + 1)²
    (
        "bradley_terry",
        {"center": 0.01},
        {"scores": SCORES[:, :2], "ranks": ORDER[:, :2]},
        [0.403262],
    ),
    # (log(1 + e^−1 + e^−2 + e^−3) + log(1 + e^−1 + e^−2) + log(1 + e^−1))/3
    ("plackett_luce", {}, {"scores": SCORES, "ranks": ORDER}, [0.387019]),
    ("plackett_luce", {}, {"scores": SCORES[:, :2], "ranks": ORDER[:, :2]}, [0.313262]),
    ("regression", {}, {"scores": SCORES, "targets": SCORES.flip(1)}, [5.0]),
    ("regression", {}, {"scores": SCORES, "targets": vector(2, NAN, 2, NAN)[None]}, [2.0]),
]


@pytest.mark.parametrize(("name", "settings", "data", "expected"), RANKING_VALUES)
@ON_EVERY_DEVICE
def test_ranking_loss_is_the_number_worked_by_hand(name, settings, data, expected, device) -> None:
    got = RANKINGS.bind(spec(name, **settings))(placed(data, device))
    torch.testing.assert_close(got.cpu(), vector(*expected), rtol=0, atol=2e-6)


def test_every_ranking_loss_has_a_golden_value() -> None:
    assert {name for name, *_ in RANKING_VALUES} == set(RANKINGS.names())


@pytest.mark.parametrize("name", ["bradley_terry", "plackett_luce"])
def test_ties_and_absent_answers_give_no_pair(name: str) -> None:
    loss = RANKINGS.get(name)
    tied = loss(SCORES, torch.ones_like(ORDER))
    assert torch.equal(tied, vector(0.0))
    scores = SCORES.clone()
    scores[0, 2:] = NAN
    there = torch.tensor([[True, True, False, False]])
    scores.requires_grad_(True)
    pair = loss(torch.where(there, scores, 0), ORDER, there)
    torch.testing.assert_close(pair, vector(0.313262), rtol=0, atol=1e-6)


def test_all_pairs_at_once_are_the_mean_of_the_pairs_one_by_one() -> None:
    bradley_terry = RANKINGS.get("bradley_terry")
    scores = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranks = torch.stack(
        [torch.randperm(5, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    )
    whole = bradley_terry(scores, ranks.double())
    for prompt in range(3):
        pairs = [
            bradley_terry(scores[prompt, [i, j]][None], vector(1.0, 2.0)[None])
            for i in range(5)
            for j in range(5)
            if ranks[prompt, i] < ranks[prompt, j]
        ]
        torch.testing.assert_close(whole[prompt], torch.cat(pairs).mean())
