"""What the fourth part of the study runs, and its primary contrasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import candidates  # noqa: F401 (registers its rows)
from conditions import REINFORCE, Contrast, minus
from corrections import GRPO, PAPER, at
from measured import Task, read_task
from mediators import Weights
from second import FIRST_SEED, MECHANISM_RATE, SETTINGS, common

from groupwise.experiments import Plan, make_plan

GRID_ARMS = (PAPER, GRPO, REINFORCE)
KNOWN_RATES = (5e-5, 1e-4, 2e-4)
"""Run by the second edition for SoftRank and GRPO."""
NEW_RATES = (2.5e-5, 4e-4, 8e-4)
GRID_RATES = tuple(sorted({*KNOWN_RATES, *NEW_RATES}))
GRID_SEEDS = range(FIRST_SEED, FIRST_SEED + 20)
NORM_SEEDS = GRID_SEEDS[:2]
"""Those of the reruns that measure the norm of the update."""
SECOND = "second-word-problems"

SEEDS = range(4000, 4008)
RATE = MECHANISM_RATE
LARGE_BASE = "runs/study/large"
WIDTHS = 128, 384
"""Of the bundled model and of the larger one."""
LARGE_RATE = float(f"{RATE * WIDTHS[0] / WIDTHS[1]:.3g}")
LARGE_STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An arm of the factorial; its label is its advantage.

    Attributes:
        advantage: of the library or of `candidates.py`.
        weight: of an answer: "uniform", "softmax", "1/p" or "1/sd".
        over: what p and sd are of: "group" or "batch"; empty for uniform weights.
        baseline: whether the mean of the group is subtracted.
    """

    advantage: str
    weight: str
    over: str
    baseline: bool


CELLS = (
    Cell(advantage="raw", weight="uniform", over="", baseline=False),
    Cell(advantage="softrank", weight="softmax", over="group", baseline=False),
    Cell(advantage="successes", weight="1/p", over="group", baseline=False),
    Cell(advantage="right_by_sd", weight="1/sd", over="group", baseline=False),
    Cell(advantage="right_by_batch_rate", weight="1/p", over="batch", baseline=False),
    Cell(advantage="right_by_batch_sd", weight="1/sd", over="batch", baseline=False),
    Cell(advantage="centered", weight="uniform", over="", baseline=True),
    Cell(advantage="softrank_centered", weight="softmax", over="group", baseline=True),
    Cell(advantage="maxrl", weight="1/p", over="group", baseline=True),
    Cell(advantage="zscore", weight="1/sd", over="group", baseline=True),
    Cell(advantage="centered_by_batch_rate", weight="1/p", over="batch", baseline=True),
    Cell(advantage="batch_zscore", weight="1/sd", over="batch", baseline=True),
)
CLIPPED = "grpo-clipped"
"""GRPO with the gradient clipping of all other parts, beside the factorial."""


def of(*, baseline: bool | None = None, weight: str = "", over: str = "") -> list[str]:
    """Labels of the cells with some levels of the factors."""
    return [
        cell.advantage
        for cell in CELLS
        if baseline in (None, cell.baseline)
        and weight in ("", cell.weight)
        and over in ("", cell.over)
    ]


def between(first: Sequence[str], second: Sequence[str], *, says: str, short: str) -> Contrast:
    """Mean of some arms minus the mean of others."""
    weights: Weights = {
        **{arm: 1 / len(first) for arm in first},
        **{arm: -1 / len(second) for arm in second},
    }
    return Contrast(says=says, short=short, weights=weights)


EFFECTS = (
    between(of(baseline=True), of(baseline=False), short="baseline",
            says="arms with the group's mean as baseline minus those without, over all weights"),
    between(of(weight="1/p", over="group"), of(weight="uniform"), short="1/p",
            says="weights 1/p of the group minus uniform ones, over both baselines"),
    between(of(weight="1/sd", over="group"), of(weight="uniform"), short="1/√(p(1 − p))",
            says="weights 1/√(p(1 − p)) of the group minus uniform ones, over both baselines"),
    between([*of(weight="1/p", over="group"), *of(weight="1/sd", over="group")], of(over="batch"),
            short="group, not batch",
            says="weights from the group's pass rate minus weights from the batch's, over 1/p, "
            "1/√(p(1 − p)) and both baselines"),
)  # fmt: skip
"""Primary contrasts of the factorial."""

STRATA_PROMPTS, STRATA_ANSWERS = 2048, 32
STRATA = {"hard": (0.0, 0.16), "easy": (0.5, 1.0)}
"""Pass rates of the base model, the ends not included: about its lowest and highest ninth."""


def leads(names: Mapping[str, str]) -> tuple[Contrast, ...]:
    """SoftRank minus GRPO in conditions named by the words for them."""
    return tuple(
        minus(f"{PAPER}-{name}", f"{GRPO}-{name}", says=f"SoftRank minus GRPO, {words}", short=name)
        for name, words in names.items()
    )


STRATUM_LEADS = leads({name: f"{name} prompts" for name in STRATA})
LARGE_LEAD = minus(PAPER, GRPO, says="SoftRank minus GRPO, larger model", short="larger model")
NEW_RATES_LEAD = between(
    [at(PAPER, rate) for rate in NEW_RATES],
    [at(GRPO, rate) for rate in NEW_RATES],
    says="SoftRank minus GRPO at equal rates, mean over the three new ones",
    short="equal rates",
)


