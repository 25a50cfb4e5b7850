"""Training process reward models: a token classifier learns a label for every step."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from groupwise.algorithms.losses import FunctionObjective
from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.evaluation import Estimate, prompt_mean
from groupwise.models import Policy
from groupwise.prompts.generators import word_problem_rankings
from groupwise.prompts.preferences import Comparison, messages_of
from groupwise.prompts.rows import Row, read_rows
from groupwise.rewards.steps import step_ends
from groupwise.settings import RewardModelSettings
from groupwise.training.offline.encoding import Encoded, batch_of, encode
from groupwise.training.offline.run import (
    Job,
    RunOptions,
    Workplace,
    held_out_split,
    make_learner,
    run_on_data,
    scorer_to_train,
)
from groupwise.training.offline.trainer import evaluation_row
from groupwise.types import Batch, Metrics, Objective, Outputs, Prompt, Update
from groupwise.updates import Score, TorchLearner

EVALUATED = 64
"""Answers of a pass over held-out data."""


@dataclass(frozen=True, kw_only=True)
class Stepwise:
    """An answer in steps with their labels.

    Attributes:
        prompt: the prompt.
        steps: texts.
        labels: of every step, from 0 (wrong) to 1 (right).
    """

    prompt: Prompt
    steps: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A prompt with its answers as tokens.

    Attributes:
        item: prompt and answers.
        ends: of every answer, the last token of each step.
        labels: of every answer, those of its steps.
    """

    item: Encoded
    ends: tuple[tuple[int, ...], ...]
    labels: tuple[tuple[float, ...], ...]


def read_steps(
    source: str | Sequence[Row], *, split: str = "train", revision: str | None = None
) -> list[Stepwise]:
    """Rows in TRL's stepwise format: `prompt`, `completions` (the steps), `labels`.

    Args:
        source: as `read_rows` takes it, or rows.
        split: of a folder or hub data set.
        revision: commit, tag or branch of a hub data set.

    Raises:
        UsageError: a row that cannot be used, with its number.

    Example:
        >>> (found,) = read_steps([{"prompt": "1+1=", "completions": ["2"], "labels": [True]}])
        >>> found.steps, found.labels
        (('2',), (1.0,))
    """
    rows = read_rows(source, split=split, revision=revision) if isinstance(source, str) else source
    name = os.path.basename(source) if isinstance(source, str) else "steps"
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(_stepwise(row, f"row {number}"))
        except UsageError as error:
            raise UsageError(f"{name}, row {number}: {error}") from None
    if not found:
        raise UsageError(f"{name}: contains no rows.")
    return found


def _stepwise(row: Row, name: str) -> Stepwise:
    for column in ("prompt", "completions", "labels"):
        if row.get(column) is None:
            raise UsageError(
                f"has no {column!r}; with reward_model.step_separator every row has prompt, "
                "completions (the steps) and labels (one for each)."
            )
    steps, labels, prompt = row["completions"], row["labels"], row["prompt"]
    listed = isinstance(steps, list | tuple) and steps
    if not listed or not all(isinstance(s, str) and s.strip() for s in steps):
        raise UsageError("completions: must be a list of texts, one for each step, none empty.")
    if not isinstance(labels, list | tuple):
        raise UsageError(f"labels = {labels!r}: must be a list, with one label for each step.")
    if len(labels) != len(steps):
        count = len(labels)
        raise UsageError(f"labels: there are {count}, and {len(steps)} steps; each step needs one.")
    for label in labels:
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise UsageError(f"labels: {label!r} must be true, false, or a number from 0 to 1.")
    if isinstance(prompt, str):
        asked = Prompt(id=name, text=prompt, answer=None)
    else:
        asked = Prompt(id=name, messages=messages_of(prompt, "prompt"), answer=None)
    return Stepwise(prompt=asked, steps=tuple(steps), labels=tuple(float(x) for x in labels))


