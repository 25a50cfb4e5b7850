"""Settings of the second learners that some algorithms train together with the policy."""

from __future__ import annotations

from typing import Any

from groupwise.settings.base import Count, Location, Positive, Section, Share, Whole
from groupwise.settings.sections import AdapterSettings, OptimizerSettings


class SecondLearnerSettings(Section):
    """A model with one output per token that is trained on the rollouts of the policy."""

    model: Location | None = None
    """Hub name or folder of a language model or a classifier with one label; None copies the
    initial policy."""
    adapter: AdapterSettings | None = None
    """Train a low-rank adapter and the head; None trains every weight."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """AdamW settings of this model."""
    freeze_policy_steps: Whole = 0
    """Number of initial steps that train only this model and not the policy."""


class PretrainingSettings(Section):
    """Training of the critic on Monte-Carlo returns of the initial policy, before the first
    step."""

    batches: Count = 50
    """Maximum number of batches of rollouts, each with `prompts_per_step` · `group_size`
    completions."""
    epochs: Count = 1
    """Passes over each batch."""
    minibatches: Count = 4
    """Optimizer steps per pass."""
    learning_rate: Positive = 1e-3
    """Peak learning rate; a cosine schedule lowers it to a tenth."""
    explained_variance: Share | None = None
    """Stop when the mean explained variance of the last five batches, measured before training on
    them, reaches this value; None uses all batches."""


class CriticSettings(SecondLearnerSettings):
    """The critic, for algorithms whose advantages need values."""

    loss: dict[str, Any] = {"name": "squared"}
    """Value loss, "squared" or "clipped", and its settings."""
    lam: Share = 1.0
    """λ of the critic's targets; 1 gives Monte-Carlo returns, and the values then come from the
    first update without an extra forward pass."""
    epochs: Count = 1
    """Passes over each batch of rollouts."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    bootstrap: bool = False
    """Whether truncated completions bootstrap from the critic's value instead of 0."""
    pretraining: PretrainingSettings | None = None
    """Training of the critic before the first step; None starts from values of 0."""


class TokenRewardSettings(SecondLearnerSettings):
    """The token reward model, for algorithms whose advantages need token scores. It takes one
    optimizer step per batch of rollouts."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=2e-6)
    """AdamW settings of this model."""
    freeze_policy_steps: Whole = 10
    """Number of initial steps that train only this model and not the policy."""
