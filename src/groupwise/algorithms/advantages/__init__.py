"""Advantages: how much better each answer was than it had to be, from the rewards of its group.

Every function takes `rewards` [prompt, group] and returns advantages of the same shape and dtype
(token-level ones [prompt, group, time]). Samples that are not judged (`valid` False or reward NaN)
get advantage 0 and enter no statistic: K is the number of judged samples of the group. Groups
whose rewards are all equal give exactly 0 unless the function says otherwise
(`groupwise.algorithms.properties`).

The data a function may ask for:

    rewards   [prompt, group]        the reward that trains
    valid     [prompt, group]        judged; None: every reward that is not NaN
    correct   [prompt, group]        raw correctness, NaN where not defined
    lengths   [prompt, group]        tokens that the policy wrote
    parts     name -> [prompt, group]  the parts of the reward, NaN where one did not apply
    mask      [prompt, group, time]  True where the policy wrote the token
    kl        [prompt, group, time]  a penalty per token, already multiplied by its coefficient
    values    [prompt, group, time]  predicted by a critic before each token
    bootstrap [prompt, group]        predicted after the last token of a truncated answer, else 0
"""

from groupwise.algorithms.advantages import baselines, batch, best, critic, softrank
from groupwise.algorithms.advantages.base import ADVANTAGES
from groupwise.algorithms.advantages.penalty import penalised
from groupwise.algorithms.advantages.statistics import RewardRangeWarning, has_signal

__all__ = [
    "ADVANTAGES",
    "RewardRangeWarning",
    "baselines",
    "batch",
    "best",
    "critic",
    "has_signal",
    "penalised",
    "softrank",
]
