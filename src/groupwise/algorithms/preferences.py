"""Preference losses: from how much more likely the policy has made a chosen answer than a rejected
one, to the loss of the pair.

With Δ(y) = Σ_t log π(y_t) − log π_ref(y_t), the margin of a pair is Δ(chosen) − Δ(rejected). A
function asks by its parameters for what it needs of a pair:

    margin              Δ(chosen) − Δ(rejected)
    chosen, rejected    Δ of either answer
    chosen_mean, rejected_mean   mean log π per token of either answer, without a reference
    delta, desirable, kl   of unpaired answers: Δ, whether the answer is wanted, KL(π‖π_ref) ≥ 0

Each is a tensor [pair] (unpaired: [answer]), and so is the loss.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages.statistics import require_positive
from groupwise.errors import UsageError
from groupwise.registry import Registry

PREFERENCES = Registry(
    "preference",
    (
        "margin",
        "chosen",
        "rejected",
        "chosen_mean",
        "rejected_mean",
        "delta",
        "desirable",
        "kl",
    ),
)


@PREFERENCES.register
def logistic(margin: Float[Tensor, "pair"], *, beta: float = 0.1) -> Float[Tensor, "pair"]:
    """The Bradley-Terry likelihood of the preference (DPO).

        L = −log σ(beta · margin)

    Args:
        margin: Δ(chosen) − Δ(rejected), with gradient.
        beta: strength of the tie to the reference; greater than 0.

    Example:
        >>> logistic(torch.tensor([0.0, 10.0]))
        tensor([0.6931, 0.3133])

    Source: DPO (2305.18290), equation 7.
    Elsewhere: TRL's and OpenRLHF's "sigmoid".
    """
    require_positive("beta", beta)
    return -F.logsigmoid(beta * margin)


@PREFERENCES.register
def hinge(margin: Float[Tensor, "pair"], *, beta: float = 0.1) -> Float[Tensor, "pair"]:
    """A hinge on the margin (SLiC).

        L = max(0, 1 − beta · margin)

    Args:
        margin: Δ(chosen) − Δ(rejected), with gradient.
        beta: 1/beta is the margin at which the loss ends; greater than 0.

    Example:
        >>> hinge(torch.tensor([0.0, 5.0, 20.0]))
        tensor([1.0000, 0.5000, 0.0000])

    Source: SLiC-HF (2305.10425); RSO (2309.06657).
    Elsewhere: HALOs' SLiC has no reference and reads beta as the margin to reach.
    """
    require_positive("beta", beta)
    return torch.relu(1 - beta * margin)


@PREFERENCES.register
def square(margin: Float[Tensor, "pair"], *, beta: float = 0.1) -> Float[Tensor, "pair"]:
    """A squared distance to a fixed margin (IPO).

        L = (margin − 1 / (2 beta))²

    The margin is of sums over tokens, as in the paper.

    Args:
        margin: Δ(chosen) − Δ(rejected), with gradient.
        beta: τ of the paper; greater than 0.

    Example:
        >>> square(torch.tensor([0.0, 5.0]))
        tensor([25.,  0.])

    Source: IPO (2310.12036), equation 17.
    Elsewhere: TRL's and HALOs' "ipo" take Δ per token, so their beta means another margin;
    OpenRLHF takes sums.
    """
    require_positive("beta", beta)
    return (margin - 1 / (2 * beta)) ** 2


@PREFERENCES.register
def smoothed(
    margin: Float[Tensor, "pair"], *, beta: float = 0.1, noise: float = 0.1
) -> Float[Tensor, "pair"]:
    """The logistic loss with smoothed labels (conservative DPO).

        L = −(1 − noise) · log σ(beta · margin) − noise · log σ(−beta · margin)

    Args:
        margin: Δ(chosen) − Δ(rejected), with gradient.
        beta: strength of the tie to the reference; greater than 0.
        noise: assumed share of flipped preferences, in [0, 0.5).

    Example:
        >>> smoothed(torch.tensor([0.0, 10.0]))
        tensor([0.6931, 0.4133])

    Source: Mitchell 2023, "A note on DPO with noisy preferences"; L is smallest at
    beta · margin = log((1 − noise) / noise).
    Elsewhere: OpenRLHF's `label_smoothing`; TRL ignores that setting with "sigmoid".
    """
    require_positive("beta", beta)
    _noise(noise)
    x = beta * margin
    return -(1 - noise) * F.logsigmoid(x) - noise * F.logsigmoid(-x)


@PREFERENCES.register
def robust(
    margin: Float[Tensor, "pair"], *, beta: float = 0.1, noise: float = 0.1
) -> Float[Tensor, "pair"]:
    """The logistic loss, unbiased under flipped preferences (robust DPO).

        L = (−(1 − noise) · log σ(beta · margin) + noise · log σ(−beta · margin)) / (1 − 2 noise)

    Args:
        margin: Δ(chosen) − Δ(rejected), with gradient.
        beta: strength of the tie to the reference; greater than 0.
        noise: share of flipped preferences, in [0, 0.5).

    Example:
        >>> robust(torch.tensor([0.0, 10.0]))
        tensor([0.6931, 0.1883])

    Source: rDPO (2403.00409), equation 12.
    """
    require_positive("beta", beta)
    _noise(noise)
    x = beta * margin
    return (-(1 - noise) * F.logsigmoid(x) + noise * F.logsigmoid(-x)) / (1 - 2 * noise)


@PREFERENCES.register
def anchored(
    chosen: Float[Tensor, "pair"],
    rejected: Float[Tensor, "pair"],
    *,
    beta: float = 0.1,
    direction: Literal["zero", "down"] = "zero",
) -> Float[Tensor, "pair"]:
    """Each answer is moved in a stated direction, not only apart from the other (APO).

        zero:  L = (1 − σ(beta · Δ_c)) + σ(beta · Δ_r)
        down:  L = σ(beta · Δ_c) + (1 − σ(beta · (Δ_c − Δ_r)))

    Args:
        chosen, rejected: Δ of either answer, with gradient.
        beta: strength of the tie to the reference; greater than 0.
        direction: "zero" raises the chosen answer and lowers the rejected one, for a policy worse
            than the data; "down" lowers both, the rejected one more, for a better policy.

    Example:
        >>> anchored(torch.tensor([0.0, 10.0]), torch.tensor([0.0, -10.0]))
        tensor([1.0000, 0.5379])

    Source: APO (2408.06266), equations 7 and 8.
    """
    require_positive("beta", beta)
    if direction == "zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))


@PREFERENCES.register
def sppo(
    chosen: Float[Tensor, "pair"], rejected: Float[Tensor, "pair"], *, beta: float = 0.1
) -> Float[Tensor, "pair"]:
    """Each answer is drawn to its own target, as one step of self-play would (SPPO, hard labels).

        L = (Δ_c − 1 / (2 beta))² + (Δ_r + 1 / (2 beta))²

    Args:
        chosen, rejected: Δ of either answer, with gradient.
        beta: 1/η of the paper; greater than 0.

    Example:
        >>> sppo(torch.tensor([0.0, 5.0]), torch.tensor([0.0, -5.0]))
        tensor([50.,  0.])

    Source: SPPO (2405.00675), equation 4.7 with probabilities 0 and 1.
    Elsewhere: TRL's "sppo_hard"; the authors' code divides by 2.
    """
    require_positive("beta", beta)
    target = 1 / (2 * beta)
    return (chosen - target) ** 2 + (rejected + target) ** 2


@PREFERENCES.register
def kto(
    delta: Float[Tensor, "answer"],
    desirable: Bool[Tensor, "answer"],
    kl: Float[Tensor, ""] | None = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, "answer"]:
    """Answers without a partner, each wanted or not (KTO).

        wanted:    L = desirable_weight · (1 − σ(beta · (Δ − z)))
        unwanted:  L = undesirable_weight · (1 − σ(beta · (z − Δ)))

    Args:
        delta: Δ of every answer, with gradient.
        desirable: whether the answer is wanted.
        kl: z, an estimate of KL(π‖π_ref) ≥ 0 without gradient; None is 0.
        beta: strength of the tie to the reference; greater than 0.
        desirable_weight, undesirable_weight: λ_D and λ_U, for data with few of one kind.

    Example:
        >>> kto(torch.tensor([0.0, 10.0]), torch.tensor([True, False]))
        tensor([0.5000, 0.7311])

    Source: KTO (2402.01306), equation 8.
    Elsewhere: TRL's z is a mean over mismatched answers; HALOs' leaves those with a log-ratio of 0
    out of the mean.
    """
    require_positive("beta", beta)
    z = 0.0 if kl is None else kl.detach().clamp(min=0)
    wanted = desirable_weight * (1 - torch.sigmoid(beta * (delta - z)))
    unwanted = undesirable_weight * (1 - torch.sigmoid(beta * (z - delta)))
    return torch.where(desirable, wanted, unwanted)


@PREFERENCES.register
def simpo(
    chosen_mean: Float[Tensor, "pair"],
    rejected_mean: Float[Tensor, "pair"],
    *,
    beta: float = 2.0,
    gap: float = 1.0,
) -> Float[Tensor, "pair"]:
    """The logistic loss on mean log-probabilities, with a target margin and no reference (SimPO).

        L = −log σ(beta · (mean log π(chosen) − mean log π(rejected)) − gap)

    Args:
        chosen_mean, rejected_mean: mean log π per token of either answer, with gradient.
        beta: scale of the difference; greater than 0.
        gap: γ, the margin to reach.

    Example:
        >>> simpo(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.6931])

    Source: SimPO (2405.14734), equation 6.
    Elsewhere: TRL's CPO trainer with loss "simpo"; the authors and HALOs set gap / beta.
    """
    require_positive("beta", beta)
    return -F.logsigmoid(beta * (chosen_mean - rejected_mean) - gap)


@PREFERENCES.register
def orpo(
    chosen_mean: Float[Tensor, "pair"],
    rejected_mean: Float[Tensor, "pair"],
    *,
    beta: float = 0.1,
) -> Float[Tensor, "pair"]:
    """Likelihood of the chosen answer, and its odds against the rejected one (ORPO).

        L = −mean log π(chosen) − beta · log σ(log odds(chosen) − log odds(rejected))
        odds(y) = p / (1 − p),   p = exp(mean log π(y))

    Args:
        chosen_mean, rejected_mean: mean log π per token of either answer, with gradient.
        beta: λ, the weight of the odds; greater than 0.

    Example:
        >>> orpo(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([1.0693])

    Source: ORPO (2403.07691), equations 6 and 7.
    Elsewhere: TRL's likelihood is a mean over all tokens of prompts and chosen answers.
    """
    require_positive("beta", beta)
    odds = _log_odds(chosen_mean) - _log_odds(rejected_mean)
    return -chosen_mean - beta * F.logsigmoid(odds)


def _log_odds(logp: Float[Tensor, "pair"]) -> Float[Tensor, "pair"]:
    """log(p / (1 − p)) of p = exp(logp), finite at p = 1."""
    tiny = torch.finfo(logp.dtype).eps
    return logp - torch.log(-torch.expm1(logp.clamp(max=-tiny)))


def _noise(value: float) -> None:
    if not 0 <= value < 0.5:
        raise UsageError(f"noise = {value!r}: must be at least 0 and less than 0.5.")
