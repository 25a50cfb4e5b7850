"""The fourth part of the study: its plans, and the page of its results.

    python studies/softrank/fourth.py

writes both; `figures.py` draws the pictures.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

import numpy as np
from conditions import MARGIN, REINFORCE, Contrast
from corrections import GRPO, PAPER, at
from design import power
from fourth_design import (
    CELLS,
    CLIPPED,
    EFFECTS,
    GRID_ARMS,
    GRID_RATES,
    GRID_SEEDS,
    KNOWN_RATES,
    LARGE_LEAD,
    LARGE_RATE,
    LARGE_STEPS,
    NEW_RATES,
    NEW_RATES_LEAD,
    NORM_SEEDS,
    PARTS,
    PLANS,
    RATE,
    SECOND,
    SEEDS,
    STRATA,
    STRATA_ANSWERS,
    STRATA_PROMPTS,
    STRATUM_LEADS,
    WIDTHS,
    read_fourth,
)
from measured import RESULTS, Task, read_task
from mediators import direct_effect, over_training, sides
from rates import DEGREE, POINTS, Grid, Sides, at_best, at_equal_norm, grid, read_norms
from second import STEPS
from strata import STORED as STRATA_STORED
from third import ALPHA, Found, told
from words import bullets, listed, percent, picture, points, ratio, signed, table, wrapped

from groupwise.algorithms.advantages.statistics import softmax, standard_score
from groupwise.evaluation import equivalence, holm, paired_seeds, seed_mean
from groupwise.experiments.plan import toml
from groupwise.training.stages.recipe import base_of, base_phases

HERE = Path(__file__).parent
FOLDER = HERE / "plans" / "fourth"
PAGE = HERE.parents[1] / "docs" / "studies" / "fourth-part.md"
CPU = RESULTS / "fourth-cpu.json"
COSINES = RESULTS / "fourth-variance.json"
GROUP = 8
PAIRS = ((PAPER, GRPO), (REINFORCE, GRPO), (PAPER, REINFORCE))

BEST = Contrast(
    says="SoftRank minus GRPO, each at the rate that is best on the other half of the seeds",
    short="best rates", weights={},
)  # fmt: skip
EQUAL_NORM = Contrast(
    says="SoftRank minus GRPO at equal norm of the update, mean over the norms that both reach",
    short="equal norm of the update", weights={},
)  # fmt: skip
PRIMARY: Mapping[str, tuple[Contrast, ...]] = {
    "rates": (NEW_RATES_LEAD, BEST, EQUAL_NORM),
    "mechanism": EFFECTS,
    "strata": STRATUM_LEADS,
    "large": (LARGE_LEAD,),
}
"""By part."""


def areas_of(task: Task) -> Grid:
    """The areas of the grid of learning rates."""
    return grid(task, GRID_ARMS, GRID_RATES, GRID_SEEDS)


def compared(task: Task, contrast: Contrast) -> Sides | None:
    """Both sides of a primary contrast by seed; None where it cannot be computed."""
    if contrast is BEST:
        return at_best(areas_of(task), (PAPER, GRPO), GRID_RATES).sides
    if contrast is EQUAL_NORM:
        norms = read_norms()
        return at_equal_norm(areas_of(task), (PAPER, GRPO), norms, GRID_RATES) if norms else None
    return sides({arm: task.values(arm, "area") for arm in contrast.weights}, contrast.weights)


def family() -> int:
    """Number of primary contrasts."""
    return sum(map(len, PRIMARY.values()))


def primary(tasks: Mapping[str, Task]) -> dict[str, list[Found]]:
    """The primary contrasts by part, with Holm's p over all planned ones."""
    found = [
        (name, contrast, both)
        for name, task in tasks.items()
        for contrast in PRIMARY[name]
        if (both := compared(task, contrast)) is not None
    ]
    results = [paired_seeds(*both) for _, _, both in found]
    corrected = holm([each.p for each in results] + [1.0] * (family() - len(results)))
    by_part: dict[str, list[Found]] = {name: [] for name in tasks}
    for (name, contrast, both), result, p in zip(found, results, corrected, strict=False):
        equal = equivalence(*both, margin=MARGIN)
        by_part[name].append(
            Found(title=PARTS[name][0], contrast=contrast, result=result, p_holm=p, equal=equal)
        )
    return by_part


