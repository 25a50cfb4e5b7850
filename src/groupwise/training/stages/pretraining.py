"""The critic of a run before its first step: created, and pretrained on the initial policy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from groupwise.algorithms import BoundAlgorithm
from groupwise.algorithms.losses import ValueObjective
from groupwise.config import Config
from groupwise.config.checks import value_loss
from groupwise.config.connect import Restartable
from groupwise.settings import PretrainingSettings
from groupwise.training.critic import (
    Returns,
    critic_batches,
    critic_metrics,
    with_values,
)
from groupwise.training.second_learner import with_column
from groupwise.types import Batch, Learner, ScoredGroups, Source
from groupwise.updates import sequences
from groupwise.updates.heads import Read

RECENT = 5
"""Batches over which the explained variance is averaged."""

OTHER_SEEDS = 2**31
"""Added to the seed of the run: pretraining sees other rollouts than the first steps."""

Log = Callable[[str], None]


def ready_critic(
    config: Config,
    algorithm: BoundAlgorithm,
    make: Callable[..., Restartable],
    source: Callable[..., Source],
    *,
    begun: bool,
    log: Log,
) -> Learner:
    """The critic of a run that is ready for the first step.

    Args:
        make: makes the critic's learner from the settings of `second_learner`.
        source: makes a source of rollouts from its filter and seed.
        begun: the run is resumed, so the critic's weights come from its checkpoint.
        log: called with a line on the progress of the pretraining.
    """
    own, settings = config.critic, config.critic.pretraining
    steps = config.steps * own.epochs * own.minibatches
    if settings is None or begun:
        return make(optimizer=own.optimizer, total_steps=steps, reads=_reads(config))
    rollouts = source(keep=lambda data: data["valid"], seed=config.seed + OTHER_SEEDS)
    critic = _pretrained(config, settings, algorithm, make, rollouts, log=log)
    critic.restart(own.optimizer, total_steps=steps)
    return critic


def _reads(config: Config) -> Collection[Read]:
    """States before tokens, and those after the last ones where truncated answers need them."""
    return ("before", "after") if config.critic.bootstrap else ("before",)


def _pretrained(
    config: Config,
    settings: PretrainingSettings,
    algorithm: BoundAlgorithm,
    make: Callable[..., Restartable],
    source: Source,
    *,
    log: Log,
) -> Restartable:
    """A critic that was trained on Monte-Carlo returns of the policy as it is."""
    # The policy is its own reference, so a penalty in the reward is 0.
    returns = replace(Returns.of(algorithm, lam=1.0), kl=0.0)
    steps = settings.batches * settings.epochs * settings.minibatches
    changes: dict[str, Any] = {
        "learning_rate": settings.learning_rate,
        "schedule": "cosine",
        "final_fraction": 0.1,
        "warmup_steps": steps // 20,
    }
    first = source.take(config.prompts_per_step, step=0)
    learner = make(
        optimizer=config.critic.optimizer.model_copy(update=changes),
        total_steps=steps,
        reads=_reads(config),
        start=_mean_return(sequences(first), first, returns),
    )
    objective = ValueObjective(loss=value_loss(config))
    recent: deque[float] = deque(maxlen=RECENT)
    every, start = max(1, settings.batches // 20), time.perf_counter()
    for number in range(1, settings.batches + 1):
        scored = first if number == 1 else source.take(config.prompts_per_step, step=number - 1)
        batch = sequences(scored)
        values = learner.evaluate(batch, {"values"})["values"].float()
        batch = with_values(batch, values, scored)
        batch = with_column(batch, "returns", returns(scored, batch))
        batch = with_column(batch, "old_values", batch.columns["values"])
        parts = critic_batches(
            settings.minibatches, settings.epochs, seed=(config.seed + OTHER_SEEDS, number)
        )
        losses = [learner.update(part, objective).loss for part in parts(batch)]
        found = critic_metrics(batch)
        recent.append(found["explained_variance"])
        known = [value for value in recent if value == value]
        level = fmean(known) if known else 0.0
        enough = settings.explained_variance
        done = enough is not None and len(recent) == RECENT and level >= enough
        if number % every == 0 or done or number == settings.batches:
            spent = time.perf_counter() - start
            left = 0.0 if done else spent / number * (settings.batches - number)
            log(
                f"critic, batch {number}/{settings.batches}: value loss {fmean(losses):.4f}, "
                f"explained variance {level:.3f} over the last {len(recent)} batches, "
                f"{left:.0f} s left"
            )
        if done:
            break
    return learner


def _mean_return(batch: Batch, scored: ScoredGroups, returns: Returns) -> float:
    """The mean return of a batch, which a new head begins with.

    If values start at 0, the first updates raise all values alike through every weight of the
    trunk, which disturbs what the model knows of the prompts before the head uses it.
    """
    if not batch.mask.any():
        return 0.0
    none = with_values(batch, torch.zeros(batch.mask.shape), scored)
    return float(returns(scored, none)[batch.mask].mean())
