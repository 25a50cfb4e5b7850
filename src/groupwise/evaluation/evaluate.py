"""Models measured on the held-out prompts of a recipe, and compared on the same items."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.config import Config
from groupwise.config.connect import best_device, configured_engine, make_scorer
from groupwise.config.data import load_eval, load_train, rendered
from groupwise.errors import UsageError
from groupwise.evaluation import (
    Estimate,
    FigureTable,
    figure_table,
    item_verdict,
    paired_items,
    prompt_mean,
)
from groupwise.evaluation.details import by_difficulty, details
from groupwise.evaluation.measure import Measurement, measure
from groupwise.evaluation.reflection import TRIGGERS, corrupted_items, recovery
from groupwise.models import Policy, load_policy
from groupwise.prompts.contamination import contamination_warning, shared_prompts
from groupwise.prompts.templates import Rendered, fix_variables
from groupwise.rewards import Scorer
from groupwise.rewards.extract import Style
from groupwise.types import Engine, Prompt


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What some models can do.

    Attributes:
        measurements: answers and their correctness by the short name of the model.
        figures: by model, then by section: the split of the data they were measured on, then its
            levels of difficulty and reflection, where there are any.
        split: the part of the data they were measured on.
        verdicts: a sentence per model on how its greedy answers compare with those of the last one.
        shared: how many of the prompts are training prompts; None where that cannot be known.
    """

    measurements: Mapping[str, Measurement]
    figures: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    split: str
    verdicts: tuple[str, ...]
    shared: int | None

    def table(self) -> FigureTable:
        """Every figure of every model, with intervals."""
        return figure_table({model: [sections] for model, sections in self.figures.items()})

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        plain = {
            model: {
                section: {name: figure.as_dict() for name, figure in figures.items()}
                for section, figures in sections.items()
            }
            for model, sections in self.figures.items()
        }
        return {
            "split": self.split,
            "models": {model: sections[self.split] for model, sections in plain.items()},
            "sections": plain,
            "verdicts": list(self.verdicts),
            "shared_prompts": self.shared,
        }


def evaluate(
    config: Config, models: Sequence[str], *, seeds: int = 1, reflection: bool = False
) -> EvaluationResult:
    """Measure models with the prompts, rewards and sampling of a recipe.

    All of them answer the same prompts with the same random numbers.

    Args:
        config: of the recipe; its `evaluation` section says how many prompts and samples.
        models: folders, hub names or "bundled"; the last one is what the others are compared with.
        seeds: number of sampling seeds, counted up from the recipe's.
        reflection: whether to measure recovery from worked solutions with an error in them.

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
    shared = _shared(config, prompts)
    if shared:
        warnings.warn(contamination_warning(shared, len(prompts)), stacklevel=2)
    measurements: dict[str, Measurement] = {}
    figures: dict[str, Mapping[str, Mapping[str, Estimate]]] = {}
    for name, model in zip(short_names(models), models, strict=True):
        measurements[name], figures[name] = _measured(
            config, model, prompts, seeds=seeds, reflection=reflection
        )
    *others, last = measurements
    return EvaluationResult(
        measurements=measurements,
        figures=figures,
        split=config.data.eval_split,
        verdicts=tuple(_verdict(model, last, measurements) for model in others),
        shared=shared,
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


def _measured(
    config: Config, model: str, prompts: Sequence[Prompt], *, seeds: int, reflection: bool
) -> tuple[Measurement, dict[str, dict[str, Estimate]]]:
    """What a model answers, and the figures of that by section."""
    policy = load_policy(
        model, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
    )
    fix_variables(policy.tokenizer, config.data.chat_template_kwargs)
    policy.model.to(best_device())
    ready = rendered(config, policy, prompts)
    with (
        closing(make_scorer(config)) as scorer,
        closing(configured_engine(config, policy)) as engine,
    ):
        measured = measure(
            engine,
            scorer,
            ready.prompts,
            ready.tokens,
            sampling=config.sampling.to_sampling(),
            samples=config.evaluation.samples,
            seed=config.seed,
            seeds=seeds,
        )
        style = _style(config)
        sections = {config.data.eval_split: details(measured, ready.prompts, style=style)}
        for level, places in by_difficulty(ready.prompts).items():
            sections[level] = _brief_figures(measured.part(places))
        if reflection:
            sections |= _reflection_figures(config, policy, ready, engine, scorer)
        return measured, sections


def _brief_figures(measured: Measurement) -> dict[str, Estimate]:
    """Figures of a part of the prompts."""
    lengths = {"length": prompt_mean(measured.lengths)}
    return {k: v for k, v in measured.figures.items() if k != "reward"} | lengths


def _reflection_figures(
    config: Config, policy: Policy, ready: Rendered, engine: Engine, scorer: Scorer
) -> dict[str, dict[str, Estimate]]:
    """Recovery from wrong solutions, without a word and after "Wait".

    Raises:
        UsageError: the data has no worked solutions.
    """
    found = {}
    for name, trigger in TRIGGERS.items():
        items = corrupted_items(
            ready.prompts,
            ready.tokens,
            policy.tokenizer,
            column=config.data.answer_column,
            tagged=_style(config) == "answer_tag",
            trigger=trigger,
            limit=policy.context - config.sampling.max_tokens,
        )
        if not items:
            raise UsageError(
                "--reflection: needs worked solutions with equations, in a column `solution` or in "
                f"data.answer_column = {config.data.answer_column!r}; this data has none."
            )
        sampling = config.sampling.to_sampling()
        found[name] = recovery(engine, scorer, items, sampling=sampling, seed=config.seed)
    return found


def _style(config: Config) -> Style | None:
    """How the reward finds an answer, if it reads one out of the text."""
    for part in config.rewards:
        if part.name == "exact_answer":
            return part.settings.get("style", "answer_tag")
    return None


def _shared(config: Config, prompts: Sequence[Prompt]) -> int | None:
    """How many prompts the model may have been trained on; None without the training data."""
    try:
        return shared_prompts(load_train(config), prompts)
    except UsageError:
        return None


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
