"""The sealed part of the search for an estimator: its tasks, plans and verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from corrections import GRPO, PAPER, at
from measured import Task, read_task
from second import DIFFERENCE, RATES, SEALED, SETTINGS, Setting, averaged, common, primary, spoken
from words import listed, picture, points, table

from groupwise.evaluation import Estimate, SeedDifference, paired_seeds
from groupwise.experiments import Plan, make_plan

CONTROLS = (GRPO, PAPER)
FINALIST: str | None = "softrank_adaptive"
"""Named in a commit of its own after the design runs and before any sealed run."""
SEEDS = range(SEALED[0], SEALED[0] + 8)
FIRST_TASKS = {
    "word-problems": SETTINGS["word-problems"],
    "lists": SETTINGS["lists"],
    "sharpening": Setting(
        recipe="word-problems", reward="0 or 1", metric="accuracy", threshold=0.8,
        margin=DIFFERENCE, seeds=len(SEEDS), more=("model.path=runs/study/sharpening/sft",),
    ),
}  # fmt: skip
"""The tasks that the finalist must win."""
FURTHER_TASKS = {
    name: Setting(
        recipe=f"studies/softrank/{name}.toml", reward="0 or 1", metric="accuracy",
        threshold=threshold, margin=DIFFERENCE, seeds=len(SEEDS), more=("evaluation.samples=1",),
    )
    for name, threshold in (("knights-knaves", 0.5), ("countdown", 0.3))
}  # fmt: skip
"""The tasks that joined before any sealed run, for the second question."""
BASES = {
    "knights-knaves": "sha256:d4802d4b2659af65d1c0f9ba848bfe6930947553a67abe029f207e18ac3d2fab",
    "countdown": "sha256:1aae57968da6184c35629e1ac12caad16ec56d48834d669d2c3feaef32968315",
}
"""Fingerprints of the base models of the further tasks, fixed before any sealed run."""
GRPO_RATE = RATES[1]
GRPO_SEEDS = range(2000, 2003)
TASKS = {**FIRST_TASKS, **FURTHER_TASKS}
ENOUGH = 3
"""Tasks of five on which the secondary targets ask for a win."""
FEWER = 0.85
"""The targeted ratio of tokens to the threshold."""


def plan(name: str, finalist: str) -> Plan:
    """The finalist and both controls at every rate, on the sealed seeds of a task."""
    return make_plan(
        {
            **common(TASKS[name]),
            "title": f"Estimators: {finalist} on sealed seeds, {spoken(name)}",
            "seeds": list(SEEDS),
            "against": at(GRPO, RATES[1]),
            "hypotheses": [
                f"The area of {finalist} minus that of {control}, averaged over the rates, is "
                "above 0."
                for control in CONTROLS
            ],
            "arms": [
                {"label": at(label, rate), "algorithm": label, "learning_rate": rate}
                for label in (finalist, *CONTROLS)
                for rate in RATES
            ],
        }
    )


def grpo_plan(name: str) -> Plan:
    """GRPO alone on design seeds of a further task; its runs give the threshold."""
    return make_plan(
        {
            **common(FURTHER_TASKS[name]),
            "threshold": 0.5,
            "title": f"Estimators: {GRPO} on design seeds, {spoken(name)}",
            "seeds": list(GRPO_SEEDS),
            "against": GRPO,
            "hypotheses": ["The accuracy rises."],
            "arms": [{"label": GRPO, "algorithm": GRPO, "learning_rate": GRPO_RATE}],
        }
    )


def halfway(task: Task) -> float:
    """Midway between the first and the last tenth of GRPO's steps, to the nearest 5 %."""
    start, end = task.first(GRPO, "accuracy"), task.last(GRPO, "accuracy")
    return round(20 * (start + end) / 2) / 20


def named(name: str) -> str:
    """The name of a task on the page."""
    return spoken(name).replace("knights knaves", "knights and knaves")


def further() -> str:
    """The further tasks with their bases, and how GRPO fares on them."""
    rows = []
    for name, setting in FURTHER_TASKS.items():
        task = read_task(f"estimators-{name}-grpo")
        if task is not None:
            start, end = (100 * get(GRPO, "accuracy") for get in (task.first, task.last))
            rows.append(
                [named(name), f"`{BASES[name][:19]}`", f"{start:.0f} %", f"{end:.0f} %"]
                + [f"{100 * setting.threshold:g} %"]
            )
    head = ["task", "base", f"{GRPO}, first tenth", f"{GRPO}, last tenth", "threshold"]
    return table(head, rows)


def read_sealed() -> dict[str, Task]:
    """The sealed tasks whose every run has finished."""
    found = {name: read_task(f"estimators-{name}") for name in TASKS}
    return {
        name: task for name, task in found.items() if task is not None and task.seeds == len(SEEDS)
    }


def differences(task: Task) -> dict[str, SeedDifference]:
    """Area of the finalist minus that of each control, averaged over the rates."""
    assert FINALIST is not None
    return {control: primary(task, FINALIST, control).result for control in CONTROLS}


def won(task: Task) -> bool:
    """Whether the intervals of both contrasts lie above 0."""
    return all(each.difference.low > 0 for each in differences(task).values())


def tokens_to_threshold(task: Task, arm: str) -> dict[int, float]:
    """Tokens generated up to the step at which a run's smoothed curve reaches the threshold of the
    plan, by seed; all of its tokens where it never does."""
    found = {}
    for seed, summary in task.summaries(arm).items():
        curve = task.results[arm][seed].curve
        found[seed] = float(curve["tokens"][list(curve["step"]).index(summary.steps_to_threshold)])
    return found


