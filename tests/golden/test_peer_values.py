"""Values of critics, reward models, preferences and distillation that other projects' functions
gave, executed on these inputs in float64 (those marked float32 compute in that type themselves).

    verl b178a3cd5         compute_value_loss
    OpenRLHF 3c3be623      ValueLoss, PairWiseLoss, DPOLoss
    NeMo RL 7ea279abf      MseValueLossFn, PreferenceLossFn, DPOLossFn, DistillationLossFn,
                           GeneralizedAdvantageEstimator
    TRL 1.16.0             RewardTrainer, DPOTrainer, KTOTrainer, CPOTrainer, ORPOTrainer,
                           GKDTrainer
    torchtune bd2a0fc7c    DPOLoss, RSOLoss; ForwardKLLoss, ReverseKLLoss (float32)
    EasyDeL 090a03b2       the loss functions of its DPO trainer, on torch
    XTuner b934f4620       odds_ratio_loss
    HALOs 4831988          KTOTrainer, SimPOTrainer, SLiCTrainer, IPOTrainer
    allRank c884756        listMLE
    statsmodels 0.15.0     PHReg, whose partial likelihood with Breslow's ties is Plackett-Luce
    DistiLLM d47e77f       js_distance (float32)
    OREAL 2859cc0          the weights of tokens in train_oreal.py
    authors of DPO f8b8c0f, SimPO 1b3e8f3, ORPO 208d2d6, SPPO 5e61c4e: their losses

GAE against verl and OpenRLHF is in `test_critic_values.py`.
"""

from __future__ import annotations

import pytest
import torch

from groupwise import ADVANTAGES, PREFERENCES, RANKINGS, VALUE_LOSSES
from groupwise.algorithms.advantages.cloning import token_weights
from groupwise.algorithms.losses.distillation import generalized_jsd, top_outcomes
from groupwise.algorithms.losses.outcomes import outcome_cross_entropy
from groupwise.registry import spec


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_agrees(found: torch.Tensor, wanted: object) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


# ---- critics


def test_gae_whitens_and_shortens_lambda_by_length_as_nemo_does() -> None:
    rewards = tensor([1.0, -0.5])
    values = tensor([[0.2, 0.5, 9.0, 0.7, 0.1], [0.3, -0.4, 0.8, 0.6, 7.0]])
    mask = torch.tensor([[[1, 1, 0, 1, 1], [1, 0, 0, 1, 0]]], dtype=torch.bool)
    gae = ADVANTAGES.get("gae")
    assert_agrees(
        gae(rewards, values, mask, gamma=0.9, lam=0.8, whitened=True)[mask],
        [0.56198228, 0.26937154, 0.09977770, 1.32455890, -0.73852961, -1.51716081],
    )
    assert_agrees(
        gae(rewards, values, mask, length_alpha=0.5)[mask], [0.3625, 0.125, -0.15, 0.9, 0.3, -1.1]
    )


def test_openrlhf_whitens_by_the_population_variance() -> None:
    # its advantages are divided by sqrt(mean of squares), ours by Bessel's: n = 10
    rewards = tensor([1.0, -0.5])
    values = tensor([[0.2, 0.5, 9.0, 0.7, 0.1], [0.3, -0.4, 0.8, 0.6, 7.0]])
    mask = torch.ones(1, 2, 5, dtype=torch.bool)
    gae = ADVANTAGES.get("gae")
    plain = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    theirs = (plain - plain.mean()) / plain.var(correction=0).sqrt()
    ours = gae(rewards, values, mask, gamma=0.9, lam=0.8, whitened=True)
    assert_agrees(ours * (10 / 9) ** 0.5, theirs)


def test_value_losses_are_those_of_verl_openrlhf_and_nemo() -> None:
    data = (
        tensor([0.5, 0.55, 0.6, 2.0], [-1.0, 0.1, 0.3, 5.0]),
        tensor([0.2, 0.5, 0.7, 1.0], [-0.5, 0.4, 0.35, 1.0]),
        tensor([1.0, 1, 1, 1], [0.0, 0.3, -0.4, 9]),
    )
    values, old, returns = data
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]], dtype=torch.bool)
    clipped = VALUE_LOSSES.get("clipped")(values, old, returns, mask, clip=0.2)
    assert_agrees(clipped[mask].mean(), 0.18770833333333334)
    assert_agrees(
        VALUE_LOSSES.get("squared")(values, returns, mask)[mask].mean(), 0.17854166666666668
    )


# ---- reward models

