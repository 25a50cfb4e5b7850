"""The search for an estimator that beats GRPO and SoftRank: its plans, and the page of its results.

    python studies/softrank/estimators.py

writes both. Candidates are compared on design seeds with stored runs of the second edition; the
finalist is run once on sealed seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import candidates  # noqa: F401 (registers the rows)
import numpy as np
import sealed
from corrections import EQUAL_RATES, GRPO, PAPER, at
from design import power
from measured import RESULTS, Task, read_task
from second import (
    MECHANISM,
    MECHANISM_RATE,
    RATES,
    SETTINGS,
    STEPS,
    common,
    main_effect,
    primary,
    spoken,
)
from third import CONTROL_SEEDS, EVALUATED
from words import listed, percent, points, table, wrapped

from groupwise.evaluation import SeedDifference, paired_seeds
from groupwise.experiments import Plan, make_plan
from groupwise.experiments.plan import toml

HERE = Path(__file__).parent
PLANS = HERE / "plans" / "estimators"
PAGE = HERE.parents[1] / "docs" / "studies" / "estimators.md"

DESIGN_RATE = 2e-4


@dataclass(frozen=True, kw_only=True)
class Round:
    """Candidates that are compared with stored runs of the controls.

    Attributes:
        folder: of the candidates' runs, and the name of their plan.
        candidates: settings of each, by label; the row is that of the label unless named.
        seeds: of the candidates and the controls.
        evaluation: settings of the evaluation after training.
        controls: folder of the controls' runs.
        labels: the controls' labels there.
    """

    folder: str
    candidates: Mapping[str, Mapping[str, object]]
    seeds: range
    controls: str
    labels: Mapping[str, str]
    evaluation: tuple[str, ...] = ()


FIRST = Round(
    folder="estimators-design",
    candidates={
        name: {}
        for name in (
            "softrank_adaptive", "softrank_shrunk", "softrank_loo", "james_stein",
            "anchored_zscore",
        )
    },
    seeds=range(2000, 2004),
    controls="second-word-problems",
    labels={each: at(each, DESIGN_RATE) for each in sealed.CONTROLS},
)  # fmt: skip
ANNEALED = 0.5, 5.0
"""τ at the first and at the last step."""
AGAIN = Round(
    folder="estimators-design-again",
    candidates={
        "softrank_adaptive": {},
        "softrank_annealed": {
            "algorithm": PAPER,
            "set": [
                'schedules=[{setting="algorithm.advantage.tau", '
                f"points=[[1, {ANNEALED[0]}], [{STEPS}, {ANNEALED[1]}]]}}]"
            ],
        },
        "floored": {},
    },
    seeds=CONTROL_SEEDS,
    controls="third-0-controls",
    labels={each: each for each in sealed.CONTROLS},
    evaluation=(f"evaluation.prompts={EVALUATED}", "evaluation.samples=1"),
)
ROUNDS = (FIRST, AGAIN)


def design_plan(design: Round) -> Plan:
    """Every candidate on word problems at the highest rate."""
    values = common(SETTINGS["word-problems"])
    shared = values.pop("set")
    assert isinstance(shared, list)
    return make_plan(
        {
            **values,
            "set": [*shared, *design.evaluation],
            "title": "Estimators: candidates on design seeds",
            "seeds": list(design.seeds),
            "against": next(iter(design.candidates)),
            "hypotheses": ["A candidate has a larger area than GRPO and SoftRank."],
            "arms": [
                {"label": name, "algorithm": name, "learning_rate": DESIGN_RATE, **settings}
                for name, settings in design.candidates.items()
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


def differences(design: Round, task: Task, candidate: str) -> dict[str, SeedDifference]:
    """Area of a candidate minus that of each control on the design seeds."""
    controls = read_task(design.controls)
    if controls is None:
        return {}
    own = task.values(candidate, "area")
    found = {}
    for control, label in design.labels.items():
        theirs = controls.values(label, "area")
        found[control] = paired_seeds([own[s] for s in own], [theirs[s] for s in own])
    return found


def read_design(design: Round) -> Task | None:
    """The runs of the candidates; None before all have finished."""
    task = read_task(design.folder)
    return task if task is not None and task.seeds == len(design.seeds) else None


def design_results(design: Round) -> str:
    """The candidates on the design seeds, best first."""
    task = read_design(design)
    if task is None:
        return "Not run yet."
    areas = {name: task.mean(name, "area") for name in design.candidates}
    rows = [
        [f"`{name}`", percent(areas[name])]
        + [points(each.difference) for each in differences(design, task, name).values()]
        for name in sorted(areas, key=lambda name: -areas[name].value)
    ]
    return table(
        ["candidate", "accuracy over training", *(f"− {c}" for c in sealed.CONTROLS)], rows
    )


def eligible(design: Round, task: Task) -> list[str]:
    """Candidates whose mean area on the design seeds lies above that of both controls."""
    return [
        name
        for name in design.candidates
        if all(each.difference.value > 0 for each in differences(design, task, name).values())
    ]


def outcome(design: Round) -> str:
    """What the rule says of a round: who is eligible, or that nobody is."""
    task = read_design(design)
    if task is None:
        return ""
    best = max(design.candidates, key=lambda name: task.mean(name, "area").value)
    found = differences(design, task, best)
    told = listed([f"{points(each.difference)} pp against {c}" for c, each in found.items()])
    seeds = f"the {len(design.seeds)} design seeds"
    if names := eligible(design, task):
        who = listed([f"`{name}`" for name in names])
        return f"Above both controls on {seeds}: {who}. The best, `{best}`, is {told}."
    return f"No candidate is above both controls on {seeds}; the best, `{best}`, is {told}."


def finalist() -> str:
    """Who was named, or that the search ended without a finalist."""
    if sealed.FINALIST is not None:
        return f"The finalist is `{sealed.FINALIST}`."
    done = [(design, task) for design in ROUNDS if (task := read_design(design)) is not None]
    told = " ".join(outcome(design) for design, _ in done)
    if any(eligible(design, task) for design, task in done) or not done:
        return f"{told} No finalist has been named yet.".strip()
    return f"{told} By the rule the search ends there, and the sealed seeds stay sealed."


def verdict() -> str:
    """What the sealed runs say, or that there are none yet."""
    if sealed.FINALIST is None:
        return f"Nothing won. {finalist()}"
    if not sealed.read_sealed():
        told = " ".join(filter(None, (outcome(design) for design in ROUNDS)))
        return f"No estimator has won yet. {told} {finalist()} The sealed runs have not been made."
    return sealed.verdict()


def power_sentence() -> str:
    """The chance to see a difference of one and two points, from the second edition's runs."""
    task = read_task(FIRST.controls)
    if task is None:
        return "Not known."
    deviation = primary(task).result.deviation
    chances = [power(len(sealed.SEEDS), difference=d, deviation=deviation) for d in (0.01, 0.02)]
    return (
        f"On word problems the averaged difference of {PAPER} and {GRPO} has a standard "
        f"deviation of {100 * deviation:.1f} pp over seeds. With {len(sealed.SEEDS)} seeds, one "
        f"contrast sees a true difference of 1 pp with probability {chances[0]:.2f} and one of "
        f"2 pp with {chances[1]:.2f}; a win takes two contrasts on each of "
        f"{len(sealed.FIRST_TASKS)} tasks."
    )


