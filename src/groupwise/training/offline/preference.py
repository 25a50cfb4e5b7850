"""Preference training: a registered function over pairs of answers, or over labelled answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.algorithms.losses import REFERENCED, PreferenceObjective, preference_figures
from groupwise.config import Config
from groupwise.config.preferences import preference_function
from groupwise.errors import UsageError
from groupwise.evaluation import Estimate, prompt_mean
from groupwise.prompts.preferences import Comparison, Comparisons, read_comparisons
from groupwise.registry import BoundFunction
from groupwise.settings import PreferenceSettings
from groupwise.training.offline.encoding import Encoded, batch_of, encode
from groupwise.training.offline.reference import (
    Reference,
    model_digest,
    reference_of,
    sequence_sums,
)
from groupwise.training.offline.run import (
    Job,
    RunOptions,
    Workplace,
    generation,
    held_out_split,
    make_learner,
    own_answers,
    run_on_data,
)
from groupwise.training.offline.trainer import evaluation_row
from groupwise.types import Batch, Metrics, Objective, Outputs, Update
from groupwise.updates import TorchLearner

EVALUATED = 64
"""Prompts of a pass over held-out data."""


@dataclass(frozen=True, kw_only=True)
class PreferenceTask:
    """Learning from preferences.

    Attributes:
        items, held_out: what is trained on and what is evaluated.
        reference, held_out_reference: Σ log π_ref of their answers; None where the function reads
            none.
        mismatched: for KTO's estimate of the KL, every prompt with an answer to another one, and
            its reference.
        generate: evaluates answers that the model generates; its rows come first.
    """

    learner: TorchLearner
    function: BoundFunction
    settings: PreferenceSettings
    items: Sequence[Encoded]
    held_out: Sequence[Encoded]
    reference: Reference | None = None
    held_out_reference: Reference | None = None
    mismatched: tuple[Sequence[Encoded], Reference] | None = None
    generate: Callable[[], Mapping[str, Any]] | None = None

    @property
    def unpaired(self) -> bool:
        """Whether single answers are judged."""
        return "delta" in self.function.inputs

    def batch(self, items: Sequence[int]) -> tuple[Batch, Objective]:
        """All answers of some prompts, and the mean loss of their pairs."""
        made = self._batch([self.items[i] for i in items], self.reference, items)
        if self.mismatched is None:
            return made
        batch, objective = made
        others, reference = self.mismatched
        z = sequence_sums(self.learner, batch_of([others[i] for i in items])) - reference.of(items)
        return batch, replace(objective, kl=max(0.0, float(z.mean())))

    def _batch(
        self, chosen: Sequence[Encoded], reference: Reference | None, items: Sequence[int]
    ) -> tuple[Batch, PreferenceObjective]:
        pairs = pairs_of(chosen)
        rows = sum(len(item.answers) for item in chosen)
        columns = {"ref": torch.zeros(rows) if reference is None else reference.of(items)}
        if self.unpaired:
            labels = [label for item in chosen for label in item.comparison.labels]
            columns["label"] = torch.tensor([float(bool(label)) for label in labels])
        batch = batch_of(chosen, count=rows if self.unpaired else len(pairs), columns=columns)
        objective = PreferenceObjective(function=self.function, pairs=pairs, nll=self.settings.nll)
        return batch, objective

    def metrics(self, batch: Batch, objective: Objective, update: Update) -> Metrics:
        """How much more likely chosen and rejected answers have become, and how likely they are."""
        assert isinstance(objective, PreferenceObjective)
        found = preference_figures(self.function, batch, objective, update.logp)
        if self.unpaired:
            found["kl"] = torch.tensor([objective.kl])
        return {name: float(values.mean()) for name, values in found.items() if len(values)}

    def evaluate(self) -> list[dict[str, Any]]:
        """Generated answers first, then likelihoods of held-out pairs."""
        rows = [] if self.generate is None else [dict(self.generate())]
        if self.held_out:
            figures = self._held_out_figures()
            accuracy = figures.get("pair_accuracy")
            score = accuracy.value if accuracy else -figures["loss"].value
            rows.append(evaluation_row("preferences", figures, score=score))
        return rows

    def _held_out_figures(self) -> dict[str, Estimate]:
        """Means over held-out prompts of the means over their pairs."""
        by_prompt: dict[str, list[float]] = {}
        for first in range(0, len(self.held_out), EVALUATED):
            places = list(range(first, min(first + EVALUATED, len(self.held_out))))
            items = [self.held_out[i] for i in places]
            batch, objective = self._batch(items, self.held_out_reference, places)
            logp = self.learner.evaluate(batch, {"logp"})["logp"]
            losses = objective(Outputs(logp=logp), batch)
            for name, values, owner in self._by_prompt(batch, objective, logp, losses):
                for prompt in range(len(items)):
                    own = values[owner == prompt]
                    if len(own):
                        by_prompt.setdefault(name, []).append(float(own.mean()))
        return {name: prompt_mean(np.array(values)) for name, values in by_prompt.items()}

    def _by_prompt(
        self, batch: Batch, objective: PreferenceObjective, logp: Tensor, losses: Tensor
    ) -> list[tuple[str, Tensor, Tensor]]:
        """Figures with the prompt of each value."""
        if self.unpaired:
            return [("loss", losses, batch.group)]
        owner = batch.group[objective.pairs[:, 0]]
        pairs = torch.bincount(objective.pairs[:, 0], minlength=len(losses)).clamp(min=1)
        each = (losses / pairs)[objective.pairs[:, 0]]
        found = [("loss", each, owner)]
        return found + [
            (name, values, owner)
            for name, values in preference_figures(self.function, batch, objective, logp).items()
        ]


def pairs_of(items: Sequence[Encoded]) -> Int[Tensor, "pair 2"]:
    """Rows (better, worse) of all pairs of some items, in a batch of all their answers."""
    pairs, start = [], 0
    for item in items:
        for ranking in item.comparison.rankings:
            pairs += [(start + a, start + b) for a, b in ranking.pairs]
        start += len(item.answers)
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)


def mismatched(items: Sequence[Encoded]) -> list[Encoded]:
    """Every prompt with the first answer to the next one."""
    return [
        replace(item, answers=(items[(place + 1) % len(items)].answers[0],))
        for place, item in enumerate(items)
    ]


def prefer(
    config: Config,
    **options: Unpack[RunOptions],
) -> Path:
    """Train on preferences with the section [preference] of a configuration.

    Args:
        options: as `train_config` has them.

    Returns:
        The run directory; the model is in `final/`.

    Raises:
        UsageError: a setting or a row of the data cannot be used; nothing was started.
    """
    settings = config.preference
    if settings is None:
        raise UsageError("preference: is not set; add a section [preference].")
    if settings.online:
        raise UsageError(
            "preference.online = true: pairs are formed during training; use groupwise train."
        )
    function = preference_function(settings)
    if settings.data is None and not config.rewards:
        raise UsageError(
            "preference.data: must be set, because there are no rewards to form pairs of the "
            "model's own answers; set it, or add a section [[rewards]]."
        )
    read = None
    if settings.data is not None:
        read = read_comparisons(
            settings.data,
            split=settings.split,
            revision=settings.revision,
            bad_rows=settings.bad_rows,
        )
    return run_on_data(
        config,
        settings,
        lambda workplace: _job(workplace, settings, function, read),
        name=function.spec.name,
        method="preference optimization",
        **options,
    )


def _job(
    workplace: Workplace,
    settings: PreferenceSettings,
    function: BoundFunction,
    read: Comparisons | None,
) -> Job:
    config, policy, progress = workplace.config, workplace.policy, workplace.progress
    if read is None:
        read = read_comparisons(_own_pairs(workplace, settings))
    data = encode(read.items, policy, settings, where="preference", dropped=read.dropped)
    progress.log(f"data: {data}")
    check_data(data.items, function)
    train, held_out = held_out_split(data.items, settings.held_out, seed=config.seed)
    learner = make_learner(workplace, settings, len(train))
    digest = f"{data.digest()} {model_digest(learner)} {settings.held_out} {config.seed}"

    def reference(items: Sequence[Encoded], name: str) -> Reference | None:
        if REFERENCED.isdisjoint(function.inputs) or not items:
            return None
        return reference_of(
            items,
            learner,
            workplace.run_log.folder,
            digest=digest,
            name=name,
            recall=workplace.resumed,
            progress=progress,
        )

    others = mismatched(train) if "kl" in function.inputs else []
    z = reference(others, "reference-kl")
    task = PreferenceTask(
        learner=learner,
        function=function,
        settings=settings,
        items=train,
        held_out=held_out,
        reference=reference(train, "reference"),
        held_out_reference=reference(held_out, "reference-held-out"),
        mismatched=None if z is None else (others, z),
        generate=generation(workplace, learner),
    )
    return Job(task=task, learner=learner, items=train)


def _own_pairs(workplace: Workplace, settings: PreferenceSettings) -> list[dict[str, Any]]:
    policy, engine = workplace.policy, workplace.engine
    assert engine is not None
    answers = own_answers(workplace, policy, engine, prompts=settings.prompts)
    return answers.pairs(settings.pairs)


def check_data(items: Sequence[Encoded], function: BoundFunction) -> None:
    """Raise an error for data that does not fit the function.

    Raises:
        UsageError: no pairs, or answers without a label.
    """
    name = function.spec.name
    if "delta" in function.inputs:
        if any(label is None for item in items for label in item.comparison.labels):
            raise UsageError(
                f"preference.loss.name = {name!r}: needs a label for every answer, but the data "
                "has rankings. Use 'logistic', or data with prompt, completion and label."
            )
        for item in items:
            _check_labels(item.comparison, name)
    elif not all(item.comparison.rankings for item in items):
        raise UsageError(
            f"preference.loss.name = {name!r}: needs pairs, but the data has single answers with "
            "labels. Use 'kto', or data with chosen and rejected."
        )


def _check_labels(comparison: Comparison, name: str) -> None:
    """Raise an error for an answer that is wanted in one row and not in another."""
    for better, worse in (pair for ranking in comparison.rankings for pair in ranking.pairs):
        for place, label in ((better, True), (worse, False)):
            if comparison.labels[place] is not label:
                raise UsageError(
                    f"preference.loss.name = {name!r}: needs one label for every answer, but "
                    f"{str(comparison.answers[place])[:60]!r} is chosen in one row and rejected in "
                    "another. Use 'logistic', or remove one of the rows."
                )
