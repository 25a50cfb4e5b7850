"""Evaluate models on the held-out prompts of a recipe, and compare them item by item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.config import Config
from groupwise.config.connect import configured_engine, load_to_answer, make_scorer
from groupwise.config.data import load_eval, load_train, rendered
from groupwise.errors import UsageError, warn
from groupwise.evaluation import (
    Estimate,
    Figure,
    FigureTable,
    coverage_note,
    figure_table,
    item_verdict,
    paired_items,
    paired_verdicts,
    prompt_mean,
    title_of,
)
from groupwise.evaluation.details import by_difficulty, details, reordered
from groupwise.evaluation.measure import Measurement, measure
from groupwise.evaluation.reflection import TRIGGERS, corrupted_items, own_errors, recovery
from groupwise.models import Policy
from groupwise.prompts.contamination import contamination_warning, shared_prompts
from groupwise.prompts.templates import Rendered
from groupwise.rewards import Scorer
from groupwise.rewards.extract import Style
from groupwise.rewards.scoring.rows import check_rows
from groupwise.types import Engine, Prompt


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Figures and verdicts of one or more models.

    Attributes:
        measurements: answers and their scores by short model name.
        figures: by model, then by section: the evaluated split, then its levels of difficulty and
            the reflection test, where there are any.
        split: the evaluated split of the data.
        verdicts: how each model compares with the last one.
        shared: number of prompts that are training prompts too; None where that is unknown.
        reordered: share of the sampling seeds that put two models in the other order than all seeds
            together do; None for a single seed or model.
    """

    measurements: Mapping[str, Measurement]
    figures: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    split: str
    verdicts: tuple[str, ...]
    shared: int | None
    reordered: float | None = None

    def table(self) -> FigureTable:
        """All figures with intervals."""
        return figure_table({model: [sections] for model, sections in self.figures.items()})

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = {
            model: {
                section: {name: figure.as_dict() for name, figure in figures.items()}
                for section, figures in sections.items()
            }
            for model, sections in self.figures.items()
        }
        return {
            "split": self.split,
            "models": {model: sections[self.split] for model, sections in values.items()},
            "sections": values,
            "verdicts": list(self.verdicts),
            "shared_prompts": self.shared,
            "reordered": self.reordered,
        }