def token_ratios(task: Task) -> dict[str, Estimate]:
    """Tokens to the threshold, finalist over each control: the mean over seeds of the log ratio,
    itself averaged over the rates, with its t interval, as a ratio."""
    assert FINALIST is not None
    logs = {
        arm: np.mean(
            [np.log([*tokens_to_threshold(task, at(arm, rate)).values()]) for rate in RATES], axis=0
        )
        for arm in (FINALIST, *CONTROLS)
    }
    found = {each: paired_seeds(logs[FINALIST], logs[each]).difference for each in CONTROLS}
    return {
        control: Estimate(**{end: math.exp(value) for end, value in vars(each).items()})
        for control, each in found.items()
    }


def unreached(task: Task, arm: str) -> str:
    """How many runs of an arm never reach the threshold, of how many."""
    reached = [one.reached for rate in RATES for one in task.summaries(at(arm, rate)).values()]
    return f"{reached.count(False)} of {len(reached)}"


def saves(task: Task) -> bool:
    """Whether the ratio of tokens to the threshold is low enough against both controls."""
    return all(each.value <= FEWER for each in token_ratios(task).values())


def results() -> str:
    """Both contrasts of every sealed task, those of its rates, and tokens to the threshold."""
    assert FINALIST is not None
    tasks = read_sealed()
    missing = [named(name) for name in TASKS if name not in tasks]
    rows = []
    for name, task in tasks.items():
        means = [
            100 * sum(v := averaged(task, "area", arm).values()) / len(v)
            for arm in (FINALIST, *CONTROLS)
        ]
        rows.append(
            [named(name), *(f"{mean:.1f} %" for mean in means)]
            + [points(each.difference) for each in differences(task).values()]
            + ["yes" if won(task) else "no"]
        )
    head = ["task", FINALIST, *CONTROLS, *(f"− {c}" for c in CONTROLS), "above both"]
    parts = [table(head, rows)] if rows else []
    if missing:
        parts.append(f"Not run: {listed(missing)}.")
    if rows:
        alt = "Differences of the area by task and learning rate"
        parts += [tokens_table(tasks), equal_rates(tasks), picture("heat-sealed", alt=alt)]
        parts.append("Bold where the 95 % interval excludes 0.")
    return "\n\n".join(parts)


def tokens_table(tasks: dict[str, Task]) -> str:
    """Tokens to the threshold, by task."""
    assert FINALIST is not None
    rows = [
        [named(name), f"{100 * task.plan.threshold:g} %"]
        + [_ratio(each) for each in token_ratios(task).values()]
        + [unreached(task, arm) for arm in (FINALIST, *CONTROLS)]
        for name, task in tasks.items()
    ]
    head = ["task", "threshold", *(f"/ {c}" for c in CONTROLS)]
    head += [f"{arm}, not reached" for arm in (FINALIST, *CONTROLS)]
    return (
        f"Tokens to the threshold, {FINALIST} over each control, and runs that never reach it:\n\n"
        f"{table(head, rows)}"
    )


def _ratio(value: Estimate) -> str:
    return f"{value.value:.2f}" + (f" [{value.low:.2f}, {value.high:.2f}]" if value.known else "")


def equal_rates(tasks: dict[str, Task]) -> str:
    """Every pair of arms at each rate; secondary, without correction."""
    assert FINALIST is not None
    rows = [
        [named(name), f"{first} − {second}"]
        + [points(each.difference) for each in by_rate(task, first, second)]
        for name, task in tasks.items()
        for first, second in pairs()
    ]
    head = ["task", "contrast", "mean over the rates", *(f"{rate:g}" for rate in RATES)]
    return (
        "Area at equal learning rates, in pp, secondary and without correction; "
        f"{PAPER} − {GRPO} is the contrast of the second edition:\n\n{table(head, rows)}"
    )


def pairs() -> Sequence[tuple[str, str]]:
    """The contrasts of the three arms."""
    assert FINALIST is not None
    return ((FINALIST, GRPO), (FINALIST, PAPER), (PAPER, GRPO))


def by_rate(task: Task, first: str, second: str) -> list[SeedDifference]:
    """The difference of two arms averaged over the rates, then at each."""
    at_rates = [task.contrast("area", at(first, rate), at(second, rate)).result for rate in RATES]
    return [primary(task, first, second).result, *at_rates]


def verdict() -> str:
    """What the sealed runs say: by the rule, then by the two secondary questions."""
    tasks = read_sealed()
    wins = [name for name, task in tasks.items() if won(task)]
    saved = [name for name, task in tasks.items() if saves(task)]
    needed = [name for name in wins if name in FIRST_TASKS]
    missing = [name for name in TASKS if name not in tasks]
    first = [name for name in missing if name in FIRST_TASKS]
    return (
        f"`{FINALIST}` is above both {GRPO} and {PAPER} on {_share(needed, FIRST_TASKS)} "
        f"sealed tasks that the rule names: the rule is {_met(needed, len(FIRST_TASKS), first)}. "
        f"With the two further tasks, {len(tasks)} of {len(TASKS)} were run and it is above both "
        f"on {_share(wins, TASKS)}; the target of at least {ENOUGH} is "
        f"{_met(wins, ENOUGH, missing)}. It needs at most {FEWER:g} of the tokens of each control "
        f"up to the threshold on {_share(saved, TASKS)}; the target of at least {ENOUGH} is "
        f"{_met(saved, ENOUGH, missing)}."
    )


def _share(names: Sequence[str], total: Collection[str]) -> str:
    told = f" ({listed([named(name) for name in names])})" if names else ""
    return f"{len(names)} of {len(total)}{told}"


def _met(names: Sequence[str], wanted: int, missing: Sequence[str]) -> str:
    """Whether enough tasks are won, or could be by those not run."""
    if len(names) >= wanted:
        return "met"
    return "open" if len(names) + len(missing) >= wanted else "not met"
