"""Models measured on the held-out prompts of a recipe, and compared on the same items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.evaluation import (
    FigureTable,
    figure_table,
    item_verdict,
    paired_items,
)
from groupwise.evaluation.measure import Measurement, measure
from groupwise.execution.local import best_device
from groupwise.models import load_policy
from groupwise.rollouts import make_engine
from groupwise.run import load_eval, make_scorer, rendered


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What some models can do.

    Attributes:
        measurements: answers and their correctness by the short name of the model.
        split: the part of the data they were measured on.
        verdicts: a sentence per model on how its greedy answers compare with those of the last one.
    """

    measurements: Mapping[str, Measurement]
    split: str
    verdicts: tuple[str, ...]

    def table(self) -> FigureTable:
        """Greedy, sampled and pass@k accuracy and reward of every model, with intervals."""
        return figure_table(
            {model: [{self.split: m.figures}] for model, m in self.measurements.items()}
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {
            "split": self.split,
            "models": {
                model: {name: figure.as_dict() for name, figure in m.figures.items()}
                for model, m in self.measurements.items()
            },
            "verdicts": list(self.verdicts),
        }


def assess(config: Config, models: Sequence[str]) -> Assessment:
    """Measure models with the prompts, rewards and sampling of a recipe.

    All of them answer the same prompts with the same random numbers.

    Args:
        config: of the recipe; its `evaluation` section says how many prompts and samples.
        models: folders, hub names or "bundled"; the last one is what the others are compared with.

    Raises:
        UsageError: no held-out prompts, a model twice, or one that cannot be loaded.
    """
    if len(set(models)) < len(models):
        raise UsageError(f"models = {', '.join(models)}: must be different ones.")
    prompts = load_eval(config)
    if not prompts:
        raise UsageError(
            f"data.eval: must be given, because {config.data.train} has no split to evaluate on."
        )
    measurements = {
        name: _measured(config, model, prompts)
        for name, model in zip(short_names(models), models, strict=True)
    }
    *others, last = measurements
    return Assessment(
        measurements=measurements,
        split=config.data.eval_split,
        verdicts=tuple(_verdict(model, last, measurements) for model in others),
    )


def short_names(models: Sequence[str]) -> list[str]:
    """Names of models for a table: the last part of each path, with its run for `final` and `best`.

    Example:
        >>> short_names(["runs/a/final", "runs/b/final", "org/model", "bundled"])
        ['a/final', 'b/final', 'model', 'bundled']
        >>> short_names(["x/model", "y/model"])
        ['x/model', 'y/model']
    """
    short = []
    for model in models:
        parts = Path(model).parts
        short.append("/".join(parts[-2:] if parts[-1:] in (("final",), ("best",)) else parts[-1:]))
    return short if len(set(short)) == len(models) else list(models)


def _measured(config: Config, model: str, prompts: Sequence[Any]) -> Measurement:
    policy = load_policy(
        model, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
    )
    policy.model.to(best_device())
    ready = rendered(config, policy, prompts)
    scorer = make_scorer(config)
    try:
        return measure(
            make_engine(policy, name=config.engine.name, max_rows=config.engine.max_rows),
            scorer,
            ready.prompts,
            ready.tokens,
            sampling=config.sampling.to_sampling(),
            samples=config.evaluation.samples,
            seed=config.seed,
        )
    finally:
        scorer.close()


def _verdict(model: str, against: str, measurements: Mapping[str, Measurement]) -> str:
    """Greedy answers of two models to the prompts that both were judged on."""
    first, second = measurements[model].greedy, measurements[against].greedy
    if len(first) != len(second):
        return f"{model} and {against} dropped different prompts, so they cannot be paired."
    both = ~(np.isnan(first) | np.isnan(second))
    if not both.any():
        return f"No part of the reward says whether the answers of {model} are correct."
    pair = paired_items(first[both].tolist(), second[both].tolist())
    return item_verdict(model, against, pair)
