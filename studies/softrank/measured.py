"""What the stored results of the study say: one task at a time, as numbers by arm and seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.evaluation import (
    Contrast,
    CurveSummary,
    Equivalence,
    Estimate,
    Figure,
    equivalence,
    holm,
    paired_seeds,
    seed_mean,
    summarise_arm,
)
from groupwise.experiments import Plan, Result, read_plan, read_results

RESULTS = Path(__file__).parent / "results"

FIGURES = {
    "area": Figure(
        key="area",
        name="mean {metric} over training",
        more="has a higher mean {metric} over training than",
        less="has a lower mean {metric} over training than",
    ),
    "steps_to_threshold": Figure(
        key="steps_to_threshold",
        name="steps to {threshold}",
        more="reaches {threshold} later than",
        less="reaches {threshold} earlier than",
        unit="steps",
    ),
    "oscillation": Figure(
        key="oscillation",
        name="oscillation",
        more="oscillates more than",
        less="oscillates less than",
    ),
    "final": Figure(
        key="final",
        name="final training {metric}",
        more="ends at a higher training {metric} than",
        less="ends at a lower training {metric} than",
    ),
}
FEWEST = 3
"""Seeds from which on results are shown: an interval from fewer says nothing."""

HELD_OUT = ("greedy", "sampled", "pass_at_8")
"""Figures of the evaluations, all of them shares of held-out problems solved."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The results of one task.

    Attributes:
        name: folder of its results.
        plans: of the experiments on it; the first one names recipe, metric and threshold.
        results: finished runs of the comparison, by arm and seed.
        edges: arms whose learning rate is the lowest or the highest that was tried.
        tuning: mean area of the tuning runs by arm and learning rate.
    """

    name: str
    plans: Sequence[Plan] = ()
    results: Mapping[str, Mapping[int, Result]] = field(default_factory=dict)
    edges: frozenset[str] = frozenset()
    tuning: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @property
    def arms(self) -> list[str]:
        """Arms with results, in the order of the plans."""
        return [arm.label for plan in self.plans for arm in plan.arms if arm.label in self.results]

    @property
    def seeds(self) -> int:
        """How many seeds every arm of the first experiment has."""
        return len(self.results[self.plan.against])

    @property
    def runs(self) -> list[Result]:
        """The runs of all arms."""
        return [result for by_seed in self.results.values() for result in by_seed.values()]

    def rate(self, arm: str) -> float:
        """The learning rate of an arm."""
        return next(iter(self.results[arm].values())).learning_rate

    def summaries(self, arm: str) -> dict[int, CurveSummary]:
        """The learning curve of every seed in numbers."""
        curves = {
            seed: (_numbers(result, "step"), _numbers(result, self.plan.metric))
            for seed, result in self.results[arm].items()
        }
        return summarise_arm(curves, threshold=self.plan.threshold)

    def values(self, arm: str, figure: str) -> dict[int, float]:
        """A figure of the curve, or of the evaluation after training, by seed."""
        if figure in FIGURES:
            return {s: getattr(c, figure) for s, c in self.summaries(arm).items()}
        return {s: evaluated(r)[figure] for s, r in self.results[arm].items()}

    def mean(self, arm: str, figure: str) -> Estimate:
        """Mean of a figure over seeds, with Student's t interval."""
        return seed_mean(list(self.values(arm, figure).values()))

    def base(self, figure: str) -> float:
        """A figure of the evaluation before training, which all runs share."""
        first = next(iter(next(iter(self.results.values())).values()))
        return evaluated(first, last=False)[figure]

    def over_training(self, arm: str, key: str) -> float:
        """Mean of a logged metric over the steps of all runs."""
        return float(np.mean([_numbers(r, key).mean() for r in self.results[arm].values()]))

    def first(self, arm: str, key: str) -> float:
        """Mean of a logged metric over the first tenth of the steps of all runs."""
        return float(np.mean([_ends(r, key)[0] for r in self.results[arm].values()]))

    def last(self, arm: str, key: str) -> float:
        """Mean of a logged metric over the last tenth of the steps of all runs."""
        return float(np.mean([_ends(r, key)[1] for r in self.results[arm].values()]))

    def tokens(self, arm: str) -> float:
        """Tokens generated in training, mean over runs."""
        return float(np.mean([result.used("tokens") for result in self.results[arm].values()]))

    def change(self, arm: str, key: str) -> Estimate:
        """Last tenth of the steps minus the first tenth, of a logged metric, over seeds."""
        ends = [_ends(result, key) for result in self.results[arm].values()]
        return seed_mean([last - first for first, last in ends])

    def contrast(self, figure: str, first: str, second: str) -> Contrast:
        """Paired difference of two arms over the seeds that both have; Holm comes later."""
        a, b = self.values(first, figure), self.values(second, figure)
        seeds = sorted({*a} & {*b})
        result = paired_seeds([a[s] for s in seeds], [b[s] for s in seeds])
        missed = (0, 0)
        if figure == "steps_to_threshold":
            missed = self._missed(first, seeds), self._missed(second, seeds)
        return Contrast(
            figure=self._worded(figure),
            first=first,
            second=second,
            result=result,
            p_holm=result.p,
            unreached=missed,
        )

    def same_rate(self, first: str, second: str) -> bool:
        """Whether two arms were run at the same learning rate."""
        return self.rate(first) == self.rate(second)

    def equivalence(self, figure: str, first: str, second: str, *, margin: float) -> Equivalence:
        """Whether two arms differ by less than a margin in a figure."""
        a, b = self.values(first, figure), self.values(second, figure)
        seeds = sorted({*a} & {*b})
        return equivalence([a[s] for s in seeds], [b[s] for s in seeds], margin=margin)

    def _missed(self, arm: str, seeds: Sequence[int]) -> int:
        return sum(not self.summaries(arm)[seed].reached for seed in seeds)

    def _worded(self, key: str) -> Figure:
        if key not in FIGURES:
            name = {"pass_at_8": "pass@8"}.get(key, f"{key} accuracy") + " on held-out problems"
            return replace(Figure.named(name), key=key)
        words = {"metric": self.plan.metric, "threshold": f"{100 * self.plan.threshold:g} %"}
        figure = FIGURES[key]
        wording = {
            field: getattr(figure, field).format(**words) for field in ("name", "more", "less")
        }
        return replace(figure, **wording)