def encode_steps(
    rows: Sequence[Stepwise], policy: Policy, settings: RewardModelSettings
) -> tuple[list[Labelled], Mapping[str, int]]:
    """Prompts with the tokens of their answers, and the last token of every step; and answers left
    out, by reason. Rows of one prompt become one item, equal answers one answer.

    Raises:
        UsageError: a step holds the separator, or an answer is too long and is not to be dropped.
    """
    separator = settings.step_separator
    assert separator is not None
    answers: dict[str, dict[str, tuple[float, ...]]] = {}
    prompts: dict[str, Prompt] = {}
    for row in rows:
        key = repr((row.prompt.text, row.prompt.messages))
        prompts.setdefault(key, row.prompt)
        labels = answers.setdefault(key, {}).setdefault(separator.join(row.steps), row.labels)
        if labels != row.labels:
            raise UsageError(
                f"reward_model.data, {row.prompt.id}: gives the answer of an earlier row other "
                "labels; remove one of the two rows."
            )
    known = {prompts[key].id: own for key, own in answers.items()}
    comparisons = [
        Comparison(
            prompt=prompt,
            answers=tuple(answers[key]),
            labels=(None,) * len(answers[key]),
            scores=(math.nan,) * len(answers[key]),
        )
        for key, prompt in prompts.items()
    ]
    data = encode(comparisons, policy, settings, where="reward_model")
    found = []
    for item in data.items:
        name, texts = item.comparison.prompt.id, [str(a) for a in item.comparison.answers]
        labels = tuple(known[name][text] for text in texts)
        ends = tuple(tuple(step_ends(a, separator, policy.tokenizer)) for a in item.answers)
        for own, given in zip(ends, labels, strict=True):
            if len(own) != len(given):
                raise UsageError(
                    f"reward_model.step_separator = {separator!r}: an answer of {name} has "
                    f"{len(given)} labels, but the separator makes {len(own)} steps of it; no "
                    "step may contain the separator, and no answer may be cut."
                )
        found.append(Labelled(item=item, ends=ends, labels=labels))
    return found, data.dropped


def step_objective(outputs: Outputs, batch: Batch) -> Tensor:
    """Binary cross-entropy of the value at the last token of each step; 0 elsewhere."""
    labels = batch.columns["labels"]
    known = batch.mask & ~torch.isnan(labels)
    values = outputs["values"][:, : labels.shape[1]]
    target = torch.where(known, labels, 0).to(values)
    return torch.where(known, binary_cross_entropy_with_logits(values, target, reduction="none"), 0)


@dataclass(frozen=True, kw_only=True)
class ProcessRewardTask:
    """Learning to score steps.

        L = −mean over steps of [y log σ(v) + (1 − y) log(1 − σ(v))],   v at the step's last token

    Attributes:
        items, held_out: what is trained on and what is evaluated.
    """

    learner: TorchLearner
    items: Sequence[Labelled]
    held_out: Sequence[Labelled]

    def batch(self, items: Sequence[int]) -> tuple[Batch, Objective]:
        """Some answers, and the mean loss of their steps."""
        return labelled_batch([self.items[i] for i in items]), FunctionObjective(
            loss=step_objective, needs=frozenset({"values"})
        )

    def metrics(self, batch: Batch, objective: Objective, update: Update) -> Metrics:
        """The loss alone: what was scored before the step is not kept."""
        return {}

    def evaluate(self) -> list[dict[str, Any]]:
        """Figures of the held-out answers."""
        if not self.held_out:
            return []
        figures = step_figures(self.held_out, self.chances(self.held_out))
        return [evaluation_row("steps", figures, score=figures["step_accuracy"].value)]

    def chances(self, items: Sequence[Labelled]) -> list[list[list[float]]]:
        """The probability that each step of each answer to some prompts is right."""
        found: list[list[list[float]]] = []
        for first in range(0, len(items), EVALUATED):
            part = items[first : first + EVALUATED]
            values = self.learner.evaluate(labelled_batch(part), {"values"})["values"].float()
            chances = values.sigmoid().cpu()
            rows = iter(chances)
            found += [[next(rows)[list(ends)].tolist() for ends in one.ends] for one in part]
        return found


