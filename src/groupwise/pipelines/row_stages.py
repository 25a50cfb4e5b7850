"""Kinds of stages that make rows of rows: selections, submissions of programs, contexts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config import Config
from groupwise.evaluation.intervals import Estimate
from groupwise.pipelines.stages import OUTPUTS, Figures, Work, stage
from groupwise.rundir.files import replace_text


@stage("rows")
def select(
    work: Any,
    *,
    rows: str | list[str],
    keep: Sequence[str] = (),
    pairs: bool = False,
    ratio: float = 1.5,
    most: int = 1,
    agreement: str | None = None,
) -> Figures:
    """Select answers by rules: `groupwise select`.

    Args:
        rows: one file of answers, or several, which are concatenated.
        keep: rules, in order.
        pairs: make preference pairs of the remaining answers.
        ratio, most: of the pairs.
        agreement: a score whose agreement with `correct` is measured over the remaining answers:
            the area under the curve, and the highest κ of its thresholds.
    """
    from groupwise.evaluation.agreement import agreement_figures
    from groupwise.training.stages.rows import read_samples, write_rows
    from groupwise.training.stages.select import preference_pairs, rules_of, select

    given = [row for path in _listed(rows) for row in read_samples(path)]
    kept = select(given, rules_of(keep))
    chosen = preference_pairs(kept.rows, ratio=ratio, most=most) if pairs else kept.rows
    write_rows(work.rows, chosen)
    told: dict[str, Any] = {"rows": dict(kept.counts)} | ({"pairs": len(chosen)} if pairs else {})
    if agreement is None:
        return told
    sections = agreement_figures(kept.rows, agreement)
    _write_figures(work, sections)
    for name in ("auc", "kappa"):
        if found := [each[name].value for each in sections.values() if name in each]:
            told[name] = round(max(found), 4)
    return told


def _write_figures(work: Work, sections: Mapping[str, Mapping[str, Estimate]]) -> None:
    values = {k: {n: v.as_dict() for n, v in each.items()} for k, each in sections.items()}
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    replace_text(work.folder / OUTPUTS["figures"], text)


@stage("rows")
def select_programs(
    work: Any,
    *,
    rows: str,
    tests: str = "test_list",
    shown: int = 1,
    generator: str = "generator",
    inputs: int = 32,
    seconds: float = 2.0,
) -> Figures:
    """Choose among sampled programs by what they do: `groupwise select-programs`.

    Args:
        rows: sampled programs.
        tests: column with the tests of the problem.
        shown: how many of them are examples.
        generator: column with a program that makes inputs.
        inputs: new inputs per problem.
        seconds: processor time per input.
    """
    from groupwise.evaluation.submissions import submission_figures
    from groupwise.training.stages.rows import read_samples
    from groupwise.training.stages.select_programs import Selection, select_programs

    seed = work.seed or 0
    chosen = Selection(
        tests=tests, shown=shown, generator=generator, inputs=inputs, seconds=seconds, seed=seed
    )
    made = read_samples(select_programs(rows, work.rows, selection=chosen))
    problems = len({row["id"] for row in made})
    told: dict[str, Any] = {"programs": len(made), "problems": problems}
    if all(row["correct"] is None for row in made):
        return told
    sections = submission_figures(made)
    _write_figures(work, sections)
    first = next(iter(sections.values()))
    return told | {"pass_rate": {name: round(each.value, 4) for name, each in first.items()}}


def _contexts_config(work: Work, *, recipe: str, set: Sequence[str] = (), **_: Any) -> Config:
    return work.config(recipe, set)


@stage("rows", _contexts_config)
def contexts(
    work: Any,
    *,
    recipe: str,
    rules: str | None = None,
    model: str | None = None,
    by: str = "perplexity",
    count: int = 5,
    split: str = "train",
    set: Sequence[str] = (),
) -> Figures:
    """Find the rules that may decide each question: `groupwise contexts`.

    Args:
        recipe: with the questions.
        rules: file of rules; None takes the reasons of the training answers.
        model: scores answers; None takes the recipe's.
        by: "perplexity" for training data, "search" for new questions.
        count: candidates per question.
        split: "train" or "eval".
        set: further settings of the recipe.
    """
    from groupwise.prompts.rows import read_rows
    from groupwise.training.stages.contexts import find_contexts

    config = _contexts_config(work, recipe=recipe, set=set)
    way: Any = by
    find_contexts(config, rules, work.rows, model=model, by=way, count=count, split=split)
    rows = read_rows(str(work.rows))
    found = sum(len(row["candidates"]) for row in rows)
    known = sum(row["gold"] is not None for row in rows)
    told = {"questions": len(rows), "candidates": found, "gold_known": known}
    return told | _rank_figures([row for row in rows if row.get("rule")])


def _rank_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of questions with a known rule for which it is the best candidate."""
    if not rows:
        return {}
    first = 0
    for row in rows:
        scores = [-math.inf if score is None else score for score in row["scores"]]
        best = row["candidates"][scores.index(max(scores))] if scores else None
        first += best == row["rule"]
    return {"rule_first": round(first / len(rows), 4)}


def _listed(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