def read_task(name: str, *more: str) -> Task | None:
    """The results of a task, with those of further experiments on it.

    Args:
        name: folder below `results`.
        more: folders of experiments with the same recipe and seeds.

    Returns:
        The task; None where no three seeds of any experiment have finished with every arm.
    """
    task = Task(name=name)
    for folder in (RESULTS / name, *(RESULTS / each for each in more)):
        if (folder / "experiment.toml").exists():
            task = _with(task, folder)
    return task if task.results else None


def _with(task: Task, folder: Path) -> Task:
    """The task with one more experiment: its arms on the seeds that all of them have."""
    plan = read_plan(folder / "experiment.toml")
    results = [r for r in read_results(folder) if r.status == "finished"]
    runs: dict[str, dict[int, Result]] = {arm.label: {} for arm in plan.arms}
    for result in results:
        if not result.tuning:
            runs[result.arm][result.seed] = result
    seeds = set.intersection(*({*found} for found in runs.values()))
    if len(seeds) < FEWEST:
        return task
    found = _tuning(folder)
    return replace(
        task,
        plans=(*task.plans, plan),
        results={**task.results, **{arm: _only(found, seeds) for arm, found in runs.items()}},
        edges=task.edges | {arm for arm, each in found.items() if each["at_edge"]},
        tuning={**task.tuning, **{arm: each["areas"] for arm, each in found.items()}},
    )


def _only(runs: Mapping[int, Result], seeds: Set[int]) -> dict[int, Result]:
    return {seed: runs[seed] for seed in sorted(seeds)}


def _tuning(folder: Path) -> dict[str, Any]:
    """What tuning found, by arm."""
    path = folder / "comparison.json"
    return json.loads(path.read_text(encoding="utf-8"))["tuning"] if path.exists() else {}


def corrected(contrasts: Iterable[Contrast]) -> list[Contrast]:
    """The contrasts with p corrected for all of them together (Holm)."""
    found = list(contrasts)
    values = holm([contrast.result.p for contrast in found])
    return [
        Contrast(**{**vars(contrast), "p_holm": p})
        for contrast, p in zip(found, values, strict=True)
    ]


def evaluated(result: Result, *, last: bool = True) -> dict[str, float]:
    """The figures of a run's last or first evaluation."""
    row = result.evaluations[-1 if last else 0]
    return {name: figure["value"] for name, figure in row["figures"].items()}


def _numbers(result: Result, key: str) -> np.ndarray:
    return np.asarray(result.curve[key], dtype=float)


def _ends(result: Result, key: str) -> tuple[float, float]:
    """Means of a logged metric over the first and the last tenth of the steps."""
    values = _numbers(result, key)
    part = max(1, values.size // 10)
    return float(values[:part].mean()), float(values[-part:].mean())
