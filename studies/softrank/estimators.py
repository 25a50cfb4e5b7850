"""The search for an estimator that beats GRPO and SoftRank: its plans, and the page of its results.

    python studies/softrank/estimators.py

writes both. Candidates are compared on design seeds with stored runs of the second edition; the
finalist is run once on sealed seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from string import Template

import candidates  # noqa: F401 (registers the rows)
import numpy as np
from corrections import EQUAL_RATES, GRPO, PAPER, at
from design import power
from measured import RESULTS, Task, read_task
from second import (
    DIFFERENCE,
    MECHANISM,
    MECHANISM_RATE,
    RATES,
    SEALED,
    SETTINGS,
    Setting,
    averaged,
    common,
    main_effect,
    primary,
    spoken,
)
from words import listed, percent, points, table, wrapped

from groupwise.evaluation import SeedDifference, paired_seeds
from groupwise.experiments import Plan, make_plan
from groupwise.experiments.plan import toml

HERE = Path(__file__).parent
PLANS = HERE / "plans" / "estimators"
PAGE = HERE.parents[1] / "docs" / "studies" / "estimators.md"

CANDIDATES = ("softrank_adaptive", "softrank_shrunk", "softrank_loo", "james_stein",
              "anchored_zscore")  # fmt: skip
CONTROLS = (GRPO, PAPER)
DESIGN = "estimators-design"
DESIGN_RATE = 2e-4
DESIGN_SEEDS = range(2000, 2004)
CONTROL_RUNS = "second-word-problems"
"""Folder of the stored runs of the controls on the design seeds."""
FINALIST: str | None = None
"""Named in a commit of its own after the design runs and before any sealed run."""
SEALED_SEEDS = range(SEALED[0], SEALED[0] + 8)
SEALED_TASKS = {
    "word-problems": SETTINGS["word-problems"],
    "lists": SETTINGS["lists"],
    "sharpening": Setting(
        recipe="word-problems", reward="0 or 1", metric="accuracy", threshold=0.8,
        margin=DIFFERENCE, seeds=len(SEALED_SEEDS), more=("model.path=runs/study/sharpening/sft",),
    ),
}  # fmt: skip


def design_plan() -> Plan:
    """Every candidate on word problems at the highest rate."""
    return make_plan(
        {
            **common(SETTINGS["word-problems"]),
            "title": "Estimators: candidates on design seeds",
            "seeds": list(DESIGN_SEEDS),
            "against": CANDIDATES[0],
            "hypotheses": ["A candidate has a larger area than GRPO and SoftRank."],
            "arms": [
                {"label": name, "algorithm": name, "learning_rate": DESIGN_RATE}
                for name in CANDIDATES
            ],
        }
    )


def sealed_plan(name: str, finalist: str) -> Plan:
    """The finalist and both controls at every rate, on the sealed seeds of a task."""
    return make_plan(
        {
            **common(SEALED_TASKS[name]),
            "title": f"Estimators: {finalist} on sealed seeds, {spoken(name)}",
            "seeds": list(SEALED_SEEDS),
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


def known() -> str:
    """What the stored runs of both editions say about baselines and weights."""
    factorial, lists = read_task(MECHANISM), read_task(EQUAL_RATES)
    graded = read_task("lists")
    if factorial is None or lists is None or graded is None:
        return "Not known."
    early, late = (
        points(weights_gain(factorial, part).difference)
        for part in (slice(0, 20), slice(-20, None))
    )
    rate = f"{MECHANISM_RATE:g}"
    rates = sorted({lists.rate(arm) for arm in lists.arms})
    behind = [
        f"{points(lists.contrast('area', at(PAPER, r), at(GRPO, r)).result.difference)} pp at {r:g}"
        for r in rates
    ]
    uniform = graded.contrast("area", "reinforce", PAPER).result.difference
    return (
        f"On word problems at {rate}, subtracting a baseline changes the area by "
        f"{points(main_effect(factorial, 0).difference)} pp. {PAPER} minus reinforce, that is, "
        f"its weights instead of uniform ones, is {early} pp of mean accuracy over the first 20 "
        f"steps and {late} pp over the last 20. On lists, whose reward is graded, reinforce minus "
        f"{PAPER} is {points(uniform)} pp of the area, and {PAPER} minus {GRPO} {listed(behind)}."
    )


def weights_gain(task: Task, part: slice) -> SeedDifference:
    """Mean accuracy over some steps, SoftRank minus REINFORCE, paired by seed."""
    a, b = (
        [
            float(np.asarray(run.curve["accuracy"], dtype=float)[part].mean())
            for _, run in sorted(task.results[arm].items())
        ]
        for arm in (PAPER, "reinforce")
    )
    return paired_seeds(a, b)


def differences(design: Task, candidate: str) -> dict[str, SeedDifference]:
    """Area of a candidate minus that of each control on the design seeds."""
    controls = read_task(CONTROL_RUNS)
    if controls is None:
        return {}
    own = design.values(candidate, "area")
    found = {}
    for control in CONTROLS:
        theirs = controls.values(at(control, DESIGN_RATE), "area")
        found[control] = paired_seeds([own[s] for s in own], [theirs[s] for s in own])
    return found


def design_results() -> str:
    """The candidates on the design seeds, best first."""
    task = read_task(DESIGN)
    if task is None or task.seeds < len(DESIGN_SEEDS):
        return "Not run yet."
    areas = {name: task.mean(name, "area") for name in CANDIDATES}
    rows = [
        [f"`{name}`", percent(areas[name])]
        + [points(each.difference) for each in differences(task, name).values()]
        for name in sorted(CANDIDATES, key=lambda name: -areas[name].value)
    ]
    return table(["candidate", "accuracy over training", *(f"− {c}" for c in CONTROLS)], rows)


def eligible(task: Task) -> list[str]:
    """Candidates whose mean area on the design seeds lies above that of both controls."""
    return [
        name
        for name in CANDIDATES
        if all(each.difference.value > 0 for each in differences(task, name).values())
    ]


def finalist() -> str:
    """Who was named, or that the search ended without a finalist."""
    if FINALIST is not None:
        return f"The finalist is `{FINALIST}`."
    task = read_task(DESIGN)
    if task is None or task.seeds < len(DESIGN_SEEDS) or eligible(task):
        return "No finalist has been named yet."
    best = max(CANDIDATES, key=lambda name: task.mean(name, "area").value)
    found = differences(task, best)
    told = listed([f"{points(each.difference)} pp against {c}" for c, each in found.items()])
    return (
        f"No candidate is above both controls on the {len(DESIGN_SEEDS)} design seeds; the best, "
        f"`{best}`, is {told}. By the rule the search ends there, and the sealed seeds stay sealed."
    )


def read_sealed() -> dict[str, Task]:
    """The sealed tasks whose every run has finished."""
    found = {name: read_task(f"estimators-{name}") for name in SEALED_TASKS}
    return {
        name: task
        for name, task in found.items()
        if task is not None and task.seeds == len(SEALED_SEEDS)
    }


def sealed_differences(task: Task) -> dict[str, SeedDifference]:
    """Area of the finalist minus that of each control, averaged over the rates."""
    assert FINALIST is not None
    return {control: primary(task, FINALIST, control).result for control in CONTROLS}


def won(task: Task) -> bool:
    """Whether the intervals of both contrasts lie above 0."""
    return all(each.difference.low > 0 for each in sealed_differences(task).values())


def sealed_results() -> str:
    """Both contrasts of every sealed task, and the verdict."""
    assert FINALIST is not None
    tasks = read_sealed()
    missing = [spoken(name) for name in SEALED_TASKS if name not in tasks]
    rows = []
    for name, task in tasks.items():
        means = [100 * sum(v := averaged(task, "area", arm).values()) / len(v)
                 for arm in (FINALIST, *CONTROLS)]  # fmt: skip
        found = sealed_differences(task)
        rows.append(
            [spoken(name), *(f"{mean:.1f} %" for mean in means)]
            + [points(each.difference) for each in found.values()]
            + ["yes" if won(task) else "no"]
        )
    head = ["task", f"{FINALIST}", *CONTROLS, *(f"− {c}" for c in CONTROLS), "above both"]
    parts = [table(head, rows)] if rows else []
    if missing:
        parts.append(f"Not run: {listed(missing)}.")
    return "\n\n".join(parts)


def verdict() -> str:
    """What the sealed runs say, in one sentence."""
    tasks = read_sealed()
    if FINALIST is None or not tasks:
        return f"Nothing won. {finalist()}" if FINALIST is None else "No sealed run has finished."
    wins = [spoken(name) for name, task in tasks.items() if won(task)]
    rule = "met" if len(wins) == len(SEALED_TASKS) else "not met"
    where = f" ({listed(wins)})" if wins else ""
    return (
        f"`{FINALIST}` is above both {GRPO} and {PAPER} on {len(wins)} of {len(SEALED_TASKS)} "
        f"sealed tasks{where}, of which {len(tasks)} were run: the rule is {rule}."
    )


def power_sentence() -> str:
    """The chance to see a difference of one and two points, from the second edition's runs."""
    task = read_task(CONTROL_RUNS)
    if task is None:
        return "Not known."
    deviation = primary(task).result.deviation
    chances = [power(len(SEALED_SEEDS), difference=d, deviation=deviation) for d in (0.01, 0.02)]
    return (
        f"On word problems the averaged difference of {PAPER} and {GRPO} has a standard "
        f"deviation of {100 * deviation:.1f} pp over seeds. With {len(SEALED_SEEDS)} seeds, one "
        f"contrast sees a true difference of 1 pp with probability {chances[0]:.2f} and one of "
        f"2 pp with {chances[1]:.2f}; a win takes two contrasts on each of {len(SEALED_TASKS)} "
        "tasks."
    )


