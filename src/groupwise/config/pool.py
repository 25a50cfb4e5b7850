"""Settings of the worker processes of rewards."""

from __future__ import annotations

import typing
from collections.abc import Sequence

from groupwise.errors import UsageError
from groupwise.settings import RewardPoolSettings

if typing.TYPE_CHECKING:
    from groupwise.config.schema import Config


def check_pool(config: Config) -> None:
    """Raise an error for limits of worker processes if the run has no workers.

    Raises:
        UsageError: with the setting to change.
    """
    from groupwise.rewards import REWARDS
    from groupwise.rewards.scoring.adapters import place_of

    names = [part.name for part in config.rewards]
    if names and not judges_on_cluster(config):
        check_limits(config.reward_pool, [place_of(REWARDS.get(n)) for n in names if n in REWARDS])


def check_limits(pool: RewardPoolSettings, places: Sequence[str]) -> None:
    """Raise an error for limits of worker processes that apply to no reward.

    Args:
        pool: the limits.
        places: where the rewards run (`groupwise.rewards.scoring.adapters.Place`).

    Raises:
        UsageError: with the setting to change.
    """
    timed = {"own_worker", "async"} & {*places}
    for name in () if pool.workers else ("memory_mb",) if timed else ("timeout_s", "memory_mb"):
        if getattr(pool, name) != type(pool).model_fields[name].default:
            raise UsageError(
                f"reward_pool.{name} = {getattr(pool, name)!r}: needs worker processes, because "
                "rewards in the trainer's process cannot be interrupted; set reward_pool.workers "
                "= 1 or more."
            )


def judges_on_cluster(config: Config) -> bool:
    """Whether processes of a cluster judge, instead of the driver."""
    return config.cluster is not None and config.cluster.scorers > 0
