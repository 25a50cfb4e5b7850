"""A task on which PPO needs its critic: groups of one, no whitening, and prompts whose rewards
differ by far more than the policy can earn.

Each digit of an answer earns 1/8. Besides, whatever the answer is, prompts that speak of a shop (a
fifth of them) earn 2.4 and the others lose 0.6. Without values, the level of the prompt is noise in
the gradient. A critic reads the level off the prompt, and the digits off the answer so far.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import pytest

from small_runs import prepared, timeless

SEEDS = range(1, 6)
"""Seed 0 has served to choose the settings of the critic."""
T_975 = 2.776
"""97.5 % quantile of Student's t with 4 degrees of freedom."""

RATES = ("1e-3", "3e-3", "1e-2")

TASK = (
    "algorithm.name=orz",
    "algorithm.advantage.whitened=false",
    "group_size=1",
    "prompts_per_step=16",
    "data.limit=1000",
    "sampling.max_tokens=16",
    "logging.rollouts_every=0",
    "steps=40",
)
CRITIC = (
    "critic.optimizer.learning_rate=3e-3",
    "critic.epochs=4",
    "critic.pretraining={batches=80, minibatches=2, learning_rate=3e-3}",
)
NO_CRITIC = ("critic.optimizer.learning_rate=0.0",)
"""A critic that stays at values of 0."""


def digits(text: str) -> float:
    return sum(c.isdigit() for c in text) / 8


def level(text: str, prompt: str) -> float:
    return 2.4 if "shop" in prompt else -0.6


def earned(folder: Path, *more: str) -> float:
    """The mean reward of digits over the last 8 steps."""
    run = prepared(folder, *TASK, *more, functions=[digits, level])
    run.trainer.run()
    run.close()
    return fmean(row["reward_digits"] for row in timeless(folder)[-8:])


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_ppo_with_a_critic_beats_ppo_without(tmp_path: Path) -> None:
    """Over 5 seeds, against the best of three learning rates without: the interval is above 0."""
    arms = {"with 1e-2": CRITIC} | {f"without {rate}": NO_CRITIC for rate in RATES}
    found = {}
    for arm, more in arms.items():
        rate = f"optimizer.learning_rate={arm.split()[1]}"
        found[arm] = [
            earned(tmp_path / f"{arm}-{seed}", *more, rate, f"seed={seed}") for seed in SEEDS
        ]
        print(arm, [round(value, 3) for value in found[arm]], flush=True)
    having = found.pop("with 1e-2")
    gains = [a - b for a, b in zip(having, max(found.values(), key=fmean), strict=True)]
    half = T_975 * stdev(gains) / len(gains) ** 0.5
    print(f"gain {fmean(gains):.3f} ± {half:.3f}")
    assert fmean(gains) - half > 0