def page() -> str:
    """The protocol and the results as Markdown."""
    values = {
        "verdict": verdict(),
        "known": known(),
        "rates": listed([f"{rate:g}" for rate in RATES]),
        "design_rate": f"{DESIGN_RATE:g}",
        "design_seeds": f"{DESIGN_SEEDS[0]} to {DESIGN_SEEDS[-1]}",
        "sealed_seeds": f"{SEALED_SEEDS[0]} to {SEALED_SEEDS[-1]}",
        "sealed_tasks": listed([spoken(name) for name in SEALED_TASKS]),
        "power": power_sentence(),
        "design": design_results(),
        "finalist": finalist(),
        "sealed": sealed_results() if FINALIST else "Not opened.",
    }
    text = Template((HERE / "estimators.md").read_text(encoding="utf-8")).substitute(values)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def main() -> int:
    """Write the plans without results, and the page."""
    PLANS.mkdir(parents=True, exist_ok=True)
    plans = {DESIGN: design_plan()}
    if FINALIST is not None:
        plans |= {f"estimators-{name}": sealed_plan(name, FINALIST) for name in SEALED_TASKS}
    for name, made in plans.items():
        if not (RESULTS / name).exists():
            text = f"# Written by studies/softrank/estimators.py.\n\n{toml(made)}"
            (PLANS / f"{name}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