CHOSEN, REJECTED, MARGIN = tensor(2.0, 0.5, -0.3), tensor(1.0, 1.2, 0.4), tensor(0.5, 0.25, 0.0)
FIVE = tensor([0.3, 1.1, -0.4, 0.9, 0.2])


@pytest.mark.parametrize(
    ("margin", "center", "expected"),
    [
        (None, 0.0, 0.8398779284297128),  # OpenRLHF, NeMo RL, TRL
        (MARGIN, 0.0, 0.9514064799721722),  # OpenRLHF, TRL
        (MARGIN, 0.01, 0.9910731466388389),  # TRL
    ],
)
def test_bradley_terry_is_that_of_trl_openrlhf_and_nemo(margin, center, expected) -> None:
    scores = torch.stack([CHOSEN, REJECTED], 1)
    by = None if margin is None else margin[:, None, None].expand(3, 2, 2)
    ranks = tensor(1, 2).expand(3, 2)
    assert_agrees(
        RANKINGS.get("bradley_terry")(scores, ranks, None, by, center=center).mean(), expected
    )


def test_all_pairs_of_a_ranking_are_what_trl_openrlhf_and_nemo_give_pair_by_pair() -> None:
    assert_agrees(RANKINGS.get("bradley_terry")(FIVE, tensor([2, 1, 4, 3, 5])), [0.527855980069346])


def test_plackett_luce_is_a_partial_likelihood_and_list_mle() -> None:
    loss = RANKINGS.get("plackett_luce")
    # statsmodels, divided by the places but the last
    assert_agrees(loss(FIVE, tensor([2, 1, 4, 3, 5])), [1.0281451054062223])
    assert_agrees(loss(FIVE, tensor([1, 1, 2, 2, 3])), [1.3422092358838302])
    # allRank sums over the places
    assert_agrees(4 * loss(FIVE, tensor([2, 1, 4, 3, 5])), [4.112580421063922])


# ---- preferences: log-probabilities of four pairs, and the tokens of each answer

POLICY = tensor([-4.0, -9.5, -3.25, -12.0], [-6.5, -8.0, -7.0, -11.5])
REFERENCE = tensor([-4.5, -9.0, -4.0, -15.0], [-5.0, -8.25, -6.0, -9.0])
TOKENS = tensor([4, 7, 3, 9], [5, 6, 8, 10])
DELTA, MEAN = POLICY - REFERENCE, POLICY / TOKENS
PAIR = {
    "margin": DELTA[0] - DELTA[1],
    "chosen": DELTA[0],
    "rejected": DELTA[1],
    "chosen_mean": MEAN[0],
    "rejected_mean": MEAN[1],
}
PEERS: list[tuple[str, dict, list[float]]] = [
    # TRL, OpenRLHF, NeMo RL, torchtune
    ("logistic", {}, [0.5981388694, 0.7313501408, 0.6094704307, 0.4554924815]),
    # TRL, torchtune, EasyDeL
    ("hinge", {}, [0.8, 1.075, 0.825, 0.45]),
    # OpenRLHF, authors, EasyDeL
    ("square", {}, [9.0, 33.0625, 10.5625, 0.25]),
    # OpenRLHF, authors, torchtune
    ("smoothed", {}, [0.6181388694, 0.7238501408, 0.6269704307, 0.5104924815]),
    # TRL, EasyDeL
    ("robust", {}, [0.5731388694, 0.7407251408, 0.5875954307, 0.3867424815]),
    ("anchored", {}, [0.9500727582, 1.0187470710, 0.9562795966, 0.8633809823]),
    (
        "anchored",
        {"direction": "down"},
        [0.9626633992, 1.0062438194, 0.9751025286, 0.9403069258],
    ),
    # TRL, EasyDeL; the authors' is half of it
    ("sppo", {}, [32.5, 57.8125, 34.0625, 10.25]),
    # TRL, authors, HALOs
    ("simpo", {}, [0.9130152524, 1.3482952744, 1.6338091070, 1.5937666976]),
    # TRL, XTuner and authors for the odds; the likelihood is a mean over the chosen answer here
    ("orpo", {}, [1.0496962462, 1.4280803457, 1.1707635608, 1.4163825504]),
]


@pytest.mark.parametrize(("name", "settings", "expected"), PEERS)
def test_preferences_are_those_of_two_other_projects(name, settings, expected) -> None:
    assert_agrees(PREFERENCES.bind(spec(name, **settings))(PAIR), expected)


def test_every_preference_was_compared() -> None:
    assert {name for name, *_ in PEERS} | {"kto"} == set(PREFERENCES.names())


