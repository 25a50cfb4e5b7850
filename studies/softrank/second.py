"""The second edition of the study: the plans that fix it, and the page of its results.

    python studies/softrank/second.py

writes both. Every arm is run at every learning rate of a grid, on seeds that nothing else uses; the
primary contrast of a task is the paired difference of two arms averaged over the grid.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import mediators
import numpy as np
from corrections import GRPO, PAPER, at
from coverage import coverage
from design import power
from measured import RESULTS, Task, read_task
from words import bullets, listed, percent, picture, points, signed, table, wrapped

from groupwise.evaluation import (
    Contrast,
    Equivalence,
    SeedDifference,
    equivalence,
    holm,
    paired_seeds,
    sentence,
)
from groupwise.experiments import Plan, make_plan
from groupwise.experiments.plan import toml

HERE = Path(__file__).parent
PLANS = HERE / "plans" / "second"
PAGE = HERE.parents[1] / "docs" / "studies" / "second-edition.md"

RATES = (5e-5, 1e-4, 2e-4)
STEPS = 60
EVALUATED = 128
"""Held-out problems of the final accuracy, a secondary figure."""
DIFFERENCE = 0.01
FIRST_SEED = 2000
SEALED = 5000, 5091
ARMS = {PAPER: {"algorithm": "softrank"}, GRPO: {"algorithm": "grpo"}}

MECHANISM = "second-mechanism"
FACTORIAL = {PAPER: (False, True), "reinforce": (False, False), "maxrl": (True, True),
             "dr_grpo": (True, False)}  # fmt: skip
"""Arms of the factorial: whether a baseline is subtracted, and whether right answers share a weight
that does not depend on how many there are (the softmax of SoftRank, 1/p of MaxRL)."""
MECHANISM_RATE = 2e-4
MECHANISM_SEEDS = range(2100, 2116)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task of the second edition; the recipe and the words of its primary endpoint."""

    recipe: str
    reward: str
    metric: str
    threshold: float
    margin: float
    seeds: int
    more: tuple[str, ...] = ()


SETTINGS = {
    "word-problems": Setting(
        recipe="word-problems", reward="0 or 1", metric="accuracy", threshold=0.6,
        margin=DIFFERENCE, seeds=24,
    ),
    "lists": Setting(
        recipe="studies/softrank/lists.toml", reward="graded", metric="reward", threshold=0.7,
        margin=0.005, seeds=12,
    ),
    "long-answers": Setting(
        recipe="word-problems", reward="0 or 1", metric="accuracy", threshold=0.6,
        margin=DIFFERENCE, seeds=24,
        more=("model.path=runs/study/long-answers/sft", "sampling.max_tokens=96"),
    ),
}  # fmt: skip


def plan(name: str) -> Plan:
    """The plan of a task: every arm at every rate."""
    setting = SETTINGS[name]
    return make_plan(
        {
            **common(setting),
            "title": f"Second edition: {name} at equal learning rates",
            "seeds": list(range(FIRST_SEED, FIRST_SEED + setting.seeds)),
            "against": at(GRPO, RATES[1]),
            "hypotheses": [
                f"The area of {PAPER} minus that of {GRPO}, averaged over the rates, is not 0."
            ],
            "arms": [
                {"label": at(label, rate), **arm, "learning_rate": rate}
                for label, arm in ARMS.items()
                for rate in RATES
            ],
        }
    )


def mechanism_plan() -> Plan:
    """The plan of the factorial: baseline or none, weights by pass rate or none."""
    setting = SETTINGS["word-problems"]
    return make_plan(
        {
            **common(setting),
            "title": "Second edition: baseline and weighting on word problems",
            "seeds": list(MECHANISM_SEEDS),
            "against": "dr_grpo",
            "hypotheses": [
                "The main effect of the baseline on the area is not 0.",
                "The main effect of the weighting on the area is not 0.",
            ],
            "arms": [
                {"label": label, "algorithm": label, "learning_rate": MECHANISM_RATE}
                for label in FACTORIAL
            ],
        }
    )