def evaluate(
    config: Config,
    models: Sequence[str],
    *,
    seeds: int = 1,
    reflection: bool = False,
    names: Sequence[str] | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> EvaluationResult:
    """Evaluate models with the prompts, rewards and sampling of a recipe.

    All models answer the same prompts with the same random numbers.

    Args:
        config: of the recipe; its `evaluation` section sets the number of prompts and samples.
        models: folders, hub names or "bundled"; the others are compared with the last one.
        seeds: number of sampling seeds, counted up from the recipe's.
        reflection: also measure recovery from worked solutions with a planted error and from wrong
            answers of the model itself.
        names: what to call the models; None takes the ends of their paths.
        pairs: further models to compare, by these names.

    Raises:
        UsageError: no held-out prompts, a model given twice, or one that cannot be loaded.
    """
    if len(set(models)) < len(models):
        raise UsageError(f"models = {', '.join(models)}: must differ.")
    prompts = load_eval(config)
    if not prompts:
        raise UsageError(
            f"data.eval: must be set, as {config.data.train} has no split to evaluate on."
        )
    shared = _shared(config, prompts)
    if shared:
        warn(contamination_warning(shared, len(prompts)))
    measurements: dict[str, Measurement] = {}
    figures: dict[str, Mapping[str, Mapping[str, Estimate]]] = {}
    for name, model in zip(names or short_names(models), models, strict=True):
        measurements[name], figures[name] = _measured(
            config, model, prompts, seeds=seeds, reflection=reflection
        )
    *others, last = measurements
    swapped = reordered([*measurements.values()])
    return EvaluationResult(
        measurements=measurements,
        figures=figures,
        split=config.data.eval_split,
        verdicts=(
            *(
                text
                for model, against in (*((model, last) for model in others), *pairs)
                for text in _verdicts(model, against, measurements)
            ),
            *([] if swapped is None else [_order_note(swapped, seeds)]),
            *filter(None, [coverage_note(min(len(m.greedy) for m in measurements.values()))]),
        ),
        shared=shared,
        reordered=swapped,
    )


def _order_note(share: float, seeds: int) -> str:
    """How often a single seed would have ranked the models otherwise."""
    return (
        f"In {round(share * seeds)} of {seeds} sampling seeds, sampled accuracy puts two models in "
        "the other order than over all seeds."
    )


def short_names(models: Sequence[str]) -> list[str]:
    """Model names for a table: the last part of each path, after its run for `final` and `best`.

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
    """The answers of a model, and their figures by section."""
    policy = load_to_answer(config, model)
    ready = rendered(config, policy, prompts)
    with (
        closing(make_scorer(config)) as scorer,
        closing(configured_engine(config, policy)) as engine,
    ):
        check_rows(scorer, ready.prompts, where="data.eval")
        measured = measure(
            engine,
            scorer,
            ready.prompts,
            ready.tokens,
            sampling=config.sampling,
            samples=config.evaluation.samples,
            seed=config.seed,
            seeds=seeds,
        )
        style = answer_style(config)
        sections = {config.data.eval_split: details(measured, ready.prompts, style=style)}
        for level, places in by_difficulty(ready.prompts).items():
            sections[level] = _brief_figures(measured.part(places))
        if reflection:
            sections |= _reflection_figures(config, policy, ready, measured, engine, scorer)
        return measured, sections


def _brief_figures(measured: Measurement) -> dict[str, Estimate]:
    """Figures of a subset of the prompts."""
    lengths = {"length": prompt_mean(measured.lengths)}
    return {k: v for k, v in measured.figures.items() if k != "reward"} | lengths


def _reflection_figures(
    config: Config,
    policy: Policy,
    ready: Rendered,
    measured: Measurement,
    engine: Engine,
    scorer: Scorer,
) -> dict[str, dict[str, Estimate]]:
    """Recovery from corrupted solutions and from own errors, directly and after "Wait".

    Raises:
        UsageError: the data has no worked solutions, and the model made no error.
    """
    found = {}
    limit = policy.context - config.sampling.max_tokens
    given = (ready.prompts, ready.tokens, policy.tokenizer)
    wrong = _wrong_answers(measured)
    for end, trigger in TRIGGERS.items():
        planted = corrupted_items(
            *given,
            column=config.data.answer_column,
            tagged=answer_style(config) == "answer_tag",
            trigger=trigger,
            limit=limit,
        )
        own = own_errors(*given, wrong, trigger=trigger, limit=limit)
        for name, items in (("reflection", planted), ("own_errors", own)):
            if items:
                found[name + end] = recovery(
                    engine, scorer, items, sampling=config.sampling, seed=config.seed
                )
    if not found:
        raise UsageError(
            "--reflection: needs worked solutions with equations in a column `solution` or in "
            f"data.answer_column = {config.data.answer_column!r}, or wrong answers of the model "
            "with a mark such as </think> or \\boxed before the answer; there are none."
        )
    return dict(sorted(found.items(), key=lambda item: item[0].startswith("own")))


def _wrong_answers(measured: Measurement) -> list[str | None]:
    """The first wrong sample of every prompt."""
    return [
        next((c.text for c, ok in zip(g.completions, right, strict=True) if ok < 0.5), None)
        for g, right in zip(measured.groups, measured.sampled, strict=True)
    ]


def answer_style(config: Config) -> Style | None:
    """How the reward extracts an answer; None where it does not."""
    for part in config.rewards:
        if part.name == "exact_answer":
            return part.settings.get("style", "answer_tag")
    return None


def _shared(config: Config, prompts: Sequence[Prompt]) -> int | None:
    """Number of prompts shared with the training data; None without that data."""
    try:
        return shared_prompts(load_train(config), prompts)
    except UsageError:
        return None


def _verdicts(model: str, against: str, measurements: Mapping[str, Measurement]) -> list[str]:
    """How the answers of two models differ, over the prompts on which both were judged."""
    first, second = measurements[model].by_prompt, measurements[against].by_prompt
    if len(first["greedy"]) != len(second["greedy"]):
        return [f"{model} and {against} dropped different prompts, so they cannot be paired."]
    pairs = {}
    for name in first.keys() & second.keys():
        both = ~(np.isnan(first[name]) | np.isnan(second[name]))
        if both.any():
            pairs[name] = (first[name][both].tolist(), second[name][both].tolist())
    if "greedy" not in pairs:
        return [f"No reward decides whether the answers of {model} are correct."]
    greedy = item_verdict(model, against, paired_items(*pairs.pop("greedy")))
    if pairs.get("reward") == pairs.get("sampled"):
        pairs.pop("reward", None)
    figures = {_figure(name): pairs[name] for name in sorted(pairs, key=[*first].index)}
    return [greedy, *paired_verdicts(model, against, figures)]


def _figure(name: str) -> Figure:
    words = "sampled accuracy" if name == "sampled" else title_of(name)
    return Figure.named(words, unit="" if name in ("reward", "calls") else "pp")