def abstract(tasks: Mapping[str, Task], found: Mapping[str, list[Found]]) -> str:
    """The primary contrasts, one point each."""
    lines = [f"**{one.title}.** {told(one)}" for each in found.values() for one in each]
    missing = [title.lower() for name, (title, _) in PARTS.items() if name not in tasks]
    rest = [f"Not run: {listed(missing)}."] if missing else []
    return bullets([*lines, *rest])


def by_rate(task: Task) -> str:
    """All arms at every rate, with their differences."""
    lines = []
    for rate in GRID_RATES:
        means = [percent(task.mean(at(arm, rate), "area")) for arm in GRID_ARMS]
        found = [
            points(task.contrast("area", at(a, rate), at(b, rate)).result.difference)
            for a, b in PAIRS
        ]
        final = task.contrast("final", at(PAPER, rate), at(GRPO, rate)).result.difference
        lines.append([f"{rate:g}", *means, *found, points(final)])
    head = ["rate", *(f"accuracy over training, {arm}" for arm in GRID_ARMS)]
    head += [f"{a} − {b}, pp" for a, b in PAIRS]
    return table([*head, f"final, {PAPER} − {GRPO}, pp"], lines)


def best_rates(task: Task) -> str:
    """The arms at their best rates, by pair and smoothing."""
    areas, lines = areas_of(task), []
    smoothings = {"cubic": DEGREE, "quadratic": 2, "none": None}
    for pair in PAIRS:
        for name, degree in smoothings.items():
            found = at_best(areas, pair, GRID_RATES, degree=degree)
            result = paired_seeds(*found.sides)
            chosen = [
                " and ".join(f"{each[i]:g}" for each in found.rates) for i in range(len(pair))
            ]
            lines.append([f"{pair[0]} − {pair[1]}", name, *chosen, points(result.difference)])
    head = ["contrast", "smoothing", "rates of the first arm", "rates of the second arm"]
    return table([*head, "difference, pp"], lines)


def norms_table(task: Task) -> str:
    """Both norms by arm and rate, and the comparisons at equal norm."""
    norms = read_norms()
    if not norms:
        return ""
    lines = []
    for rate in GRID_RATES:
        recorded = [
            f"{np.mean([*over_training(task, at(arm, rate), 'grad_norm').values()]):.3f}"
            for arm in GRID_ARMS
        ]
        lines.append([f"{rate:g}", *recorded, *(f"{norms[arm][rate]:.4f}" for arm in GRID_ARMS)])
    head = ["rate", *(f"norm of the gradient, {arm}" for arm in GRID_ARMS)]
    head += [f"norm of the update, {arm}" for arm in GRID_ARMS]
    told_pairs = []
    for pair in PAIRS:
        both = at_equal_norm(areas_of(task), pair, norms, GRID_RATES)
        if both is not None:
            found = paired_seeds(*both).difference
            told_pairs.append(
                f"{pair[0]} − {pair[1]} at equal norm of the update: {points(found)} pp"
            )
    return "\n\n".join([table(head, lines), bullets([*told_pairs, *gradients(task)])])


def gradients(task: Task) -> list[str]:
    """The comparisons at equal norm of the gradient, where the arms have norms in common."""
    recorded = {
        arm: {
            rate: float(np.mean([*over_training(task, at(arm, rate), "grad_norm").values()]))
            for rate in GRID_RATES
        }
        for arm in GRID_ARMS
    }
    lines = []
    for pair in PAIRS:
        ends = [(min(recorded[arm].values()), max(recorded[arm].values())) for arm in pair]
        ranges = " and ".join(
            f"{low:.2f} to {high:.2f} ({arm})" for arm, (low, high) in zip(pair, ends, strict=True)
        )
        both = at_equal_norm(areas_of(task), pair, recorded, GRID_RATES)
        said = (
            "the ranges do not overlap, so there is no comparison"
            if both is None
            else f"{points(paired_seeds(*both).difference)} pp"
        )
        lines.append(f"{pair[0]} − {pair[1]} at equal norm of the gradient, {ranges}: {said}")
    return lines


