"""Settings of training on data instead of rollouts, such as the section [preference]."""

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
    """The data set of a run, and the handling of rows that cannot be used."""

    data: Location | None = None
    """File, folder or hub name of the data."""
    split: Name = "train"
    """Split of a folder or hub data set."""
    revision: Name | None = None
    """Commit, tag or branch of a hub data set."""
    epochs: Positive | None = None
    """Passes over the data, instead of `steps`; None trains for `steps`."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the prompts that are used for evaluation and not for training."""
    max_tokens: Count | None = None
    """Maximum length of prompt and answer in tokens; None is the model's context length."""
    too_long: Literal["refuse", "drop", "cut"] = "drop"
    """Handling of longer answers: stop with an error ("refuse"), leave them out ("drop"), or cut
    their end ("cut"); the last two are counted."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Handling of rows without information, such as equal answers: stop with an error ("refuse"),
    or leave them out and count them ("drop")."""


class PreferenceSettings(DatasetSettings):
    """Training on preferences; a step takes `prompts_per_step` prompts with all their answers.
    Without `data`, the model's own answers are sampled and scored by the rewards."""

    loss: dict[str, Any] = {"name": "logistic"}
    """Preference loss and its settings: `{ name = "logistic", beta = 0.1 }`."""
    nll: NonNegative = 0.0
    """Weight of −log π per token of the chosen answer, which keeps that answer likely."""
    prompts: Count = 256
    """Without `data`: number of training prompts, with `group_size` sampled answers each."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs formed from scored answers: the best with the worst, or all with different scores."""
    online: bool = False
    """Form pairs from the rollouts of every step of `groupwise train`, instead of once before the
    first step. The algorithm then contributes only its filter."""


class RewardModelSettings(DatasetSettings):
    """Training a reward model; a step takes `prompts_per_step` prompts with all their answers.
    Without `data`, answers of the model are sampled and ranked by the rewards of the recipe."""

    loss: dict[str, Any] = {"name": "bradley_terry"}
    """Ranking loss and its settings: `{ name = "bradley_terry", center = 0.01 }`."""
    prompts: Count = 512
    """Without `data`: number of prompts, with `group_size` sampled answers each. With a generator
    ("word_problem_rankings", "word_problem_slips", "word_problem_steps"): number of prompts that
    it makes."""
    label_noise: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the training rankings that are reversed, to study wrong labels."""
    step_separator: Annotated[str, Field(min_length=1)] | None = None
    """Text between the steps of an answer. If set, the data needs a label for each step (`prompt`,
    `completions`, `labels`), and the model is a token classifier: a process reward model."""


class SftSettings(DatasetSettings):
    """Supervised fine-tuning; a step takes `prompts_per_step` conversations, and the loss is the
    mean over the tokens of the assistant. Without `data`, the model learns the worked answers of
    `data.train`."""

    patience: Whole = 0
    """Stop after this many consecutive evaluations without a lower held-out loss; 0 never stops."""
    column: Name | None = None
    """Without `data`: column with the worked answers; None uses `data.answer_column`."""
    style: Name = "as_written"
    """Format of the completions: "as_written", or "gsm8k_tagged" for GSM8K in tag format."""
    limit: Count | None = None
    """Maximum number of worked answers; None uses all."""


class WarmupSettings(Section):
    """Supervised training on worked answers before RL, for a model without the format."""

    steps: Count = 200
    """Number of optimizer steps."""
    batch_size: Count = 32
    """Worked answers per step."""
    learning_rate: Positive = 5e-4
    """Peak learning rate, reached by a linear warm-up and followed by a cosine decay."""
    rise_steps: Whole = 20
    """Optimizer steps of the linear warm-up."""
    limit: Count | None = None
    """Maximum number of worked answers; None uses all."""
    column: Name | None = None
    """Column with the worked answers; None uses `data.answer_column`."""
    style: Name = "as_written"
    """Format of the completions: "as_written", or "gsm8k_tagged" for GSM8K in tag format."""
