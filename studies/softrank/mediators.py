"""What the factorial changes beside the area: entropy, diversity and the direction of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from measured import RESULTS, Task
from words import points, ratio, signed, table

from groupwise.evaluation import Estimate, SeedDifference, paired_seeds

Factors = Mapping[str, tuple[bool, bool]]
Figures = Mapping[str, Mapping[int, float]]
Weights = Mapping[str, float]
"""Of the arms in a linear contrast."""

ADVANTAGES = {"softrank": "softrank", "reinforce": "raw", "maxrl": "maxrl", "dr_grpo": "centered"}
"""The advantage of every arm, as the stored measurement of gradients names it."""
FACTOR_NAMES = ("baseline", "weighting")


def main_effect(figures: Figures, factors: Factors, factor: int) -> SeedDifference:
    """Mean figure of the arms with a factor minus that of the arms without, paired by seed.

    Args:
        figures: by arm and seed.
        factors: of every arm, whether it has the baseline and the weighting.
        factor: 0 for the baseline, 1 for the weighting.
    """
    found = differences(figures, factors, factor)
    return paired_seeds(found, [0.0] * len(found))


def direct_effect(outcome: Sequence[float], mediator: Sequence[float]) -> Estimate:
    """What is left of a paired effect where the mediator does not change.

    The intercept a of y = a + b·m by least squares, y and m the differences of outcome and mediator
    over paired seeds, with its 95 % t interval.

    Example:
        >>> round(direct_effect([1.0, 3.0, 2.0, 4.1], [0.0, 2.0, 1.0, 3.0]).value, 2)
        0.99

    Source: Judd, Kenny and McClelland 2001, without their term for the sum of the mediators.
    """
    from scipy import stats

    y, m = np.asarray(outcome, dtype=float), np.asarray(mediator, dtype=float)
    columns = np.stack([np.ones_like(m), m], 1)
    solution, *_ = np.linalg.lstsq(columns, y, rcond=None)
    rest = y - columns @ solution
    variance = rest @ rest / (y.size - 2) * np.linalg.inv(columns.T @ columns)[0, 0]
    reach = float(stats.t.ppf(0.975, y.size - 2) * np.sqrt(variance))
    return Estimate(value=float(solution[0]), low=solution[0] - reach, high=solution[0] + reach)


def differences(figures: Figures, factors: Factors, factor: int) -> list[float]:
    """The main effect of a factor for every seed."""
    seeds = sorted(next(iter(figures.values())))
    means = {
        wanted: [
            np.mean([figures[a][s] for a, has in factors.items() if has[factor] is wanted])
            for s in seeds
        ]
        for wanted in (True, False)
    }
    return [float(a - b) for a, b in zip(means[True], means[False], strict=True)]


def sides(figures: Figures, weights: Weights) -> tuple[list[float], list[float]]:
    """Per seed that all arms share, the positive and the negative part of a linear contrast."""
    seeds = sorted(set.intersection(*({*figures[arm]} for arm in weights)))
    first, second = (
        [
            sum(sign * w * figures[arm][seed] for arm, w in weights.items() if sign * w > 0)
            for seed in seeds
        ]
        for sign in (1, -1)
    )
    return first, second


def over_training(task: Task, arm: str, key: str) -> dict[int, float]:
    """Mean of a logged metric over the steps of every run."""
    return {
        seed: float(np.mean(np.asarray(run.curve[key], dtype=float)))
        for seed, run in task.results[arm].items()
    }


def mediators(task: Task, factors: Factors) -> str:
    """Effects of both factors on the mediators, and what is left of the baseline's effect."""
    found: dict[str, Figures] = {
        "entropy over training": {a: over_training(task, a, "entropy") for a in factors},
        "norm of the gradient": {a: over_training(task, a, "grad_norm") for a in factors},
        "pass@8 after training": {a: task.values(a, "pass_at_8") for a in factors},
    }
    areas = {arm: task.values(arm, "area") for arm in factors}
    rows = []
    for name, figures in found.items():
        scale, digits = (100, 1) if name.startswith("pass") else (1, 4)
        effects = [main_effect(figures, factors, factor).difference for factor in (0, 1)]
        left = direct_effect(differences(areas, factors, 0), differences(figures, factors, 0))
        rows.append(
            [name, *(signed(each, scale=scale, digits=digits) for each in effects), points(left)]
        )
    head = ["mediator", *(f"effect of the {name}" for name in FACTOR_NAMES)]
    return table([*head, "effect of the baseline on the area at equal mediator, pp"], rows)


def cosines(factors: Factors) -> str:
    """Cosine of a step to the gradient of the expected reward, at the base model."""
    path = RESULTS / "word-problems" / "variance.json"
    stored = {e["name"]: e for e in json.loads(path.read_text(encoding="utf-8"))["estimators"]}
    cells = [ratio(stored[ADVANTAGES[arm]]["step_cosine"]) for arm in factors]
    return table(list(factors), [cells])
