"""Losses: one value per token from log-probabilities and advantages, to be minimised.

A step's loss is Σ weight · token loss. Five kinds of function make it up, each registered by name:
a ratio (how far the policy moved), a surrogate (what the advantage asks for), a divergence (how
far it may drift from the reference), a correction (for samplers that compute other probabilities)
and a weighting (how tokens add up). `PolicyObjective` joins them.

`mask` is True where the policy wrote the token. What lies outside it, infinities and NaN included,
reaches neither values nor gradients.
"""

from groupwise.algorithms.losses.corrections import CORRECTIONS
from groupwise.algorithms.losses.divergences import DIVERGENCES
from groupwise.algorithms.losses.objective import (
    FunctionObjective,
    OutcomeObjective,
    PolicyObjective,
    ValueObjective,
)
from groupwise.algorithms.losses.preference import (
    REFERENCED,
    PreferenceObjective,
    preference_figures,
)
from groupwise.algorithms.losses.ranking import RankingObjective, final_scores
from groupwise.algorithms.losses.ratios import RATIOS
from groupwise.algorithms.losses.surrogates import SURROGATES
from groupwise.algorithms.losses.values import VALUE_LOSSES
from groupwise.algorithms.losses.weighting import WEIGHTINGS

__all__ = [
    "CORRECTIONS",
    "DIVERGENCES",
    "RATIOS",
    "REFERENCED",
    "SURROGATES",
    "VALUE_LOSSES",
    "WEIGHTINGS",
    "FunctionObjective",
    "OutcomeObjective",
    "PolicyObjective",
    "PreferenceObjective",
    "RankingObjective",
    "ValueObjective",
    "final_scores",
    "preference_figures",
]