def page() -> str:
    """The protocol and the results as Markdown."""
    values = {
        "verdict": verdict(),
        "known": known(),
        "rates": listed([f"{rate:g}" for rate in RATES]),
        "design_rate": f"{DESIGN_RATE:g}",
        "design_seeds": f"{FIRST.seeds[0]} to {FIRST.seeds[-1]}",
        "again_seeds": f"{AGAIN.seeds[0]} to {AGAIN.seeds[-1]}",
        "annealed": f"{ANNEALED[0]:g} to {ANNEALED[1]:g}",
        "sealed_seeds": f"{sealed.SEEDS[0]} to {sealed.SEEDS[-1]}",
        "sealed_tasks": listed([spoken(name) for name in sealed.FIRST_TASKS]),
        "power": power_sentence(),
        "design": design_results(FIRST),
        "outcome": outcome(FIRST),
        "again": f"{design_results(AGAIN)}\n\n{outcome(AGAIN)}".strip(),
        "grpo_rate": f"{sealed.GRPO_RATE:g}",
        "grpo_seeds": f"{sealed.GRPO_SEEDS[0]} to {sealed.GRPO_SEEDS[-1]}",
        "further": sealed.further(),
        "sealed": sealed.results() if sealed.FINALIST else "Not opened.",
    }
    text = Template((HERE / "estimators.md").read_text(encoding="utf-8")).substitute(values)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def main() -> int:
    """Write the plans without results, and the page."""
    PLANS.mkdir(parents=True, exist_ok=True)
    plans = {design.folder: design_plan(design) for design in ROUNDS}
    if sealed.FINALIST is not None:
        plans |= {f"estimators-{name}": sealed.plan(name, sealed.FINALIST) for name in sealed.TASKS}
    plans |= {f"estimators-{name}-grpo": sealed.grpo_plan(name) for name in sealed.FURTHER_TASKS}
    for name, made in plans.items():
        if not (RESULTS / name).exists():
            text = f"# Written by studies/softrank/estimators.py.\n\n{toml(made)}"
            (PLANS / f"{name}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