def learning_rates(task: Task) -> list[str]:
    """The results of the grid of learning rates."""
    return [
        picture("learning-rates", alt="Area over the learning rate, and its paired differences"),
        "#### At equal rates",
        by_rate(task),
        "#### Each at its best rate",
        "Rates chosen on the one and on the other half of the seeds; every seed is judged at the "
        "rate chosen without it.",
        best_rates(task),
        "#### At equal norm",
        norms_table(task),
        picture("equal-norm", alt="Area over the norm of the update") if read_norms() else "",
    ]


def cosine_of(advantage: str) -> str:
    """Cosine of a step to the gradient of the expected reward at the base model, as stored."""
    if not COSINES.exists():
        return ""
    stored = json.loads(COSINES.read_text(encoding="utf-8"))["estimators"]
    found = [each["step_cosine"] for each in stored if each["name"] == advantage]
    return ratio(found[0]) if found else ""


def mechanism(task: Task) -> list[str]:
    """The cells of the factorial, and what carries its effects."""
    lines = []
    for cell in CELLS:
        arm = cell.advantage
        lines.append(
            [f"`{arm}`", "mean" if cell.baseline else "none", cell.weight, cell.over or "–"]
            + [percent(task.mean(arm, figure)) for figure in ("area", "final", "pass_at_8")]
            + [f"{np.mean([*over_training(task, arm, 'entropy').values()]):.3f}", cosine_of(arm)]
        )
    head = ["advantage", "baseline", "weight", "p of the", "accuracy over training", "final"]
    head += ["pass@8", "entropy over training", "cosine of a step"]
    clipped = task.contrast("area", CLIPPED, "zscore").result.difference
    return [
        picture("mechanism", alt="Areas of the cells of the factorial"),
        table(head, lines),
        "The cosine is that of a step's gradient to the gradient of the expected reward, at the "
        "base model, all on the same answers.",
        f"GRPO with gradient clipping minus GRPO without: {points(clipped)} pp.",
        mediation(task),
    ]


def mediation(task: Task) -> str:
    """Effects on entropy and pass@8, and what is left of each effect on the area without them."""
    arms = [cell.advantage for cell in CELLS]
    areas = {arm: task.values(arm, "area") for arm in arms}
    mediators = {
        "entropy over training": ({a: over_training(task, a, "entropy") for a in arms}, 1, 4),
        "pass@8 after training": ({a: task.values(a, "pass_at_8") for a in arms}, 100, 1),
    }
    lines = []
    for effect in EFFECTS:
        outcome = np.subtract(*sides(areas, effect.weights))
        row = [effect.short, points(seed_mean(list(outcome)))]
        for figures, scale, digits in mediators.values():
            change = np.subtract(*sides(figures, effect.weights))
            row.append(signed(seed_mean(list(change)), scale=scale, digits=digits))
            row.append(points(direct_effect(list(outcome), list(change))))
        lines.append(row)
    head = ["effect", "on the area, pp"]
    for name in mediators:
        head += [f"on the {name}", "on the area at equal mediator, pp"]
    return (
        "Mediators, secondary: the effect on the area at equal mediator is the intercept of a "
        "regression over seeds, as in the second edition. With 8 seeds its interval is wide."
        f"\n\n{table(head, lines)}"
    )


