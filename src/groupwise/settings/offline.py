"""Settings of training on data instead of on rollouts: the sections [preference] and their like."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from groupwise.settings.base import (
    Count,
    Location,
    Name,
    NonNegative,
    Positive,
    Section,
    Whole,
)


class DatasetSettings(Section):
    """The data set that a run learns from, and what becomes of rows that do not fit."""

    data: Location | None = None
    """File, folder or hub name of the data."""
    split: Name = "train"
    """Split of a folder or hub data set."""
    revision: Name | None = None
    """Commit, tag or branch of a hub data set."""
    epochs: Positive | None = None
    """Passes over the data, in place of `steps`; None trains for `steps`."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the prompts that are not trained on but evaluated."""
    max_tokens: Count | None = None
    """Most tokens of a prompt with an answer; None is the model's context."""
    too_long: Literal["refuse", "drop", "cut"] = "drop"
    """What becomes of longer answers: the run is refused, or they are dropped or cut at their end,
    and counted."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that say nothing, such as equal answers: the run is refused, or they are
    dropped and counted."""


class PreferenceSettings(DatasetSettings):
    """Training on preferences; a step takes `prompts_per_step` prompts with all their answers.
    Without `data`, the model's own answers are sampled and scored by the rewards."""

    loss: dict[str, Any] = {"name": "logistic"}
    """Function of the preference, with its settings: `{ name = "logistic", beta = 0.1 }`."""
    nll: NonNegative = 0.0
    """Weight of −log π per token of the chosen answer, which keeps it likely."""
    prompts: Count = 256
    """Training prompts that own answers are sampled to, `group_size` each."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs made of scored answers: the best with the worst, or all that differ in score."""
    online: bool = False
    """Make pairs of every step's own rollouts, in the loop of `groupwise train`, instead of once
    before the first step. Of the algorithm, only the filter is used."""


class RewardModelSettings(DatasetSettings):
    """Training a reward model; a step takes `prompts_per_step` prompts with all their answers.
    Without `data`, answers of the model are sampled and ranked by the rewards of the recipe."""

    loss: dict[str, Any] = {"name": "bradley_terry"}
    """Function of the scores, with its settings: `{ name = "bradley_terry", center = 0.01 }`."""
    prompts: Count = 512
    """Prompts that own answers are sampled to, `group_size` each, or that the generators
    "word_problem_rankings", "word_problem_slips" and "word_problem_steps" make."""
    label_noise: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the training rankings that are turned round, to study wrong labels."""
    step_separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between the steps of an answer. With it, the data has a label for each step (`prompt`,
    `completions`, `labels`), and a token classifier learns them: a process reward model."""


class SftSettings(DatasetSettings):
    """Supervised fine-tuning; a step takes `prompts_per_step` conversations, and the loss is a mean
    over what the assistant wrote in them. Without `data`, worked answers of `data.train` are
    learned."""

    patience: Whole = 0
    """Stop after this many evaluations without a lower held-out loss; 0 never does."""
    column: Name | None = None
    """Without `data`, the column with the worked answers; None takes `data.answer_column`."""
    style: Name = "as_written"
    """How they become completions: "as_written", or "gsm8k_tagged" for GSM8K in tag format."""
    limit: Count | None = None
    """Use only this many worked answers; None uses all."""


class WarmupSettings(Section):
    """Supervised training on worked answers before RL, for a model without the format."""

    steps: Count = 200
    """Optimiser steps."""
    batch_size: Count = 32
    """Worked answers per step."""
    learning_rate: Positive = 5e-4
    """Peak learning rate; a linear rise leads to it and a cosine down from it."""
    rise_steps: Whole = 20
    """Optimiser steps of that rise."""
    limit: Count | None = None
    """Use only this many worked answers; None uses all."""
    column: Name | None = None
    """Column with the worked answers; None takes `data.answer_column`."""
    style: Name = "as_written"
    """How they become completions: "as_written", or "gsm8k_tagged" for GSM8K in tag format."""
