"""Training reward models: on pairs, on rankings of several answers, or on scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from groupwise.algorithms.losses import RankingObjective, final_scores
from groupwise.algorithms.rankings import RANKINGS
from groupwise.config import Config
from groupwise.config.connect import configured_engine, load_configured
from groupwise.errors import UsageError
from groupwise.evaluation import Estimate
from groupwise.prompts.generators import word_problem_rankings
from groupwise.prompts.preferences import Comparisons, read_comparisons
from groupwise.registry import BoundFunction, FunctionSpec
from groupwise.settings import RewardModelSettings
from groupwise.training.offline.encoding import Encoded, batch_of, encode
from groupwise.training.offline.process_reward_model import train_process_reward_model
from groupwise.training.offline.ranking_figures import ranking_figures
from groupwise.training.offline.run import (
    Job,
    RunOptions,
    Workplace,
    held_out_split,
    make_learner,
    own_answers,
    run_on_data,
    scorer_to_train,
)
from groupwise.training.offline.trainer import evaluation_row
from groupwise.types import Batch, Metrics, Objective, Update
from groupwise.updates import Score, TorchLearner

EVALUATED = 64
"""Prompts of a pass over held-out data."""


def ranking_function(settings: RewardModelSettings) -> BoundFunction:
    """The function that a section names, with its settings.

    Raises:
        UsageError: an unknown name or setting.
    """
    given = dict(settings.loss)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise UsageError(f"reward_model.loss.name = {name!r}: must be the name of a function.")
    return RANKINGS.bind(FunctionSpec(name=name, settings=given), where="reward_model.loss")


@dataclass(frozen=True, kw_only=True)
class RewardModelTask:
    """Learning to score answers.

    Attributes:
        items, held_out: what is trained on and what is evaluated.
        flipped: rankings of the items whose order is reversed, as (item, ranking).
    """

    learner: TorchLearner
    function: BoundFunction
    items: Sequence[Encoded]
    held_out: Sequence[Encoded]
    flipped: frozenset[tuple[int, int]] = frozenset()

    def batch(self, items: Sequence[int]) -> tuple[Batch, Objective]:
        """All answers of some prompts, and the mean loss of their rankings."""
        chosen = [self.items[i] for i in items]
        rankings, targets, start = [], [], 0
        for place, item in zip(items, chosen, strict=True):
            scores = item.comparison.scores
            if "targets" in self.function.inputs:
                rankings.append(
                    (tuple(range(start, start + len(scores))), (0.0,) * len(scores), 0.0)
                )
                targets.append(scores)
            else:
                for number, ranking in enumerate(item.comparison.rankings):
                    turned = -1 if (place, number) in self.flipped else 1
                    rows = tuple(start + a for a in ranking.answers)
                    rankings.append(
                        (rows, tuple(turned * r for r in ranking.ranks), ranking.margin)
                    )
                    targets.append((float("nan"),) * len(rows))
            start += len(item.answers)
        longest = max(len(rows) for rows, _, _ in rankings)
        objective = RankingObjective(
            function=self.function,
            rows=_padded([rows for rows, _, _ in rankings], longest, -1).long(),
            ranks=_padded([ranks for _, ranks, _ in rankings], longest, float("inf")).float(),
            margins=torch.tensor([float(margin) for _, _, margin in rankings]),
            targets=_padded(targets, longest, float("nan")),
        )
        return batch_of(chosen, count=len(rankings)), objective

    def metrics(self, batch: Batch, objective: Objective, update: Update) -> Metrics:
        """The loss alone: what was scored before the step is not kept."""
        return {}

    def scores(self, items: Sequence[Encoded]) -> list[list[float]]:
        """The score of every answer of some items."""
        found: list[list[float]] = []
        for first in range(0, len(items), EVALUATED):
            part = items[first : first + EVALUATED]
            batch = batch_of(part)
            values = final_scores(self.learner.evaluate(batch, {"values"})["values"], batch)
            sizes = [len(item.answers) for item in part]
            found += [each.tolist() for each in values.split(sizes)]
        return found

    def evaluate(self) -> list[dict[str, Any]]:
        """Figures of the held-out prompts, as a whole and by source."""
        if not self.held_out:
            return []
        scores = self.scores(self.held_out)
        figures = ranking_figures(self.held_out, scores)
        rows = [_row("preferences", figures)]
        sources = [item.comparison.source for item in self.held_out]
        for source in sorted({s for s in sources if s is not None}):
            own = [place for place, s in enumerate(sources) if s == source]
            part = [self.held_out[i] for i in own], [scores[i] for i in own]
            rows.append(_row(f"preferences, {source}", ranking_figures(*part)))
        return rows


def _row(split: str, figures: Mapping[str, Estimate]) -> dict[str, Any]:
    decides = figures.get("pair_accuracy")
    score = decides.value if decides else -figures["squared_error"].value
    return evaluation_row(split, figures, score=score)


def _padded(rows: Sequence[Sequence[float]], longest: int, value: float) -> Tensor:
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def train_reward_model(
    config: Config,
    **options: Unpack[RunOptions],
) -> Path:
    """Train a reward model with the section [reward_model] of a configuration.

    Args:
        options: as `train_config` has them.

    Returns:
        The run directory; the model is in `final/`, and `AutoModelForSequenceClassification` loads
        it.

    Raises:
        UsageError: a setting or a row of the data cannot be used; nothing was started.
    """
    settings = config.reward_model
    if settings is None:
        raise UsageError("reward_model: is not set; add a section [reward_model].")
    if settings.step_separator is not None:
        return train_process_reward_model(config, settings, **options)
    function = ranking_function(settings)
    if settings.data is None and not config.rewards:
        raise UsageError(
            "reward_model.data: must be set, because there are no rewards to rank answers of the "
            "model; set it, or add a section [[rewards]]."
        )
    read = None
    if settings.data in word_problem_rankings.RANKINGS:
        rows = word_problem_rankings.ranking_rows(
            settings.prompts, name=settings.data, seed=config.seed
        )
        read = read_comparisons(list(rows))
    elif settings.data is not None:
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
        method="reward modelling",
        load=scorer_to_train,
        learner="reward_model",
        **options,
    )


def _job(
    workplace: Workplace,
    settings: RewardModelSettings,
    function: BoundFunction,
    read: Comparisons | None,
) -> Job:
    config, progress = workplace.config, workplace.progress
    if read is None:
        read = read_comparisons(_own_rankings(workplace, settings))
    data = encode(
        read.items,
        workplace.policy,
        settings,
        where="reward_model",
        dropped=read.dropped,
        whole_turns=True,
    )
    progress.log(f"data: {data}")
    check_data(data.items, function)
    train, held_out = held_out_split(data.items, settings.held_out, seed=config.seed)
    head = Score(workplace.policy.model, reads={"after"})
    learner = make_learner(workplace, settings, len(train), head=head)
    task = RewardModelTask(
        learner=learner,
        function=function,
        items=train,
        held_out=held_out,
        flipped=flips(train, settings.label_noise, seed=config.seed),
    )
    return Job(task=task, learner=learner, items=train)


def check_data(items: Sequence[Encoded], function: BoundFunction) -> None:
    """Raise an error for data that does not fit the function.

    Raises:
        UsageError: no rankings, or no scores.
    """
    name = function.spec.name
    if "targets" in function.inputs:
        if any(np.isnan(item.comparison.scores).all() for item in items):
            raise UsageError(
                f"reward_model.loss.name = {name!r}: needs a score for every answer, but the data "
                "has none. Use 'bradley_terry', or data with completions and scores."
            )
    elif not all(item.comparison.rankings for item in items):
        raise UsageError(
            f"reward_model.loss.name = {name!r}: needs pairs or rankings, but the data has single "
            "answers. Use 'regression', or data with chosen and rejected."
        )


def flips(items: Sequence[Encoded], share: float, *, seed: int) -> frozenset[tuple[int, int]]:
    """Rankings, drawn by the seed, whose order is reversed."""
    places = [
        (item, ranking)
        for item, one in enumerate(items)
        for ranking in range(len(one.comparison.rankings))
    ]
    drawn = np.random.default_rng([seed, 2]).random(len(places)) < share
    return frozenset(place for place, turned in zip(places, drawn, strict=True) if turned)


def _own_rankings(workplace: Workplace, settings: RewardModelSettings) -> list[dict[str, Any]]:
    """Answers that the language model of the recipe samples, ranked by its rewards."""
    policy = load_configured(workplace.config)
    with closing(configured_engine(workplace.config, policy)) as engine:
        return own_answers(workplace, policy, engine, prompts=settings.prompts).rankings()
