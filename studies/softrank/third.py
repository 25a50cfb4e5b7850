"""The third part of the study: its plans, and the page of its results.

    python studies/softrank/third.py

writes both; `figures.py` draws the pictures.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np
from conditions import (
    CONTROL_SEEDS,
    EVALUATED,
    LONG,
    MARGIN,
    PARTS,
    RATE,
    REINFORCE,
    SEEDS,
    Contrast,
    done,
    folder,
    joined,
    plan,
    read_third,
)
from corrections import GRPO, PAPER, at
from coverage import DRAWS, against_itself, coverage
from design import power
from measured import RESULTS, Task, read_task
from mediators import sides
from second import MECHANISM, RATES, STEPS, averaged
from words import bullets, listed, percent, picture, points, signed, table, wrapped

from groupwise.evaluation import Equivalence, SeedDifference, equivalence, holm, paired_seeds
from groupwise.experiments.plan import toml

HERE = Path(__file__).parent
PLANS = HERE / "plans" / "third"
PAGE = HERE.parents[1] / "docs" / "studies" / "third-part.md"
CPU = RESULTS / "third-cpu.json"
"""Processor seconds of the runs of every part."""
ALPHA = 0.05
SECOND = "second-word-problems"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A primary contrast with its result.

    Attributes:
        title: heading of its part.
        contrast: what was planned.
        result: over seeds.
        p_holm: corrected over all planned contrasts.
        equal: the test of equality; None for a slope.
    """

    title: str
    contrast: Contrast
    result: SeedDifference
    p_holm: float
    equal: Equivalence | None


def contrasted(task: Task, contrast: Contrast) -> tuple[list[float], list[float]]:
    """Per seed, the positive and the negative part of a linear contrast."""
    areas = {arm: task.values(arm, "area") for arm in contrast.weights}
    return sides(areas, contrast.weights)


def primary(tasks: Mapping[str, Task]) -> dict[str, list[Found]]:
    """The primary contrasts by part, with Holm's p over all planned ones."""
    found = {
        name: [
            (each, contrasted(joined(tasks, name), each), each.unit) for each in PARTS[name].primary
        ]
        for name in done(tasks)
    }
    results = [paired_seeds(*sides) for each in found.values() for _, sides, _ in each]
    missing = [1.0] * (family() - len(results))
    corrected = iter(holm([result.p for result in results] + missing))
    return {
        name: [
            Found(
                title=PARTS[name].title,
                contrast=contrast,
                result=paired_seeds(*sides),
                p_holm=next(corrected),
                equal=equivalence(*sides, margin=MARGIN) if unit == "pp" else None,
            )
            for contrast, sides, unit in each
        ]
        for name, each in found.items()
    }


def told(found: Found) -> str:
    """A primary contrast in words."""
    verdict = "a difference is shown" if found.p_holm <= ALPHA else "no difference is shown"
    equal = ""
    if found.equal is not None:
        shown = "equivalent" if found.equal.equivalent else "equivalence is not shown"
        equal = f"; {shown} with a margin of {100 * MARGIN:g} pp, p {_p(found.equal.p)}"
    return (
        f"{capital(found.contrast.says)}: {points(found.result.difference)} {found.contrast.unit}; "
        f"{verdict} (p {_p(found.result.p)} alone, Holm's p {_p(found.p_holm)}{equal})."
    )


def capital(text: str) -> str:
    """The text with a capital first letter, the rest as it is."""
    return text[0].upper() + text[1:]


def uncapital(text: str) -> str:
    """The text with a small first letter, the rest as it is."""
    return text[0].lower() + text[1:]


def _p(value: float) -> str:
    return "< .001" if value < 0.001 else f"= {value:.3f}".replace("= 0.", "= .")


def family() -> int:
    """Number of primary contrasts."""
    return sum(len(part.primary) for part in PARTS.values())


def rows(task: Task, name: str) -> str:
    """Both arms and their difference in every condition of a part."""
    figures = ("area", "final", "greedy", "sampled")
    lines = []
    for words, first, second in PARTS[name].rows:
        found = [task.contrast(figure, first, second).result.difference for figure in figures]
        lines.append(
            [words, percent(task.mean(first, "area")), percent(task.mean(second, "area"))]
            + [signed(each, scale=100, digits=1) for each in found]
        )
    first = PAPER if len({row[2] for row in PARTS[name].rows}) > 1 else "arm"
    head = ["", f"accuracy over training, {first}", f"accuracy over training, {GRPO}"]
    return table([*head, "difference, pp", "final, pp", "greedy, pp", "sampled, pp"], lines)