def strata(task: Task) -> list[str]:
    """SoftRank and GRPO on easy and on hard prompts."""
    lines = []
    for name in STRATA:
        pair = f"{PAPER}-{name}", f"{GRPO}-{name}"
        first = [np.mean([task.first(arm, "accuracy") for arm in pair])]
        found = [
            points(task.contrast(figure, *pair).result.difference)
            for figure in ("area", "final", "greedy", "sampled", "pass_at_8")
        ]
        means = [percent(task.mean(arm, "area")) for arm in pair]
        lines.append([name, f"{100 * first[0]:.0f} %", *means, *found])
    head = ["prompts", "accuracy in the first tenth of the steps"]
    head += [f"accuracy over training, {arm}" for arm in (PAPER, GRPO)]
    head += [f"difference of the {each}, pp" for each in ("area", "final accuracy")]
    head += [f"{each}, pp" for each in ("greedy", "sampled", "pass@8")]
    return [
        stratum_counts(),
        table(head, lines),
        "The last three are on held-out problems of all kinds.",
    ]


def large(task: Task) -> list[str]:
    """The arms on the larger model."""
    figures = ("area", "final", "greedy", "sampled")
    lines = [[arm, *(percent(task.mean(arm, figure)) for figure in figures)] for arm in GRID_ARMS]
    differences = [
        [f"{a} − {b}"] + [points(task.contrast(f, a, b).result.difference) for f in figures]
        for a, b in PAIRS
    ]
    head = ["", "accuracy over training", "final", "greedy", "sampled"]
    base = [f"{100 * task.base(figure):.0f} % {figure}" for figure in ("greedy", "sampled")]
    return [
        f"Accuracy of the base model on held-out problems: {listed(base)}.",
        table(head, lines),
        "Paired differences in pp:",
        table(head, differences),
    ]


SECTIONS = {
    "rates": learning_rates, "mechanism": mechanism, "strata": strata, "large": large,
}  # fmt: skip


def results(tasks: Mapping[str, Task], found: Mapping[str, list[Found]]) -> str:
    """The finished parts: primary contrasts first."""
    pieces = []
    for name, task in tasks.items():
        pieces += [f"### {PARTS[name][0]}", bullets([told(one) for one in found[name]])]
        pieces += SECTIONS[name](task)
    return "\n\n".join(pieces) or "Not run yet."


def planned() -> str:
    """What is run."""
    lines = []
    for title, folders in PARTS.values():
        made = [PLANS[folder]() for folder in folders]
        arms = [f"`{arm.label}`" for each in made for arm in each.arms]
        runs = sum(len(each.arms) * len(each.seeds) for each in made)
        seeds = made[0].seeds
        lines.append([title, ", ".join(arms), f"{seeds[0]} to {seeds[-1]}", str(runs)])
    return table(["part", "arms", "seeds", "runs"], lines)


def powers() -> str:
    """The power of a contrast of two arms, from the second edition's deviations."""
    second = read_task(SECOND)
    assert second is not None
    deviation = second.contrast("area", at(PAPER, RATE), at(GRPO, RATE)).result.deviation
    designs = {
        "grid, one rate": (len(GRID_SEEDS), 1),
        "grid, mean over three rates": (len(GRID_SEEDS), 3),
        "one pair of arms": (len(SEEDS), 1),
        "factorial, mean over four pairs": (len(SEEDS), 4),
    }
    lines = []
    for name, (seeds, pairs) in designs.items():
        spread = deviation / math.sqrt(pairs)
        chances = [
            power(seeds, difference=d, deviation=spread, alpha=alpha)
            for alpha in (ALPHA, ALPHA / family())
            for d in (0.01, 0.02, 0.03)
        ]
        lines.append([name, str(seeds), *(f"{chance:.2f}" for chance in chances)])
    head = ["contrast", "seeds", *(f"{d} pp, α = .05" for d in (1, 2, 3))]
    head += [f"{d} pp, α = .05 / {family()}" for d in (1, 2, 3)]
    spoken = f"The deviation at one rate is {100 * deviation:.1f} pp; pairs count as independent."
    return f"{table(head, lines)}\n\n{spoken}"


def softmax_error() -> float:
    """Largest relative difference of K times the softmax weight and 1/p, over pass rates."""
    import torch

    worst = 0.0
    for right in range(1, GROUP):
        rewards = torch.tensor([[1.0] * right + [0.0] * (GROUP - right)], dtype=torch.float64)
        every = torch.ones_like(rewards, dtype=torch.bool)
        weight = GROUP * softmax(standard_score(rewards, every, ddof=0) / 0.5, every)[0, 0]
        worst = max(worst, abs(float(weight) * right / GROUP - 1))
    return worst


