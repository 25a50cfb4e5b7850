"""Supervised fine-tuning as a run: epochs, held-out loss, early stop, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.evaluation import Estimate
from groupwise.prompts.rows import Row
from groupwise.training.offline.conversations import (
    Conversation,
    Conversations,
    conversation_batch,
    conversation_of,
    encode_conversations,
    read_conversations,
)
from groupwise.training.offline.run import (
    Job,
    RunOptions,
    Workplace,
    generation,
    held_out_split,
    make_learner,
    run_on_data,
)
from groupwise.training.offline.trainer import evaluation_row
from groupwise.training.stages.sft import NEGATIVE_LOG_LIKELIHOOD
from groupwise.training.stages.warmup import worked_examples
from groupwise.types import Batch, Metrics, Objective, Update
from groupwise.updates import TorchLearner

EVALUATED = 64
"""Conversations of a pass over held-out data."""

RESAMPLES = 1000
"""Bootstrap samples of an interval."""


@dataclass(frozen=True, kw_only=True)
class SupervisedTask:
    """Learning what the assistant wrote.

    Attributes:
        items, held_out: what is trained on and what is evaluated.
        generate: evaluates answers that the model generates.
    """

    learner: TorchLearner
    items: Sequence[Conversation]
    held_out: Sequence[Conversation]
    generate: Callable[[], Mapping[str, Any]] | None = None

    def batch(self, items: Sequence[int]) -> tuple[Batch, Objective]:
        """Some conversations, and the mean of −log π over all their learned tokens."""
        return conversation_batch([self.items[i] for i in items]), NEGATIVE_LOG_LIKELIHOOD

    def metrics(self, batch: Batch, objective: Objective, update: Update) -> Metrics:
        """Learned tokens of the step and their perplexity."""
        return {
            "learned_tokens": float(batch.mask.sum()),
            "perplexity": float(np.exp(min(update.loss, 80.0))),
        }

    def evaluate(self) -> list[dict[str, Any]]:
        """Loss and perplexity of held-out conversations, whose score is −loss; then generated
        answers."""
        rows = []
        if self.held_out:
            figures = self._held_out_figures()
            rows.append(evaluation_row("conversations", figures, score=-figures["loss"].value))
        return rows if self.generate is None else [*rows, dict(self.generate())]

    def _held_out_figures(self) -> dict[str, Estimate]:
        """Means over all learned tokens; intervals resample conversations."""
        sums, counts = list[float](), list[int]()
        for first in range(0, len(self.held_out), EVALUATED):
            batch = conversation_batch(self.held_out[first : first + EVALUATED])
            logp = self.learner.evaluate(batch, {"logp"})["logp"]
            sums += (-logp * batch.mask).sum(1).tolist()
            counts += batch.mask.sum(1).tolist()
        loss = token_mean(np.array(sums), np.array(counts))
        ends = (np.exp(np.minimum(x, 80.0)) for x in (loss.value, loss.low, loss.high))
        value, low, high = map(float, ends)
        return {"loss": loss, "perplexity": Estimate(value=value, low=low, high=high)}


def token_mean(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """Σ sums / Σ counts, with a percentile interval over resampled conversations.

    Example:
        >>> token_mean(np.array([2.0, 4.0]), np.array([1, 2])).value
        2.0
    """
    value = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Estimate(value=value, low=float("nan"), high=float("nan"))
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return Estimate(value=value, low=float(low), high=float(high))


def fine_tune(
    config: Config,
    **options: Unpack[RunOptions],
) -> Path:
    """Fine-tune a model with the section [sft] of a configuration.

    Args:
        options: as `train_config` has them.

    Returns:
        The run directory; the model is in `final/`.

    Raises:
        UsageError: a setting or a row of the data cannot be used; nothing was started.
    """
    settings = config.sft
    if settings is None:
        raise UsageError("sft: is not set; add a section [sft].")
    if settings.patience and not settings.held_out:
        raise UsageError(
            f"sft.patience = {settings.patience}: needs a held-out loss; set sft.held_out above 0."
        )
    rows = None if settings.data is None else read_conversations(settings)
    return run_on_data(
        config,
        settings,
        lambda workplace: _job(workplace, rows),
        name="sft",
        method="supervised learning",
        **options,
    )


def _job(workplace: Workplace, rows: Sequence[Row] | None) -> Job:
    config, policy = workplace.config, workplace.policy
    settings = config.sft
    assert settings is not None
    if rows is None:
        examples = worked_examples(config, policy, settings)
        items = tuple(conversation_of(example, policy) for example in examples)
        data = Conversations(items=items, dropped={})
    else:
        data = encode_conversations(rows, policy, settings)
    workplace.progress.log(f"data: {data}")
    train, held_out = held_out_split(data.items, settings.held_out, seed=config.seed)
    learner = make_learner(workplace, settings, len(train))
    task = SupervisedTask(
        learner=learner,
        items=train,
        held_out=held_out,
        generate=generation(workplace, learner),
    )
    return Job(task=task, learner=learner, items=train, patience=settings.patience)
