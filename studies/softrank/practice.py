"""What a practitioner can take from the study, from the results of all its parts."""

from __future__ import annotations

from conditions import (
    CONTROL_SEEDS,
    EPOCHS,
    GROUPS,
    PARTS,
    RATE,
    REINFORCE,
    TAUS,
    done,
    folder,
    joined,
    read_third,
    slope,
)
from corrections import GRPO, PAPER, at
from fourth_design import GRID_RATES, read_fourth
from fourth_results import areas_of
from measured import Task, read_task
from rates import at_best
from sealed import named, read_sealed
from second import RATES, primary, read_second
from third import contrasted
from words import listed, points

from groupwise.evaluation import SeedDifference, paired_seeds, seed_mean


def side(found: SeedDifference, *, more: str = "ahead of", less: str = "behind") -> str:
    """Where the first arm stands to the second, by the interval of their difference."""
    if found.difference.low > 0:
        return more
    return less if found.difference.high < 0 else "not distinguishable from"


def controls() -> Task | None:
    """The controls of the third part on all of their seeds."""
    task = read_task(folder("controls"))
    return task if task is not None and task.seeds == len(CONTROL_SEEDS) else None


def at_the_rates() -> list[str]:
    """SoftRank and GRPO on word problems: at every rate of the second edition, and again."""
    words, fresh = read_second().get("word-problems"), controls()
    if words is None:
        return []
    low, high = (at(GRPO, rate) for rate in RATES[:2])
    rise = words.contrast("area", high, low).result.difference
    found = {rate: words.contrast("area", at(PAPER, rate), at(GRPO, rate)).result for rate in RATES}
    told = listed([f"{points(each.difference)} pp at {rate:g}" for rate, each in found.items()])
    parts = [
        f"Choose the learning rate before the algorithm: from {RATES[0]:g} to {RATES[1]:g}, {GRPO} "
        f"gains {points(rise)} pp of mean accuracy over training",
        f"With rewards of 0 or 1, {PAPER} minus {GRPO} is {told}: the choice matters at a high "
        "learning rate, if at all",
    ]
    if fresh is not None:
        again = fresh.contrast("area", PAPER, GRPO).result
        parts.append(
            f"On {fresh.seeds} fresh seeds the difference at {RATE:g} is "
            f"{points(again.difference)} pp, and {PAPER} is {side(again)} {GRPO}"
        )
    return parts


def best_rates() -> list[str]:
    """What is left of the difference where each arm has the rate that suits it best."""
    task = read_fourth().get("rates")
    if task is None:
        return []
    found = at_best(areas_of(task), (PAPER, GRPO), GRID_RATES)
    result = paired_seeds(*found.sides)
    rates = [
        " and ".join(f"{each:g}" for each in sorted({pair[i] for pair in found.rates}))
        for i in (0, 1)
    ]
    return [
        f"Each at the best of {len(GRID_RATES)} rates ({PAPER} at {rates[0]}, {GRPO} at "
        f"{rates[1]}), {PAPER} is {side(result)} {GRPO} ({points(result.difference)} pp)"
    ]


def by_task() -> list[str]:
    """The difference on every task of the search for an estimator, and where to start."""
    tasks = read_sealed()
    if not tasks:
        return []
    found = {name: primary(task, PAPER, GRPO).result for name, task in tasks.items()}
    told = listed(
        [f"{points(each.difference)} pp on {named(name)}" for name, each in found.items()]
    )
    seeds = {task.seeds for task in tasks.values()}
    ahead, behind = (
        [name for name, each in found.items() if side(each) == where]
        for where in ("ahead of", "behind")
    )
    parts = [
        f"The task matters: over the rates {listed([f'{each:g}' for each in RATES])} and "
        f"{seeds.pop()} seeds, {PAPER} minus {GRPO} is {told}"
    ]
    if len(behind) != len(ahead):
        parts.append(
            f"On a task of your own, start with {GRPO if len(behind) > len(ahead) else PAPER}"
        )
    return parts


def weights() -> list[str]:
    """Whether the softmax weights do anything."""
    task, graded = controls(), read_task("lists")
    parts = []
    if task is not None:
        found = task.contrast("area", PAPER, REINFORCE).result
        parts.append(
            f"With 0/1 rewards the softmax weights are {side(found)} uniform ones "
            f"({PAPER} minus {REINFORCE} {points(found.difference)} pp)"
        )
    tasks = read_third()
    if "temperature" in done(tasks):
        areas = joined(tasks, "temperature")
        weighted = slope().weights
        seeds = sorted(areas.values(PAPER, "area"))
        by_seed = [
            sum(w * areas.values(arm, "area")[seed] for arm, w in weighted.items())
            for seed in seeds
        ]
        change = seed_mean(by_seed)
        parts.append(
            f"τ can stay at 0.5: doubling it between {TAUS[0]:g} and {TAUS[-1]:g} changes the area "
            f"by {points(change)} pp"
        )
    if graded is not None and REINFORCE in graded.arms:
        found = graded.contrast("area", REINFORCE, PAPER).result
        parts.append(
            f"With graded rewards {REINFORCE} without a baseline is {side(found)} {PAPER} "
            f"({points(found.difference)} pp), so keep the softmax there"
        )
    return parts


def settings() -> list[str]:
    """What several optimizer steps and a KL term change."""
    tasks = read_third()
    if "updates" not in done(tasks):
        return []
    task = joined(tasks, "updates")
    many, kl = (
        task.contrast("area", f"{PAPER}-{name}", f"{GRPO}-{name}").result
        for name in (f"epochs-{EPOCHS[-1]}", "kl")
    )
    return [
        f"With {EPOCHS[-1]} optimizer steps per batch {PAPER} is {side(many)} {GRPO} "
        f"({points(many.difference)} pp, a secondary contrast)",
        f"With a KL term of the same coefficient it is {side(kl)} {GRPO} ({points(kl.difference)} "
        "pp, likewise): its advantages are about K times smaller, so the coefficient weighs more",
    ]


def noisy() -> list[str]:
    """Whether the difference survives a judge that errs."""
    tasks = read_third()
    if "noise" not in done(tasks):
        return []
    found = paired_seeds(*contrasted(joined(tasks, "noise"), PARTS["noise"].primary[0]))
    return [
        f"Where 5 to 20 % of the answers are misjudged, {PAPER} is {side(found)} {GRPO} "
        f"({points(found.difference)} pp)"
    ]


def groups() -> list[str]:
    """The lead over group sizes, and what the size itself does."""
    tasks = read_third()
    if "groups" not in done(tasks):
        return []
    task = joined(tasks, "groups")
    found = paired_seeds(*contrasted(task, PARTS["groups"].primary[0]))
    small, large = min(GROUPS), max(GROUPS)
    size = task.contrast("area", f"{GRPO}-group-{small}", f"{GRPO}-group-{large}").result
    return [
        f"Over groups of {listed([str(each) for each in GROUPS])}, {PAPER} is {side(found)} {GRPO} "
        f"({points(found.difference)} pp); the size matters more: at equal samples, {GRPO} with "
        f"groups of {small} is {side(size)} {GRPO} with groups of {large} "
        f"({points(size.difference)} pp)"
    ]


def advice() -> str:
    """One paragraph."""
    return " ".join(
        f"{part}."
        for part in [
            *at_the_rates(),
            *best_rates(),
            *by_task(),
            *groups(),
            *settings(),
            *noisy(),
            *weights(),
        ]
    )
