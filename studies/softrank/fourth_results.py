"""What the results of the fourth part say, as Markdown."""

from __future__ import annotations

import json

import numpy as np
from conditions import REINFORCE
from corrections import GRPO, PAPER, at
from fourth_design import CELLS, CLIPPED, EFFECTS, GRID_ARMS, GRID_RATES, GRID_SEEDS, STRATA
from measured import RESULTS, Task
from mediators import direct_effect, over_training, sides
from rates import (
    DEGREE,
    NORMS,
    Grid,
    at_best,
    at_equal_norm,
    at_norms,
    common_norms,
    grid,
    read_norms,
)
from second import STEPS
from strata import STORED as STRATA_STORED
from words import bullets, listed, percent, picture, points, ratio, signed, table

from groupwise.evaluation import paired_seeds, seed_mean

PROMPTS = 8
"""Of a step."""
COSINES = RESULTS / "fourth-variance.json"
KNOWN_COSINES = RESULTS / "word-problems" / "variance.json"
"""Gradients of the cells of the factorial at the base model; see `make study-runs`."""
PAIRS = ((PAPER, GRPO), (REINFORCE, GRPO), (PAPER, REINFORCE))


def areas_of(task: Task) -> Grid:
    """The areas of the grid of learning rates."""
    return grid(task, GRID_ARMS, GRID_RATES, GRID_SEEDS)


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
    return "\n\n".join(
        [
            table(head, lines),
            repeated(task),
            bullets([*told_pairs, by_norm(task), *gradients(task)]),
        ]
    )


def repeated(task: Task) -> str:
    """Whether the runs that measure the norms have the accuracy of the stored ones."""
    stored = json.loads(NORMS.read_text(encoding="utf-8"))["accuracy"]
    apart = [
        abs(np.mean(task.results[at(arm, float(rate))][int(seed)].curve["accuracy"]) - mean)
        for arm, by_rate in stored.items()
        for rate, by_seed in by_rate.items()
        for seed, mean in by_seed.items()
    ]
    equal = sum(each < 1e-5 for each in apart)
    return (
        f"Of {len(apart)} runs that were made once more to measure the norm of the update, {equal} "
        "have exactly the mean accuracy of the stored run; the largest difference is "
        f"{100 * max(apart):.2f} pp."
    )


def by_norm(task: Task) -> str:
    """The difference at the norms that GRPO's updates have at the rates of the grid."""
    norms, areas = read_norms(), areas_of(task)
    of = {arm: [norms[arm][rate] for rate in GRID_RATES] for arm in (PAPER, GRPO)}
    low, high = (end(common_norms(of[PAPER], of[GRPO])) for end in (np.min, np.max))
    found = []
    for rate in GRID_RATES:
        place = np.array([norms[GRPO][rate]])
        if low <= place[0] <= high:
            both = [list(at_norms(areas[arm], of[arm], place)[:, 0]) for arm in (PAPER, GRPO)]
            result = paired_seeds(both[0], both[1]).difference
            found.append(f"{points(result)} pp at {place[0]:.3f} (that of {rate:g})")
    return f"By the norm of {GRPO}'s update, {PAPER} − {GRPO} is {listed(found)}"


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
        "Lines on the left are the cubic polynomials of the means.",
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
    path = COSINES if COSINES.exists() else KNOWN_COSINES
    stored = json.loads(path.read_text(encoding="utf-8"))["estimators"]
    found = [each["step_cosine"] for each in stored if each["name"] == advantage]
    return ratio(found[0]) if found else "not measured"


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
    leads = [task.contrast("area", PAPER, other).result.difference for other in ("zscore", CLIPPED)]
    return [
        picture("mechanism", alt="Areas of the cells of the factorial"),
        table(head, lines),
        "The cosine is that of a step's gradient to the gradient of the expected reward, at the "
        "base model, all on the same answers.",
        f"GRPO with gradient clipping minus GRPO without: {points(clipped)} pp. SoftRank minus "
        f"GRPO on these seeds: {points(leads[0])} pp, and {points(leads[1])} pp where GRPO is "
        "clipped.",
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
        f"{100 * highest:g} %, and {stored['never']} have 0. A run draws {STEPS * PROMPTS} "
        "prompts, and so sees each about twice."
    )


SECTIONS = {
    "rates": learning_rates, "mechanism": mechanism, "strata": strata, "large": large,
}  # fmt: skip
"""By part."""