def parameters() -> dict[str, str]:
    """Parameters of the bundled model and of the larger one, in millions."""
    known = RESULTS / "word-problems" / "variance.json"
    small = json.loads(known.read_text(encoding="utf-8"))["parameters"]
    recipe = base_phases(str(HERE / "large-base.toml"))
    model = base_of(recipe).fresh(recipe).model
    large = sum(each.numel() for each in model.parameters())
    return {"small_parameters": f"{small / 1e6:.2f} M", "large_parameters": f"{large / 1e6:.1f} M"}


def stratum_words() -> str:
    """What the strata are."""
    return listed([f"{name} ones have a rate above {low:g} and below {high:g}"
                   for name, (low, high) in STRATA.items()])  # fmt: skip


def stratum_counts() -> str:
    """How many prompts the strata have, once they were measured."""
    if not STRATA_STORED.exists():
        return "Not measured yet."
    stored = json.loads(STRATA_STORED.read_text(encoding="utf-8"))
    counts = listed(
        [
            f"{each['prompts']} {name} ones (mean rate {100 * each['pass_rate']:.0f} %)"
            for name, each in stored["strata"].items()
        ]
    )
    above = np.cumsum(stored["histogram"][::-1])[::-1] / stored["prompts"]
    highest = (above >= 0.01).sum() / len(above)
    return (
        f"Of {stored['prompts']} prompts, {counts}; less than one in a hundred has a rate above "
        f"{100 * highest:g} %, and {stored['never']} have 0."
    )


def used() -> str:
    """The processor time of the runs."""
    if not CPU.exists():
        return "Not run yet."
    seconds = json.loads(CPU.read_text(encoding="utf-8"))
    hours = sum(seconds.values()) / 3600
    return (
        f"Runs, base model and measurements took {hours:.1f} core-hours of processor time, which "
        "does not depend on what else the machine was doing."
    )


def page() -> str:
    """The plan and the results as Markdown."""
    tasks = read_fourth()
    found = primary(tasks)
    values = {
        "abstract": abstract(tasks, found),
        "arms": listed([f"`{arm}`" for arm in GRID_ARMS]),
        "rates": listed([f"{rate:g}" for rate in GRID_RATES]),
        "known_rates": listed([f"{rate:g}" for rate in KNOWN_RATES]),
        "new_rates": listed([f"{rate:g}" for rate in NEW_RATES]),
        "grid_seeds": f"{GRID_SEEDS[0]} to {GRID_SEEDS[-1]}",
        "rate": f"{RATE:g}",
        "clipped": CLIPPED,
        "answers": str(STRATA_ANSWERS),
        "prompts": str(STRATA_PROMPTS),
        "strata": stratum_words(),
        **parameters(),
        "times": f"{WIDTHS[1] / WIDTHS[0]:g}",
        "large_rate": f"{LARGE_RATE:g}",
        "large_steps": str(LARGE_STEPS),
        "planned": planned(),
        "steps": str(STEPS),
        "norm_seeds": str(len(NORM_SEEDS)),
        "points": str(POINTS),
        "group": str(GROUP),
        "softmax": f"{100 * softmax_error():.1f}",
        "primary": bullets(
            [f"{PARTS[name][0]}: {one.says}" for name, each in PRIMARY.items() for one in each]
        ),
        "family": str(family()),
        "margin": f"{100 * MARGIN:g}",
        "power": powers(),
        "results": results(tasks, found),
        "used": used(),
    }
    text = Template((HERE / "fourth.md").read_text(encoding="utf-8")).substitute(values)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def main() -> int:
    """Write the plans without results, and the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, made in PLANS.items():
        if not (RESULTS / name).exists():
            text = f"# Written by studies/softrank/fourth.py.\n\n{toml(made())}"
            (FOLDER / f"{name}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