def common(setting: Setting) -> dict[str, object]:
    """What all plans share."""
    return {
        "recipe": setting.recipe,
        "set": [
            f"steps={STEPS}",
            "prompts_per_step=8",
            f"evaluation.prompts={EVALUATED}",
            "algorithm.weighting.name=group_token_mean",
            *setting.more,
        ],
        "match": "samples",
        "metric": setting.metric,
        "threshold": setting.threshold,
        "margin": setting.margin,
        "stopping": "Every seed is run once with every arm; nothing is added or left out.",
    }


def averaged(task: Task, figure: str, arm: str) -> dict[int, float]:
    """A figure of an arm by seed, averaged over the rates of the grid."""
    by_rate = [task.values(at(arm, rate), figure) for rate in RATES]
    return {seed: float(np.mean([values[seed] for values in by_rate])) for seed in by_rate[0]}


def primary(task: Task, first: str = PAPER, second: str = GRPO) -> Contrast:
    """The primary contrast: the area averaged over the rates, paired by seed; Holm comes later."""
    a, b = (averaged(task, "area", arm) for arm in (first, second))
    result = paired_seeds([a[s] for s in sorted(a)], [b[s] for s in sorted(a)])
    worded = task.contrast("area", at(first, RATES[0]), at(second, RATES[0])).figure
    return Contrast(figure=worded, first=first, second=second, result=result, p_holm=result.p)


def equal(task: Task, *, margin: float) -> Equivalence:
    """Whether the arms of the primary contrast differ by less than the margin."""
    a, b = (averaged(task, "area", arm) for arm in (PAPER, GRPO))
    return equivalence([a[s] for s in sorted(a)], [b[s] for s in sorted(a)], margin=margin)


def main_effect(task: Task, factor: int) -> SeedDifference:
    """Mean area of the arms with a factor minus that of the arms without, paired by seed.

    Args:
        factor: 0 for the baseline, 1 for the weighting.
    """
    areas = {arm: task.values(arm, "area") for arm in FACTORIAL}
    return mediators.main_effect(areas, FACTORIAL, factor)


def mechanism() -> str:
    """The main effects of the factorial with Holm's p, and its arms."""
    task = read_task(MECHANISM)
    if task is None or task.seeds < len(MECHANISM_SEEDS):
        return "Not run yet."
    effects = [main_effect(task, factor) for factor in (0, 1)]
    values = holm([effect.p for effect in effects])
    lines = [
        f"{name}: {points(effect.difference)} pp of the area (Holm's p {_p(p)})"
        for name, effect, p in zip(("Baseline", "Weighting"), effects, values, strict=True)
    ]
    rows = [
        [arm, "yes" if base else "no", "yes" if weighted else "no"]
        + [percent(task.mean(arm, figure)) for figure in ("area", "final", "sampled", "pass_at_8")]
        + [f"{task.first(arm, 'entropy'):.3f}", f"{task.last(arm, 'entropy'):.3f}"]
        for arm, (base, weighted) in FACTORIAL.items()
    ]
    head = ["arm", "baseline", "weighting", "accuracy over training", "final", "sampled"]
    head += ["pass@8", "entropy, first", "entropy, last"]
    return (
        f"{bullets(lines)}\n\n{table(head, rows)}\n\n"
        "Mediators, secondary and added on 25 November 2026. The last column is the intercept of a "
        "regression of a seed's effect on the area on its effect on the mediator: what is left of "
        "the baseline's effect where it does not change the mediator. Entropy and the norm also "
        "fall because accuracy rises, so what they carry need not be a cause.\n\n"
        f"{mediators.mediators(task, FACTORIAL)}\n\n"
        "Cosine of a step's gradient to the gradient of the expected reward, at the base model on "
        f"the same answers:\n\n{mediators.cosines(FACTORIAL)}"
    )


def read_second() -> dict[str, Task]:
    """The tasks whose every run has finished; an unfinished one gives no figure before its end."""
    found = {name: read_task(f"second-{name}") for name in SETTINGS}
    return {
        name: task
        for name, task in found.items()
        if task is not None and task.seeds == SETTINGS[name].seeds
    }