def _plan(title: str, arms: Sequence[dict[str, object]], *, seeds: Sequence[int],
          contrasts: Sequence[Contrast] = (), settings: Sequence[str] = ()) -> Plan:  # fmt: skip
    values = common(SETTINGS["word-problems"])
    shared = values["set"]
    assert isinstance(shared, list)
    return make_plan(
        {
            **values,
            "set": [*shared, *settings],
            "title": f"Fourth part: {title}",
            "seeds": list(seeds),
            "against": str(arms[-1]["label"]),
            "hypotheses": [f"Not 0: {each.says}." for each in contrasts],
            "arms": list(arms),
        }
    )


def rates_plan(rates: Sequence[float], arms: Sequence[str] = GRID_ARMS) -> Plan:
    """Some arms at some rates of the grid, with the settings of the second edition."""
    made: list[dict[str, object]] = [
        {"label": at(arm, rate), "algorithm": arm, "learning_rate": rate}
        for rate in rates
        for arm in arms
    ]
    shown = listed_rates(rates)
    return _plan(f"{', '.join(arms)} at {shown}", made, seeds=GRID_SEEDS,
                 contrasts=[NEW_RATES_LEAD] if {*rates} <= {*NEW_RATES} else [])  # fmt: skip


def listed_rates(rates: Sequence[float]) -> str:
    """Rates in words."""
    return ", ".join(f"{rate:g}" for rate in rates)


def mechanism_plan(*, baseline: bool) -> Plan:
    """Half of the factorial. All arms are SoftRank's row with another advantage, not clipped."""
    arms: list[dict[str, object]] = [
        {
            "label": cell.advantage,
            "algorithm": PAPER,
            "learning_rate": RATE,
            "set": [
                f'algorithm.advantage={{name="{cell.advantage}"}}',
                "optimizer.max_grad_norm=null",
            ],
        }
        for cell in CELLS
        if cell.baseline is baseline
    ]
    if baseline:
        arms.append({"label": CLIPPED, "algorithm": GRPO, "learning_rate": RATE})
    words = "with a baseline" if baseline else "without a baseline"
    return _plan(f"factorial, {words}", arms, seeds=SEEDS, contrasts=EFFECTS)


def strata_plan() -> Plan:
    """SoftRank and GRPO on the prompts of each stratum."""
    arms = [
        {
            "label": f"{arm}-{name}",
            "algorithm": arm,
            "learning_rate": RATE,
            "set": [
                f'data.train="studies/softrank/data/strata/{name}.jsonl"',
                'data.eval="word_problems"',
            ],
        }
        for name in STRATA
        for arm in (PAPER, GRPO)
    ]
    return _plan("prompts by pass rate", arms, seeds=SEEDS, contrasts=STRATUM_LEADS)


def large_plan(arms: Sequence[str]) -> Plan:
    """Some arms on the larger model."""
    made = [{"label": arm, "algorithm": arm, "learning_rate": LARGE_RATE} for arm in arms]
    settings = [f'model.path="{LARGE_BASE}"', f"steps={LARGE_STEPS}"]
    return _plan("a larger model", made, seeds=SEEDS, settings=settings, contrasts=[LARGE_LEAD])


PLANS: Mapping[str, Callable[[], Plan]] = {
    "fourth-0-rates-low": lambda: rates_plan(NEW_RATES[:1]),
    "fourth-1-rates-high": lambda: rates_plan(NEW_RATES[1:2]),
    "fourth-2-rates-highest": lambda: rates_plan(NEW_RATES[2:]),
    "fourth-3-rates-reinforce": lambda: rates_plan(KNOWN_RATES, (REINFORCE,)),
    "fourth-4-mechanism-none": lambda: mechanism_plan(baseline=False),
    "fourth-5-mechanism-mean": lambda: mechanism_plan(baseline=True),
    "fourth-6-strata": strata_plan,
    "fourth-7-large": lambda: large_plan((PAPER, GRPO)),
    "fourth-8-large-reinforce": lambda: large_plan((REINFORCE,)),
}
"""In the order in which they are run; each takes a few minutes."""

PARTS = {
    "rates": ("Learning rates", [name for name in PLANS if "rates" in name]),
    "mechanism": ("Baseline, weights and their scope", [n for n in PLANS if "mechanism" in n]),
    "strata": ("Prompts by pass rate", ["fourth-6-strata"]),
    "large": ("A larger model", [name for name in PLANS if "large" in name]),
}
"""Titles, and the plans of each part."""


def read_fourth() -> dict[str, Task]:
    """The parts whose every run has finished; the second edition's runs on the grid's seeds."""
    found = {}
    for name, (_, folders) in PARTS.items():
        each = [read_task(folder) for folder in folders]
        if any(task is None or task.seeds < len(task.plan.seeds) for task in each):
            continue
        more = [SECOND] if name == "rates" else []
        task = read_task(*folders, *more)
        assert task is not None
        seeds = {*task.plan.seeds}
        kept = {
            arm: {seed: run for seed, run in runs.items() if seed in seeds}
            for arm, runs in task.results.items()
        }
        found[name] = replace(task, results=kept)
    return found