def part(tasks: Mapping[str, Task], found: Mapping[str, list[Found]], name: str) -> str:
    """A finished part: its question, its primary contrasts and its conditions."""
    each = PARTS[name]
    task = joined(tasks, name)
    pieces = [f"### {each.title}", each.question]
    if found[name]:
        pieces.append(bullets([told(one) for one in found[name]]))
    if name == "strata":
        pieces.append(base_rates(task))
    return "\n\n".join([*pieces, rows(task, name), apart(task, name)])


def replicated() -> str:
    """The controls against each other on all of their seeds, which are fresh."""
    task = read_task(folder("controls"))
    if task is None or task.seeds < len(CONTROL_SEEDS):
        return "Not run yet."
    lines = []
    for first, second in ((PAPER, GRPO), (REINFORCE, GRPO), (PAPER, REINFORCE)):
        found = [task.contrast(f, first, second).result for f in ("area", "final", "sampled")]
        test = task.equivalence("area", first, second, margin=MARGIN)
        lines.append(
            [f"{first} − {second}", *(points(each.difference) for each in found)]
            + [f"{found[0].p:.3f}", f"{test.p:.3f}"]
        )
    head = ["", "area, pp", "final, pp", "sampled, pp", "p of the area"]
    return table([*head, f"p of equality within {100 * MARGIN:g} pp"], lines)


def apart(task: Task, name: str) -> str:
    """That the conditions of a part point both ways, where their intervals say so."""
    found = {
        words: task.contrast("area", first, second).result.difference
        for words, first, second in PARTS[name].rows
    }
    up = [f"{points(each)} pp ({words})" for words, each in found.items() if each.low > 0]
    down = [f"{points(each)} pp ({words})" for words, each in found.items() if each.high < 0]
    if not up or not down:
        return ""
    return (
        f"The conditions point both ways, so their mean says little: {listed([*up, *down])}, "
        "without a correction."
    )


def base_rates(task: Task) -> str:
    """Accuracy of the base model on the prompts of every stratum."""
    rates = []
    for words, arm, _ in PARTS["strata"].rows:
        first = next(iter(task.results[arm].values())).evaluations[0]
        rates.append(f"{100 * first['figures']['sampled']['value']:.0f} % ({words})")
    return f"Sampled accuracy before training, on {EVALUATED} held-out problems: {listed(rates)}."


def abstract(tasks: Mapping[str, Task], found: Mapping[str, list[Found]]) -> str:
    """The primary contrasts, one point each."""
    if not done(tasks):
        return "No part has been run yet."
    lines = [f"**{one.title}.** {told(one)}" for name in found for one in found[name]]
    lines += [
        f"**{PARTS[name].title}.** {text}"
        for name in found
        if (text := apart(joined(tasks, name), name))
    ]
    missing = [uncapital(PARTS[name].title) for name in PARTS if name not in done(tasks)]
    rest = [f"Not run: {listed(missing)}."] if missing else []
    return bullets([*lines, *rest])


def planned_hours(name: str) -> float:
    """Core-hours of a part if its steps take as long as those of the factorial."""
    task = read_task(MECHANISM)
    assert task is not None
    per_run = sum(run.used("seconds") for run in task.runs) / len(task.runs)
    made = plan(name)
    configs = [made.config(arm) for arm in made.arms]
    relative = sum(c.steps / STEPS * (1 + c.update.epochs) / 2 for c in configs)
    return per_run * relative * len(made.seeds) / 3600


def planned() -> str:
    """What is run, and what it will take."""
    lines = []
    for name in ("controls", *PARTS):
        made = plan(name)
        lines.append(
            [
                "Controls" if name == "controls" else PARTS[name].title,
                ", ".join(f"`{arm.label}`" for arm in made.arms),
                f"{made.seeds[0]} to {made.seeds[-1]}",
                str(len(made.arms) * len(made.seeds)),
                f"{planned_hours(name):.1f}",
            ]
        )
    return table(["part", "arms", "seeds", "runs", "core-hours, planned"], lines)


def used() -> str:
    """The processor time of the parts that were run."""
    if not CPU.exists():
        return ""
    seconds = json.loads(CPU.read_text(encoding="utf-8"))
    parts = [name for name in ("controls", *PARTS) if folder(name) in seconds]
    hours = sum(seconds[folder(name)] for name in parts) / 3600
    expected = sum(planned_hours(name) for name in parts)
    return (
        f"The runs took {hours:.1f} core-hours of processor time, evaluations included; training "
        f"was planned to take {expected:.1f}."
    )