def labelled_batch(items: Sequence[Labelled]) -> Batch:
    """Answers as rows, each prompt once, with labels at the last tokens of steps (NaN elsewhere)
    and the same weight for every step."""
    batch = batch_of([one.item for one in items])
    labels = torch.full(batch.mask.shape, math.nan)
    answers = [pair for one in items for pair in zip(one.ends, one.labels, strict=True)]
    for row, (ends, own) in enumerate(answers):
        labels[row, list(ends)] = torch.tensor(own)
    known = ~torch.isnan(labels)
    columns = {**batch.columns, "labels": labels}
    return replace(batch, weight=known / known.sum(), columns=columns)


def step_figures(
    items: Sequence[Labelled], chances: Sequence[Sequence[Sequence[float]]]
) -> dict[str, Estimate]:
    """How probabilities agree with the labels of steps, a label of at least .5 counting as right.

    step_accuracy    share of the steps on the right side of .5
    first_error      share of the answers with an error whose first step below .5 is the first wrong
    answer_accuracy  share of the answers whose smallest probability says whether all is right

    Each is a mean over prompts, whose interval resamples prompts.

    Args:
        items: prompts with the labels of their answers.
        chances: of every step of every answer.
    """
    steps, firsts, wholes = [], [], []
    for one, own in zip(items, chances, strict=True):
        right = [[x >= 0.5 for x in answer] for answer in one.labels]
        said = [[x >= 0.5 for x in answer] for answer in own]
        both = list(zip(right, said, strict=True))
        steps.append(float(np.mean([a == b for r, s in both for a, b in zip(r, s, strict=True)])))
        wholes.append(float(np.mean([all(r) == all(s) for r, s in both])))
        wrong = [not all(s) and s.index(False) == r.index(False) for r, s in both if not all(r)]
        if wrong:
            firsts.append(float(np.mean(wrong)))
    found = {"step_accuracy": prompt_mean(np.array(steps))}
    if firsts:
        found["first_error"] = prompt_mean(np.array(firsts))
    return found | {"answer_accuracy": prompt_mean(np.array(wholes))}


def train_process_reward_model(
    config: Config, settings: RewardModelSettings, **options: Unpack[RunOptions]
) -> Path:
    """Train a process reward model; the run directory, whose `final/`
    `AutoModelForTokenClassification` loads.

    Args:
        settings: the section [reward_model], with a `step_separator`.
        options: as `train_config` has them.

    Raises:
        UsageError: a setting or a row of the data cannot be used; nothing was started.
    """
    if settings.data is None:
        raise UsageError(
            "reward_model.data: must be given with reward_model.step_separator; rewards cannot "
            "provide labels of steps."
        )
    for name in ("loss", "label_noise"):
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise UsageError(
                f"reward_model.{name} = {getattr(settings, name)!r}: applies to rankings only; "
                "remove it, or reward_model.step_separator."
            )
    if settings.data == word_problem_rankings.STEPS:
        rows = read_steps(list(word_problem_rankings.step_rows(settings.prompts, seed=config.seed)))
    else:
        rows = read_steps(settings.data, split=settings.split, revision=settings.revision)
    return run_on_data(
        config,
        settings,
        lambda workplace: _job(workplace, settings, rows),
        name="steps",
        method="process reward modelling",
        load=lambda c, p: scorer_to_train(c, p, kind="token"),
        learner="reward_model",
        **options,
    )


def _job(workplace: Workplace, settings: RewardModelSettings, rows: Sequence[Stepwise]) -> Job:
    items, dropped = encode_steps(rows, workplace.policy, settings)
    answers = [labels for one in items for labels in one.labels]
    said = "".join(f"; {count} × {reason}" for reason, count in dropped.items())
    workplace.progress.log(
        f"data: {len(items)} prompts, {len(answers)} answers, {sum(map(len, answers))} steps{said}"
    )
    train, held_out = held_out_split(items, settings.held_out, seed=workplace.config.seed)
    head = Score(workplace.policy.model, reads={"written"})
    learner = make_learner(workplace, settings, len(train), head=head)
    return Job(
        task=ProcessRewardTask(learner=learner, items=train, held_out=held_out),
        learner=learner,
        items=train,
    )
