"""The second edition of the study: its plans, and the page that fixes them before the first run.

    python studies/softrank/second.py            # the page and the plans of stage one
    python studies/softrank/second.py settle     # the plans of stage two, from stage one's results

Stage one runs every arm at every learning rate of a common grid. Stage two compares the arms at one
rate, which a rule fixed here takes from stage one. Neither stage's seeds are used elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np
from corrections import GRPO, MATCHED, PAPER, at
from design import power, seeds_needed
from measured import RESULTS, Task, read_task
from words import bullets, listed, table, wrapped

from groupwise.experiments import Plan, make_plan
from groupwise.experiments.plan import toml

HERE = Path(__file__).parent
PLANS = HERE / "plans" / "second"
PAGE = HERE.parents[1] / "docs" / "studies" / "second-edition.md"

RATES = (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
RATE_SEEDS = tuple(range(1000, 1020))
STEPS = 120
EVALUATED = 1000
"""Held-out problems of the final accuracy."""
FAMILY = 5
"""Primary contrasts, one for each task; Holm's correction starts at α / FAMILY."""
DIFFERENCE = 0.01
FIRST_SEED, SEALED_SEED = 2000, 5000
ARMS = {
    PAPER: {"algorithm": "softrank"},
    MATCHED: {"algorithm": "softrank", "set": ["algorithm.advantage.rms=1.0"]},
    GRPO: {"algorithm": "grpo"},
    "reinforce": {"algorithm": "reinforce"},
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task of the second edition; the recipe and the words of its primary endpoint."""

    recipe: str
    metric: str
    threshold: float
    margin: float
    more: tuple[str, ...] = ()


SETTINGS = {
    "word-problems": Setting(
        recipe="word-problems", metric="accuracy", threshold=0.6, margin=DIFFERENCE
    ),
    "lists": Setting(
        recipe="studies/softrank/lists.toml", metric="reward", threshold=0.7, margin=0.005
    ),
    "long-answers": Setting(
        recipe="word-problems",
        metric="accuracy",
        threshold=0.6,
        margin=DIFFERENCE,
        more=("model.path=runs/study/long-answers/sft", "sampling.max_tokens=96"),
    ),
}
"""Tasks whose base models exist; the plans of the others are added before their first runs."""


def seeds_of_second_stage(tasks: Mapping[str, Task]) -> int:
    """Seeds that see the difference of interest on the noisiest task at Holm's strictest level."""
    deviations = [t.contrast("area", PAPER, GRPO).result.deviation for t in tasks.values()]
    return seeds_needed(difference=DIFFERENCE, deviation=max(deviations), alpha=0.05 / FAMILY)


def rates_plan(name: str) -> Plan:
    """Stage one of a task: every arm at every rate."""
    arms = [
        {"label": at(label, rate), **arm, "learning_rate": rate}
        for label, arm in ARMS.items()
        for rate in RATES
    ]
    return make_plan(
        {
            **_common(name),
            "title": f"Second edition, stage one: learning rates on {name}",
            "seeds": RATE_SEEDS,
            "against": at(GRPO, RATES[2]),
            "match": "samples",
            "arms": arms,
            "hypotheses": ["None: this stage chooses the common learning rate."],
        }
    )


def contrast_plan(name: str, *, rate: float, seeds: int) -> Plan:
    """Stage two of a task: the arms at the common rate, at equal generated tokens."""
    arms = [{"label": label, **arm, "learning_rate": rate} for label, arm in ARMS.items()]
    return make_plan(
        {
            **_common(name),
            "title": f"Second edition, stage two: {name} at the common learning rate",
            "seeds": list(range(FIRST_SEED, FIRST_SEED + seeds)),
            "against": GRPO,
            "match": "tokens",
            "arms": arms,
            "hypotheses": [f"{PAPER} has a larger area than {GRPO} at equal generated tokens."],
        }
    )


def common_rate(areas: Mapping[str, Mapping[float, float]]) -> float:
    """The rate of the grid at which SoftRank and GRPO together do best, smoothed over the grid.

    Args:
        areas: mean area by arm and rate.

    Returns:
        The grid's rate nearest to the top of a parabola in log rate through the best rate and its
        two neighbours, by the mean of both arms; the best rate itself at an edge.

    Example:
        >>> rates = [1e-4, 2e-4, 4e-4]
        >>> common_rate({"softrank": dict(zip(rates, [.1, .5, .2])),
        ...              "grpo": dict(zip(rates, [.1, .5, .4]))})
        0.0002
    """
    rates = sorted(areas[PAPER])
    heights = np.array([(areas[PAPER][rate] + areas[GRPO][rate]) / 2 for rate in rates])
    best = int(heights.argmax())
    if best in (0, len(rates) - 1):
        return rates[best]
    near = slice(best - 1, best + 2)
    a, b, _ = np.polyfit(np.log(rates[near]), heights[near], 2)
    top = -b / (2 * a)
    return min(rates, key=lambda rate: abs(np.log(rate) - top))


def settle() -> list[Path]:
    """Write the plans of stage two for every task whose stage one is complete."""
    first = {name: task for name in SETTINGS if (task := read_task(name)) is not None}
    written = []
    for name in SETTINGS:
        task = read_task(f"second-{name}-rates")
        if task is None or task.seeds < len(RATE_SEEDS):
            continue
        areas: dict[str, dict[float, float]] = {label: {} for label in ARMS}
        for arm in task.arms:
            areas[arm.partition("@")[0]][task.rate(arm)] = task.mean(arm, "area").value
        plan = contrast_plan(name, rate=common_rate(areas), seeds=seeds_of_second_stage(first))
        written.append(_write(PLANS / f"second-{name}.toml", plan))
    return written


def page(tasks: Mapping[str, Task]) -> str:
    """The plan of the second edition as Markdown."""
    seeds = seeds_of_second_stage(tasks)
    rows = []
    for name, task in tasks.items():
        spread = task.contrast("area", PAPER, GRPO).result.deviation
        level = {"difference": DIFFERENCE, "deviation": spread}
        rows.append(
            [
                name.replace("-", " "),
                f"{100 * spread:.1f} pp",
                str(seeds_needed(**level)),
                str(seeds_needed(**level, alpha=0.05 / FAMILY)),
                f"{power(seeds, **level, alpha=0.05 / FAMILY):.2f}",
            ]
        )
    head = ["task", "sd of paired differences", "seeds at α = .05"]
    head += [f"seeds at α = .05/{FAMILY}", f"power with {seeds} seeds"]
    runs = len(ARMS) * len(RATES) * len(RATE_SEEDS), len(ARMS) * seeds
    times = [r.used("seconds") / r.used("samples") for t in tasks.values() for r in t.runs]
    hours = FAMILY * sum(runs) * STEPS * float(np.mean(times)) / 3600
    values = {
        "power": table(head, rows),
        "seeds": str(seeds),
        "first": str(FIRST_SEED),
        "last": str(FIRST_SEED + seeds - 1),
        "sealed": str(SEALED_SEED),
        "sealed_last": str(SEALED_SEED + seeds - 1),
        "rates": listed([f"{rate:g}" for rate in RATES]),
        "rate_seeds": f"{RATE_SEEDS[0]} to {RATE_SEEDS[-1]}",
        "steps": str(STEPS),
        "evaluated": f"{EVALUATED:,}",
        "family": str(FAMILY),
        "arms": listed([f"`{label}`" for label in ARMS]),
        "margins": bullets(
            [
                f"{name.replace('-', ' ')}: {100 * each.margin:g} pp of the area of {each.metric}"
                for name, each in SETTINGS.items()
            ]
        ),
        "hours": f"{hours:.0f}",
        "runs": f"{FAMILY * sum(runs):,}",
    }
    text = Template((HERE / "second.md").read_text(encoding="utf-8")).substitute(values)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def _common(name: str) -> dict[str, object]:
    """What all plans of a task share."""
    setting = SETTINGS[name]
    return {
        "recipe": setting.recipe,
        "set": [
            f"steps={STEPS}",
            "prompts_per_step=8",
            f"evaluation.prompts={EVALUATED}",
            "algorithm.weighting.name=group_token_mean",
            *setting.more,
        ],
        "metric": setting.metric,
        "threshold": setting.threshold,
        "margin": setting.margin,
        "stopping": "Every seed is run once with every arm; nothing is added or left out.",
    }


def _write(path: Path, plan: Plan) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# Written by studies/softrank/second.py.\n\n{toml(plan)}", encoding="utf-8")
    return path


def first_edition() -> dict[str, Task]:
    """The first edition's tasks, whose variances the design rests on."""
    return {name: task for name in SETTINGS if (task := read_task(name)) is not None}


def main(arguments: Sequence[str]) -> int:
    """Write the page and the plans of a stage."""
    if arguments == ["settle"]:
        print(*settle(), sep="\n")
        return 0
    PAGE.write_text(page(first_edition()), encoding="utf-8")
    for name in SETTINGS:
        if not (RESULTS / f"second-{name}-rates").exists():
            _write(PLANS / f"second-{name}-rates.toml", rates_plan(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