def test_kto_is_that_of_trl_and_halos() -> None:
    delta = torch.cat([DELTA[0, :2], DELTA[1, 2:]])
    wanted = torch.tensor([True, True, False, False])
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    # log-ratios .4, .1, .3 and 0 of mismatched answers: TRL's z is their mean
    loss = PREFERENCES.get("kto")(delta, wanted, torch.tensor(0.2, dtype=torch.float64), **weights)
    assert_agrees(loss, [0.7387508437, 0.7762392865, 0.2350179741, 0.2164535475])


def test_named_differences_of_preferences() -> None:
    # TRL's IPO takes Δ per token
    means = (DELTA / TOKENS)[0] - (DELTA / TOKENS)[1]
    assert_agrees(PREFERENCES.get("square")(means).mean(), 21.992984339569162)
    # HALOs' SLiC has no reference, and its beta is the margin to reach
    assert_agrees(PREFERENCES.get("hinge")(POLICY[0] - POLICY[1], beta=1.0), [0.0, 2.5, 0.0, 1.5])


# ---- distillation

STUDENT = tensor(
    [-4.62, -0.75, -2.12, 2.0, -1.77, -2.55, -1.25],
    [-1.73, -2.59, 3.05, 0.65, 4.04, 2.27, -2.45],
    [0.14, 0.68, 0.31, -1.27, -2.52, -2.44, -2.53],
    [-2.24, 2.33, 1.85, 1.59, 0.42, 0.27, 3.75],
    [-0.62, 0.48, -2.7, 0.49, -0.03, -0.4, -3.31],
)
TEACHER = tensor(
    [-1.33, -1.17, 5.66, 1.81, 1.9, -2.08, 1.95],
    [-0.15, -0.77, -0.55, 1.77, 2.97, -0.02, -1.53],
    [2.65, 0.12, -0.17, 0.37, 1.9, -0.79, 0.89],
    [1.08, 0.56, -1.03, -2.93, 2.22, 0.55, -2.64],
    [1.78, 2.24, 1.21, -1.85, -2.63, 3.94, -0.08],
)
LEARNED = torch.tensor([True, True, True, False, True])


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (
            0.0,
            1.6814314874435299,
        ),  # TRL, NeMo RL; torchtune and DistiLLM less the teacher's entropy
        (0.1, 0.1254119347341824),  # TRL, DistiLLM
        (0.3, 0.2624396081248142),
        (0.5, 0.30698240177907754),
        (0.9, 0.13426371669065662),
        (1.0, 1.9108337561594295),  # TRL, NeMo RL, torchtune, DistiLLM
    ],
)
def test_the_divergence_from_a_teacher_is_that_of_trl_and_others(beta, expected) -> None:
    student, teacher = STUDENT.log_softmax(-1), TEACHER.log_softmax(-1)
    assert_agrees(generalized_jsd(student, teacher, beta=beta)[LEARNED].mean(), expected)


@pytest.mark.parametrize(
    ("beta", "ours", "nemo"),
    [(0.0, 1.7418133559, 1.8976905168), (1.0, 1.4346155237, -0.0559840630)],
)
def test_nemo_leaves_the_rest_of_the_vocabulary_out_of_the_top_k(beta, ours, nemo) -> None:
    ids = TEACHER.topk(3).indices
    student, teacher = top_outcomes(STUDENT, ids), top_outcomes(TEACHER, ids)
    assert_agrees(generalized_jsd(student, teacher, beta=beta).mean(), ours)
    first, second = (teacher, student) if beta == 0 else (student, teacher)
    kept = (first.exp() * (first - second))[:, :3]
    assert_agrees(kept.sum(-1).mean(), nemo)


# ---- token reward model


@pytest.mark.parametrize(
    ("right", "weights", "loss"),
    [
        (True, [0.4621171573, 0.1243530018, 0.3941185679, 0.0, 0.0], 0.7184596480),
        (False, [0.0, 0.0, 0.0, 0.0624187467, 0.0249947930], 0.6684596480),
    ],
)
def test_token_weights_and_outcome_loss_are_those_of_oreal(right, weights, loss) -> None:
    scores, mask = tensor([1.0, -0.5, 2.0, -3.0, 0.25]), torch.ones(1, 5, dtype=torch.bool)
    assert_agrees(token_weights(scores, mask, torch.tensor([right])), [weights])
    assert_agrees(outcome_cross_entropy(scores, tensor(float(right)), mask), [loss])
