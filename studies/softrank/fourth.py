"""The fourth part of the study: its plans, and the page of its results.

    python studies/softrank/fourth.py

writes both, and the curves of area over learning rate; `figures.py` draws the pictures.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

from conditions import MARGIN, Contrast
from corrections import GRPO, PAPER, at
from design import power
from fourth_design import (
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
from fourth_results import SECTIONS, areas_of
from measured import RESULTS, Task, read_task
from mediators import sides
from rates import POINTS, Sides, at_best, at_equal_norm, curves, read_norms
from second import STEPS
from third import ALPHA, Found, told
from words import bullets, listed, table, wrapped

from groupwise.algorithms.advantages.statistics import softmax, standard_score
from groupwise.evaluation import equivalence, holm, paired_seeds
from groupwise.experiments.plan import toml
from groupwise.training.stages.recipe import base_of, base_phases

HERE = Path(__file__).parent
FOLDER = HERE / "plans" / "fourth"
PAGE = HERE.parents[1] / "docs" / "studies" / "fourth-part.md"
CPU = RESULTS / "fourth-cpu.json"
CURVES = RESULTS / "fourth-curves.json"
"""Area over the learning rate, as drawn."""
GROUP = 8

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


def used() -> str:
    """The processor time of the runs."""
    if not CPU.exists():
        return "Not run yet."
    seconds = json.loads(CPU.read_text(encoding="utf-8"))
    hours = sum(seconds.values()) / 3600
    return (
        f"Runs and measurements took {hours:.1f} core-hours of processor time, which "
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


def rounded(point: Mapping[str, float]) -> dict[str, float]:
    """A point of a curve with five digits."""
    return {name: float(f"{value:.5g}") for name, value in point.items()}


def main() -> int:
    """Write the plans without results, and the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, made in PLANS.items():
        if not (RESULTS / name).exists():
            text = f"# Written by studies/softrank/fourth.py.\n\n{toml(made())}"
            (FOLDER / f"{name}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    if (task := read_fourth().get("rates")) is not None:
        found = curves(areas_of(task), GRID_RATES)
        text = json.dumps(
            {arm: [rounded(point) for point in found[arm]] for arm in found}, indent=1
        )
        CURVES.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