def powers() -> str:
    """The power of a contrast of two arms, from the second edition's deviations."""
    second, factorial = read_task(SECOND), read_task(MECHANISM)
    assert second is not None and factorial is not None
    known = {
        f"{PAPER} − {GRPO}": second.contrast("area", at(PAPER, RATE), at(GRPO, RATE)),
        f"{PAPER} − {REINFORCE}": factorial.contrast("area", PAPER, REINFORCE),
    }
    lines = []
    for name, contrast in known.items():
        deviation = contrast.result.deviation
        for conditions in (1, 3):
            spread = deviation / math.sqrt(conditions)
            chances = [
                power(len(SEEDS), difference=d, deviation=spread, alpha=alpha)
                for alpha in (ALPHA, ALPHA / family())
                for d in (0.01, 0.02, 0.03)
            ]
            lines.append(
                [name, f"{100 * deviation:.1f} pp", str(conditions)]
                + [f"{chance:.2f}" for chance in chances]
            )
    head = ["contrast", "sd, one condition", "conditions averaged"]
    head += [f"{d} pp, α = .05" for d in (1, 2, 3)]
    head += [f"{d} pp, α = .05 / {family()}" for d in (1, 2, 3)]
    return table(head, lines)


def coverages() -> str:
    """Coverage of the intervals at the numbers of seeds in use, simulated from measured runs."""
    words, lists, factorial = (read_task(n) for n in (SECOND, "second-lists", MECHANISM))
    assert words is not None and lists is not None and factorial is not None
    sources = {
        "word problems, mean over the rates": _differences(
            averaged(words, "area", PAPER), averaged(words, "area", GRPO)
        ),
        f"word problems at {RATE:g}": _differences(
            words.values(at(PAPER, RATE), "area"), words.values(at(GRPO, RATE), "area")
        ),
        "lists, mean over the rates": _differences(
            averaged(lists, "area", PAPER), averaged(lists, "area", GRPO)
        ),
        f"factorial, {PAPER} and {REINFORCE}": _differences(
            factorial.values(PAPER, "area"), factorial.values(REINFORCE, "area")
        ),
    }
    counts = (8, 12, 16, 24)
    lines = [
        [f"covers: {name}", *(f"{100 * coverage(each, n):.1f} %" for n in counts)]
        for name, each in sources.items()
    ]
    for arm in (PAPER, GRPO):
        for rate in RATES:
            areas = list(words.values(at(arm, rate), "area").values())
            cells = [
                f"{100 * against_itself(areas, n):.1f} %" if 2 * n <= len(areas) else ""
                for n in counts
            ]
            lines.append([f"{arm} against {arm}: word problems at {rate:g}", *cells])
    return table(["", *(f"{n} seeds" for n in counts)], lines)


def _differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    return [float(np.float64(first[seed]) - second[seed]) for seed in first]


def pictures(parts: Collection[str]) -> dict[str, str]:
    """The pictures that the finished parts make; the others are left out."""
    drawn = {
        "forest": (PARTS, "All contrasts of the second edition and of this part"),
        "dose": (("temperature", "groups"), "Area over the temperature and the size of groups"),
        "curves": (("long",), f"Learning curves of {LONG} steps"),
    }
    return {
        name: picture(name, alt=alt) if {*needs} & {*parts} else ""
        for name, (needs, alt) in drawn.items()
    }


def page() -> str:
    """The plan and the results as Markdown."""
    tasks = read_third()
    found = primary(tasks)
    parts = "\n\n".join(part(tasks, found, name) for name in done(tasks))
    values = {
        "abstract": abstract(tasks, found),
        "rate": f"{RATE:g}",
        "steps": str(STEPS),
        "evaluated": str(EVALUATED),
        "seeds": f"{SEEDS[0]} to {SEEDS[-1]}",
        "control_seeds": f"{CONTROL_SEEDS[0]} to {CONTROL_SEEDS[-1]}",
        "planned": planned(),
        "primary": bullets(
            [f"{each.title}: {one.says}" for each in PARTS.values() for one in each.primary]
        ),
        "family": str(family()),
        "margin": f"{100 * MARGIN:g}",
        "power": powers(),
        "draws": f"{DRAWS:,}",
        "coverage": coverages(),
        "used": used(),
        "replicated": replicated(),
        "parts": parts or "Not run yet.",
        **pictures(done(tasks)),
    }
    text = Template((HERE / "third.md").read_text(encoding="utf-8")).substitute(values)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def main() -> int:
    """Write the plans of parts without results, and the page."""
    PLANS.mkdir(parents=True, exist_ok=True)
    for name in ("controls", *PARTS):
        if not (RESULTS / folder(name)).exists():
            text = f"# Written by studies/softrank/third.py.\n\n{toml(plan(name))}"
            (PLANS / f"{folder(name)}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
