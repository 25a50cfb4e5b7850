"""Compare the results of an experiment, on the axis on which its plan matches runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupwise.errors import RunError
from groupwise.evaluation import Comparison, Contrast, FigureTable, holm, sentence
from groupwise.experiments.plan import Plan
from groupwise.experiments.results import Result
from groupwise.experiments.tuning import Choice, at_rate, choose, equal_rate_runs
from groupwise.report import RunData, compare_runs, results_table

AXES: Mapping[str, tuple[str, float]] = {
    "tokens": ("thousand tokens", 1e-3),
    "seconds": ("seconds", 1.0),
}
"""Unit and scale of the x-axis where runs are not matched in samples."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The comparison of an experiment's runs.

    Attributes:
        plan: of the experiment.
        runs: finished runs, on the plan's axis.
        comparison: contrasts and verdicts.
        choices: learning rate of each tuned arm.
        failed: failed runs of comparison and tuning.
        missing: number of runs of the comparison without a result.
        equal_rates: contrasts with the reference arm at equal learning rates, as far as they have
            been run, where tuning gave the arms different ones.
        bases: fingerprints of the models that the runs started from, as far as they are known.
    """

    plan: Plan
    runs: Sequence[RunData]
    comparison: Comparison
    choices: Mapping[str, Choice]
    failed: Sequence[Result]
    missing: int
    equal_rates: Sequence[Contrast] = ()
    bases: frozenset[str] = frozenset()

    def table(self) -> FigureTable:
        """Figures on the held-out splits before and after training."""
        return results_table(self.runs)

    def remarks(self) -> list[str]:
        """Notes beside the verdicts: learning rates and failures."""
        remarks = []
        for label, choice in self.choices.items():
            edge = ", at the edge of the grid" if choice.at_edge else ""
            tried = f"best of {len(choice.areas)}{edge}"
            remarks.append(f"{label}: learning rate {choice.learning_rate:g} ({tried}).")
        remarks += self._unequal_rates()
        remarks += [f"Failed: {result.name} ({result.error})." for result in self.failed]
        if self.missing:
            remarks.append(f"{self.missing} runs of the comparison have no result.")
        if len(self.bases) > 1:
            remarks.append(
                f"The runs started from {len(self.bases)} different base models, so differences "
                "between arms may come from the base; repeat the runs of one of them."
            )
        return remarks

    def _unequal_rates(self) -> list[str]:
        """A warning where arms are compared at different rates, and what holds at equal ones."""
        against = self.plan.against
        rates = {label: choice.learning_rate for label, choice in self.choices.items()}
        differ = sorted({label for label, _ in equal_rate_runs(rates, against=against)} - {against})
        if not differ:
            return []
        said = (
            f"Learning rates differ: {', '.join(differ)} and {against} are compared at the rates "
            "that tuning chose for each, so a difference may come from the rate"
        )
        if not self.equal_rates:
            return [f"{said}; set tuning.equal_rates = true to compare them at equal rates too."]
        return [f"{said}. At equal rates:", *(f"{sentence(c)}." for c in self.equal_rates)]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        table = self.table()
        return {
            "title": self.plan.title,
            "plan": self.plan.digest,
            "match": self.plan.match,
            "tuning": {
                label: {
                    "learning_rate": choice.learning_rate,
                    "at_edge": choice.at_edge,
                    "areas": {f"{rate:g}": area for rate, area in choice.areas.items()},
                }
                for label, choice in self.choices.items()
            },
            "figures": [
                {"arm": model, "split": split, "figure": figure, **cell.as_dict()}
                for (model, split, figure), cell in table.cells.items()
            ],
            "comparison": self.comparison.as_dict(),
            "equal_rates": [contrast.as_dict() for contrast in self.equal_rates],
            "failed": [{"run": result.name, "error": result.error} for result in self.failed],
            "missing": self.missing,
        }


def analyse(plan: Plan, results: Sequence[Result]) -> Analysis:
    """Compare the arms of a plan by the results of its runs.

    Args:
        plan: of the experiment.
        results: of its runs, in any order.

    Returns:
        The analysis; seeds that an arm lacks are not paired.

    Raises:
        RunError: no run of the reference arm has finished.
    """
    mine = [result for result in results if not result.tuning]
    found = {(r.arm, r.seed): r for r in mine if r.status == "finished"}
    order = [(arm.label, seed) for arm in plan.arms for seed in plan.seeds]
    finished = [found[key] for key in order if key in found]
    failed = [result for result in results if result.status == "failed"]
    if not any(result.arm == plan.against for result in finished):
        errors = [str(r.error) for r in failed if r.arm == plan.against]
        reason = f": {errors[0]}" if errors else ""
        raise RunError(
            f"no run of the reference arm {plan.against} has finished{reason}; run "
            "groupwise compare again to do the missing runs."
        )
    runs = _matched(plan, finished)
    tuned = choices(plan, results)
    return Analysis(
        plan=plan,
        runs=runs,
        comparison=compare_runs(
            runs,
            against=plan.against,
            threshold=plan.threshold,
            metric=plan.metric,
            margin=plan.margin,
        ),
        choices=tuned,
        failed=failed,
        missing=len({*order} - {(r.arm, r.seed) for r in mine}),
        equal_rates=_at_equal_rates(plan, tuned, found),
        bases=frozenset(r.base for r in finished if r.base is not None),
    )


def _at_equal_rates(
    plan: Plan, tuned: Mapping[str, Choice], found: Mapping[tuple[str, int], Result]
) -> list[Contrast]:
    """Area and steps to the threshold of every arm and the reference at either's learning rate."""
    rates = {label: choice.learning_rate for label, choice in tuned.items()}
    contrasts = []
    for label in [arm.label for arm in plan.arms if rates.get(arm.label) is not None]:
        both = {rates[label], rates.get(plan.against, rates[label])}
        for rate in sorted(both) if len(both) > 1 else ():
            runs = [
                result.run_data(label=at_rate(name, rate))
                for name in (label, plan.against)
                for seed in plan.seeds
                for result in [found.get((_name(name, rate, rates), seed))]
                if result is not None
            ]
            if len({run.label for run in runs}) == 2:
                contrasts += compare_runs(
                    runs, threshold=plan.threshold, metric=plan.metric, margin=plan.margin
                ).contrasts
    chosen = [c for c in contrasts if c.figure.key in ("area", "steps_to_threshold")]
    corrected = holm([contrast.result.p for contrast in chosen])
    return [replace(c, p_holm=p) for c, p in zip(chosen, corrected, strict=True)]