def with_holm(tasks: Mapping[str, Task]) -> dict[str, Contrast]:
    """The primary contrasts with p corrected over all planned tasks; one not run has p = 1."""
    found = {name: primary(task) for name, task in tasks.items()}
    missing = [1.0] * (len(SETTINGS) - len(found))
    values = holm([contrast.result.p for contrast in found.values()] + missing)
    return {
        name: replace(contrast, p_holm=p)
        for (name, contrast), p in zip(found.items(), values, strict=False)
    }


def page() -> str:
    """The plan and the results as Markdown."""
    tasks = read_second()
    contrasts = with_holm(tasks)
    values = {
        "abstract": abstract(tasks, contrasts),
        "rates": listed([f"{rate:g}" for rate in RATES]),
        "tasks": "\n".join(
            f"| {spoken(name)} | {each.reward} | {each.metric} | {each.seeds}, from {FIRST_SEED} |"
            for name, each in SETTINGS.items()
        ),
        "steps": str(STEPS),
        "family": str(len(SETTINGS)),
        "margins": bullets(
            [
                f"{spoken(name)}: {100 * each.margin:g} pp of the area of {each.metric}"
                for name, each in SETTINGS.items()
            ]
        ),
        "power": power_table(),
        "results": results(tasks, contrasts),
        "mechanism": mechanism(),
        "mechanism_rate": f"{MECHANISM_RATE:g}",
        "mechanism_seeds": f"{MECHANISM_SEEDS[0]} to {MECHANISM_SEEDS[-1]}",
        "long_hours": f"{long_hours():.1f}",
        **covered(tasks),
        "sealed": str(SEALED[0]),
        "sealed_last": str(SEALED[1]),
    }
    text = Template((HERE / "second.md").read_text(encoding="utf-8")).substitute(values)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def long_hours() -> float:
    """What long answers would take, if a step takes as long as in the first edition."""
    first = read_task("long-answers")
    if first is None:
        return math.nan
    per_step = np.mean([run.used("seconds") / run.used("samples") for run in first.runs])
    return float(per_step * STEPS * len(ARMS) * len(RATES) * SETTINGS["long-answers"].seeds / 3600)


def covered(tasks: Mapping[str, Task]) -> dict[str, str]:
    """The simulated coverage of the primary interval on word problems."""
    task = tasks.get("word-problems")
    if task is None:
        return {"coverage": "not known", "coverage_seeds": "these"}
    a, b = (averaged(task, "area", arm) for arm in (PAPER, GRPO))
    share = coverage([a[s] - b[s] for s in a], len(a))
    return {"coverage": f"{100 * share:.1f} %", "coverage_seeds": str(len(a))}


def power_table() -> str:
    """The power of each task's design, from the first edition's deviations."""
    rows = []
    for name, setting in SETTINGS.items():
        first = read_task(name)
        if first is None:
            continue
        deviation = first.contrast("area", PAPER, GRPO).result.deviation
        independent = deviation / math.sqrt(len(RATES))
        chances = [
            power(setting.seeds, difference=DIFFERENCE, deviation=each)
            for each in (deviation, independent)
        ]
        rows.append(
            [spoken(name), f"{100 * deviation:.1f} pp", str(setting.seeds)]
            + [f"{chance:.2f}" for chance in chances]
        )
    head = ["task", "sd at one rate", "seeds", "power, rates agree", "power, rates independent"]
    return table(head, rows)


def abstract(tasks: Mapping[str, Task], contrasts: Mapping[str, Contrast]) -> str:
    """What the results say: a point for each task, and one for the mechanism."""
    if not tasks:
        return "No run has finished yet."
    told = [f"On {spoken(name)}, {verdict(name, tasks[name], contrasts[name])}." for name in tasks]
    missing = [spoken(name) for name in SETTINGS if name not in tasks]
    rest = [f"{listed(missing).capitalize()}: not run."] if missing else []
    return "**In short.**\n\n" + bullets([*told, *why(), *rest])


def why() -> list[str]:
    """What the factorial says, in one sentence."""
    task = read_task(MECHANISM)
    if task is None or task.seeds < len(MECHANISM_SEEDS):
        return []
    baseline, weighting = (points(main_effect(task, factor).difference) for factor in (0, 1))
    return [
        f"At {MECHANISM_RATE:g}, subtracting a baseline changes the area by {baseline} pp and "
        f"weighting right answers by {weighting} pp."
    ]


