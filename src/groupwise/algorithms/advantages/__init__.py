"""Advantages: how much better each answer was than its baseline, from the rewards of its group.

Every function takes `rewards` [prompt, group] and returns advantages of the same shape and dtype
(token-level ones [prompt, group, time]). Samples that are not judged (`valid` False or reward NaN)
get advantage 0 and enter no statistic: K is the number of judged samples of the group. Groups
whose rewards are all equal give exactly 0 unless the function says otherwise
(`groupwise.algorithms.properties`).

`inputs.INPUTS` lists the data a function may ask for.
"""

from groupwise.algorithms.advantages import (
    baselines,
    batch,
    best,
    cloning,
    critic,
    process,
    softrank,
    teacher,
)
from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.critic import value_targets
from groupwise.algorithms.advantages.inputs import INPUTS, advantage_inputs
from groupwise.algorithms.advantages.penalty import penalised
from groupwise.algorithms.advantages.statistics import RewardRangeWarning

__all__ = [
    "ADVANTAGES",
    "INPUTS",
    "RewardRangeWarning",
    "advantage_inputs",
    "baselines",
    "batch",
    "best",
    "cloning",
    "critic",
    "penalised",
    "process",
    "softrank",
    "teacher",
    "value_targets",
]