def _name(label: str, rate: float, rates: Mapping[str, float]) -> str:
    """What the results call an arm at a rate."""
    return label if rates[label] == rate else at_rate(label, rate)


def choices(plan: Plan, results: Sequence[Result]) -> dict[str, Choice]:
    """The learning rate of each tuned arm by label."""
    if plan.tuning is None:
        return {}
    tuned = {
        arm.label: choose(
            [r for r in results if r.tuning and r.arm == arm.label], metric=plan.metric
        )
        for arm in plan.arms
    }
    return {label: choice for label, choice in tuned.items() if choice is not None}


def _matched(plan: Plan, results: Sequence[Result]) -> list[RunData]:
    """The runs over steps, or over the tokens or seconds that all of them used."""
    if plan.match == "samples":
        return [result.run_data() for result in results]
    unit, scale = AXES[plan.match]
    used = [np.asarray(result.curve[plan.match], dtype=float) * scale for result in results]
    end = min(values[-1] for values in used)
    points = max(
        values.size for r, values in zip(results, used, strict=True) if r.arm == plan.against
    )
    grid = end * np.arange(1, points + 1) / points
    return [
        _resampled(result, values, grid, unit) for result, values in zip(results, used, strict=True)
    ]


def _resampled(result: Result, used: np.ndarray, grid: np.ndarray, unit: str) -> RunData:
    """A run interpolated to evenly spaced amounts of tokens or seconds."""
    run = result.run_data()
    columns = {
        key: np.interp(grid, used, np.asarray(values, dtype=float))
        for key, values in result.curve.items()
        if key not in ("step", "tokens", "seconds") and None not in values
    }
    rows = [
        {"step": float(at), **{key: float(values[i]) for key, values in columns.items()}}
        for i, at in enumerate(grid)
    ]
    steps = [0, *result.curve["step"]]
    at_step = dict(zip(steps, [0.0, *used.tolist()], strict=True))
    evaluations = [{**row, "step": at_step[row["step"]]} for row in run.evaluations]
    return replace(run, metrics=rows, evaluations=evaluations, axis=unit)
