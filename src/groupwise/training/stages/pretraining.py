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
from groupwise.config import Config
from groupwise.config.checks import value_loss
from groupwise.config.connect import second_learner
from groupwise.models import Policy, score_layer
from groupwise.settings import PretrainingSettings
from groupwise.training.critic import (
    Returns,
    critic_batches,
    critic_metrics,
    value_objective,
    with_values,
)
from groupwise.training.second_learner import with_column
from groupwise.types import Batch, ScoredGroups, Source
from groupwise.updates import TorchLearner, sequences
from groupwise.updates.heads import Read

RECENT = 5
"""Batches over which the explained variance is averaged."""

OTHER_SEEDS = 2**31
"""Added to the seed of the run: pretraining sees other rollouts than the first steps."""

Log = Callable[[str], None]


def ready_critic(
    config: Config,
    algorithm: BoundAlgorithm,
    critic: Policy,
    source: Callable[..., Source],
    *,
    begun: bool,
    log: Log,
) -> TorchLearner:
    """The critic of a run that is ready for the first step.

    Args:
        critic: its model, which is trained in place.
        source: makes a source of rollouts from its filter and seed.
        begun: the run is resumed, so the critic's weights come from its checkpoint.
        log: called with a line on the progress of the pretraining.
    """
    settings = config.critic.pretraining
    if settings is not None and not begun:
        rollouts = source(keep=lambda data: data["valid"], seed=config.seed + OTHER_SEEDS)
        _pretrain(config, settings, algorithm, critic, rollouts, log=log)
    steps = config.steps * config.critic.epochs * config.critic.minibatches
    return second_learner(
        config,
        critic,
        optimizer=config.critic.optimizer,
        total_steps=steps,
        reads=_reads(config),
    )


def _reads(config: Config) -> Collection[Read]:
    """States before tokens, and those after the last ones where truncated answers need them."""
    return ("before", "after") if config.critic.bootstrap else ("before",)


def _pretrain(
    config: Config,
    settings: PretrainingSettings,
    algorithm: BoundAlgorithm,
    critic: Policy,
    source: Source,
    *,
    log: Log,
) -> None:
    """Train a critic in place on Monte-Carlo returns of the policy as it is."""
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
    _predict_the_mean(critic, sequences(first), first, returns)
    learner = second_learner(
        config,
        critic,
        optimizer=config.critic.optimizer.model_copy(update=changes),
        total_steps=steps,
        reads=_reads(config),
    )
    objective = value_objective(value_loss(config))
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
    learner.optimizer.remove_hooks()


@torch.no_grad()
def _predict_the_mean(critic: Policy, batch: Batch, scored: ScoredGroups, returns: Returns) -> None:
    """Let a new head predict the mean return of the first batch wherever it is asked.

    If values start at 0, the first updates raise all values alike through every weight of the
    trunk, which disturbs what the model knows of the prompts before the head uses it.
    """
    layer = score_layer(critic.model)
    if layer.bias is None or layer.weight.any() or layer.bias.any() or not batch.mask.any():
        return
    none = with_values(batch, torch.zeros(batch.mask.shape), scored)
    layer.bias.fill_(float(returns(scored, none)[batch.mask].mean()))