def verdict(name: str, task: Task, contrast: Contrast) -> str:
    """The primary contrast of a task in words, with the test of equality."""
    margin = SETTINGS[name].margin
    test = equal(task, margin=margin)
    shown = "equivalent" if test.equivalent else "equivalence is not shown"
    difference = points(contrast.result.difference)
    differences = {
        rate: task.contrast("area", at(PAPER, rate), at(GRPO, rate)).result.difference
        for rate in RATES
    }
    return (
        f"{sentence(contrast)} (difference {difference} pp, Holm's p {_p(contrast.p_holm)}; "
        f"{shown} with a margin of {100 * margin:g} pp, p {_p(test.p)}). By rate: "
        + listed([f"{points(each)} pp at {rate:g}" for rate, each in differences.items()])
    )


def _p(value: float) -> str:
    return "< .001" if value < 0.001 else f"= {value:.3f}".replace("= 0.", "= .")


def results(tasks: Mapping[str, Task], contrasts: Mapping[str, Contrast]) -> str:
    """The primary contrasts, then the secondary figures of each task."""
    if not tasks:
        return "No run has finished yet."
    parts = [
        bullets(
            [
                f"{spoken(name).capitalize()}: {verdict(name, tasks[name], contrasts[name])}."
                for name in tasks
            ]
        )
    ]
    for name, task in tasks.items():
        hours = sum(result.used("seconds") for result in task.runs) / 3600
        alt = f"Area over learning rate, and contrasts: {spoken(name)}"
        parts.append(
            f"### {spoken(name).capitalize()}\n\n"
            f"{picture(f'second-{name}', alt=alt)}\n\n"
            f"{by_rate(task)}\n\n{own_best(task)}\n\n"
            f"{len(task.runs)} runs, {hours:.1f} hours of training, base {bases(task)}."
        )
    return "\n\n".join(parts)


def bases(task: Task) -> str:
    """Fingerprints of the models that the runs of a task started from, shortened."""
    return listed(sorted({f"`{(run.base or 'unknown')[:19]}`" for run in task.runs}))


def by_rate(task: Task) -> str:
    """Both arms and their difference at each rate, over the seeds."""
    figures = ("area", "steps_to_threshold", "final", "greedy", "sampled")
    rows = []
    for rate in RATES:
        contrast = {each: task.contrast(each, at(PAPER, rate), at(GRPO, rate)) for each in figures}
        row = [f"{rate:g}", *(percent(task.mean(at(arm, rate), "area")) for arm in ARMS)]
        for each in figures:
            in_steps = each == "steps_to_threshold"
            row.append(
                signed(contrast[each].result.difference, scale=1 if in_steps else 100, digits=1)
            )
        rows.append(row)
    head = ["rate", *(f"{task.plan.metric} over training, {arm}" for arm in ARMS)]
    head += ["difference, pp", f"steps to {100 * task.plan.threshold:g} %", "final, pp"]
    return table(head + ["greedy, pp", "sampled, pp"], rows)


def own_best(task: Task) -> str:
    """The contrast of the arms at the rates where each does best, chosen on the same runs."""
    best = {
        arm: max(RATES, key=lambda rate, arm=arm: task.mean(at(arm, rate), "area").value)
        for arm in ARMS
    }
    contrast = task.contrast("area", at(PAPER, best[PAPER]), at(GRPO, best[GRPO]))
    return (
        f"Each at its own best rate of the grid, {PAPER} at {best[PAPER]:g} and {GRPO} at "
        f"{best[GRPO]:g}, chosen on the same runs: {points(contrast.result.difference)} pp."
    )


def spoken(name: str) -> str:
    """A task's name in words."""
    return name.replace("-", " ")


def main() -> int:
    """Write the plans of tasks without results, and the page."""
    PLANS.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS:
        if not (RESULTS / f"second-{name}").exists():
            _write(f"second-{name}", plan(name))
    if not (RESULTS / MECHANISM).exists():
        _write(MECHANISM, mechanism_plan())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def _write(name: str, made: Plan) -> None:
    text = f"# Written by studies/softrank/second.py.\n\n{toml(made)}"
    (PLANS / f"{name}.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
