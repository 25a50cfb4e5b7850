"""What the third part of the study runs, one setting changed at a time, and its results.

All arms run on word problems at one learning rate on the same fresh seeds, so that every part is
compared with the same controls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import noise  # noqa: F401 (registers the reward)
from corrections import GRPO, PAPER
from measured import Task, read_task
from second import MECHANISM_RATE, SETTINGS, STEPS, common

from groupwise.experiments import Plan, make_plan

RATE = MECHANISM_RATE
SEEDS = range(3000, 3008)
CONTROL_SEEDS = range(3000, 3012)
"""Four seeds more than the parts: the search for an estimator uses these controls too."""
MARGIN = 0.01
EVALUATED = 1024
TAUS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
PAPER_TAU = 0.5
NOISE = (0.05, 0.1, 0.2)
GROUPS = (4, 16, 32)
EPOCHS = (2, 4)
COMPLETIONS = 64
"""Per step, whatever the size of the groups."""
LONG = 120
REINFORCE = "reinforce"

Arm = dict[str, object]
Weights = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A linear contrast of arms: Σ weight · area, for each seed.

    Attributes:
        says: what the contrast is, in words.
        weights: by label of the arm.
        short: the same for a figure.
        unit: of the contrast.
    """

    says: str
    weights: Weights
    short: str = "mean of the conditions"
    unit: str = "pp"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One setting that is changed.

    Attributes:
        title: its heading.
        question: what the part asks.
        arms: what is run beside the controls.
        rows: conditions in words, each with two arms whose difference is shown.
        primary: its primary contrasts.
    """

    title: str
    question: str
    arms: tuple[Arm, ...]
    rows: tuple[tuple[str, str, str], ...]
    primary: tuple[Contrast, ...] = ()


def both(name: str, *settings: str) -> tuple[Arm, ...]:
    """SoftRank and GRPO with the same change."""
    return tuple(
        {"label": f"{arm}-{name}", "algorithm": arm, "set": list(settings)} for arm in (PAPER, GRPO)
    )


def pairs(control: str, *conditions: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Rows of SoftRank and GRPO: the controls, and conditions by words and name."""
    rows = [(words, f"{PAPER}-{name}", f"{GRPO}-{name}") for words, name in conditions]
    return ((control, PAPER, GRPO), *rows)


def lead(*names: str, says: str) -> Contrast:
    """SoftRank minus GRPO, averaged over conditions."""
    share = 1 / len(names)
    weights = {f"{PAPER}-{name}": share for name in names}
    weights |= {f"{GRPO}-{name}": -share for name in names}
    return Contrast(says=says, weights=weights)


def tau_arm(tau: float) -> str:
    """Label of the arm of a temperature; the paper's is a control."""
    return PAPER if tau == PAPER_TAU else f"tau-{tau:g}"


def slope() -> Contrast:
    """Least-squares slope of the area over log2 τ."""
    places = [math.log2(tau) for tau in TAUS]
    middle = sum(places) / len(places)
    spread = sum((place - middle) ** 2 for place in places)
    return Contrast(
        says="change of the area when τ doubles, by least squares",
        weights={tau_arm(t): (p - middle) / spread for t, p in zip(TAUS, places, strict=True)},
        short="per doubling of τ",
        unit="pp per doubling",
    )


def minus(first: str, second: str, *, says: str, short: str) -> Contrast:
    """One arm minus another."""
    return Contrast(says=says, short=short, weights={first: 1.0, second: -1.0})


PARTS = {
    "temperature": Part(
        title="Temperature",
        question="Does the area change with τ?",
        arms=tuple(
            {"label": tau_arm(t), "algorithm": PAPER, "set": [f"algorithm.advantage.tau={t:g}"]}
            for t in TAUS
            if t != PAPER_TAU
        ),
        rows=(
            *((f"τ = {tau:g}", tau_arm(tau), GRPO) for tau in TAUS),
            ("REINFORCE", REINFORCE, GRPO),
        ),
        primary=(slope(),),
    ),
    "updates": Part(
        title="Several optimizer steps per batch, and a KL term",
        question="Does the lead survive when every batch serves 2 or 4 optimizer steps, so that "
        "ratios leave 1 and are clipped, or with a KL term (k3, coefficient 0.04)?",
        arms=(
            *(arm for n in EPOCHS for arm in both(f"epochs-{n}", f"update.epochs={n}")),
            *both("kl", 'algorithm.divergence={name="k3", coefficient=0.04}'),
        ),
        rows=pairs(
            "1 optimizer step, no KL term",
            *((f"{n} optimizer steps", f"epochs-{n}") for n in EPOCHS),
            ("with the KL term", "kl"),
        ),
        primary=(lead(*(f"epochs-{n}" for n in EPOCHS), "kl", says="SoftRank minus GRPO, mean over "
                      "2 optimizer steps, 4 optimizer steps and the KL term"),),
    ),
    "shift": Part(
        title="Shifted rewards",
        question="SoftRank multiplies by the reward itself. What happens when a wrong answer gets "
        "−1, or when a right answer gets 2 and a wrong one 1? GRPO does not change.",
        arms=(
            {
                "label": "softrank-signed",
                "algorithm": PAPER,
                "set": [
                    "rewards.0.weight=2.0",
                    'combine=["weighted_sum", {name="shift", low=1.0}]',
                ],
            },
            {
                "label": "softrank-raised",
                "algorithm": PAPER,
                "set": ['combine=["weighted_sum", {name="shift", low=-1.0}]'],
            },
        ),
        rows=(
            ("rewards 0 and 1", PAPER, GRPO),
            ("rewards −1 and 1", "softrank-signed", GRPO),
            ("rewards 1 and 2", "softrank-raised", GRPO),
        ),
        primary=(
            minus("softrank-signed", PAPER, says="SoftRank with rewards ±1 minus with 0/1",
                  short="±1 minus 0 and 1"),
            minus("softrank-raised", PAPER, says="SoftRank with rewards 1/2 minus with 0/1",
                  short="1 and 2 minus 0 and 1"),
        ),
    ),
    "noise": Part(
        title="Noise in the rewards",
        question="Does SoftRank stay ahead of GRPO when 5, 10 or 20 % of the answers are "
        "misjudged?",
        arms=tuple(
            arm
            for share in NOISE
            for arm in both(
                f"noise-{share:g}",
                'rewards=[{name="exact_answer", style="answer_tag"}, '
                f'{{name="flipped", share={share:g}}}]',
            )
        ),
        rows=pairs("no noise", *((f"{100 * s:g} % flipped", f"noise-{s:g}") for s in NOISE)),
        primary=(lead(*(f"noise-{s:g}" for s in NOISE), says="SoftRank minus GRPO, mean over 5, "
                      "10 and 20 % noise"),),
    ),
    "groups": Part(
        title="Size of the groups",
        question=f"Does the lead depend on K? Every step has {COMPLETIONS} completions, so that "
        "larger groups mean fewer prompts.",
        arms=tuple(
            arm
            for size in GROUPS
            for arm in both(
                f"group-{size}", f"group_size={size}", f"prompts_per_step={COMPLETIONS // size}"
            )
        ),
        rows=pairs("K = 8", *((f"K = {size}", f"group-{size}") for size in GROUPS)),
        primary=(lead(*(f"group-{k}" for k in GROUPS), says="SoftRank minus GRPO, mean over K = 4, "
                      "16 and 32"),),
    ),
    "strata": Part(
        title="Easy and hard prompts",
        question="Does the lead depend on the pass rate? Problems of one operation only, and of "
        "three only, in training and evaluation.",
        arms=(
            *both("easy", 'data.train="word_problems(levels=[1])"'),
            *both("hard", 'data.train="word_problems(levels=[3])"'),
        ),
        rows=pairs("all", ("one operation", "easy"), ("three operations", "hard")),
        primary=(lead("easy", "hard", says="SoftRank minus GRPO, mean over easy and hard"),),
    ),
    "long": Part(
        title="Longer runs",
        question=f"Is there a difference left after {LONG} steps? Secondary: no claim is made.",
        arms=both("long", f"steps={LONG}"),
        rows=pairs(f"{STEPS} steps", (f"{LONG} steps", "long")),
    ),
}  # fmt: skip
"""In the order in which they are run."""


def plan(name: str) -> Plan:
    """The plan of a part, or of the controls."""
    if name == "controls":
        arms = tuple({"label": each, "algorithm": each} for each in (PAPER, GRPO, REINFORCE))
        part = Part(title="Controls", question="", arms=arms, rows=())
    else:
        part = PARTS[name]
    values = common(SETTINGS["word-problems"])
    return make_plan(
        {
            **values,
            "set": [
                *(each for each in _texts(values["set"]) if "evaluation" not in each),
                f"evaluation.prompts={EVALUATED}",
                "evaluation.samples=1",
            ],
            "title": f"Third part: {part.title.lower()}",
            "seeds": list(CONTROL_SEEDS if name == "controls" else SEEDS),
            "against": str(part.arms[-1]["label"]),
            "hypotheses": [f"Not 0: {each.says}." for each in part.primary],
            "arms": [{**arm, "learning_rate": RATE} for arm in part.arms],
        }
    )


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value


def folder(name: str) -> str:
    """Folder of the results of a part, which is the name of its plan."""
    return f"third-{('controls', *PARTS).index(name)}-{name}"


def read_third() -> dict[str, Task]:
    """The controls and the parts whose every run has finished; the controls on the parts' seeds."""
    found = {}
    for name in ("controls", *PARTS):
        task = read_task(folder(name))
        if task is None or task.seeds < len(task.plan.seeds):
            continue
        found[name] = replace(
            task,
            results={
                arm: {seed: run for seed, run in runs.items() if seed in SEEDS}
                for arm, runs in task.results.items()
            },
        )
    return found


def joined(tasks: Mapping[str, Task], name: str) -> Task:
    """A part with the controls beside it."""
    return replace(tasks[name], results={**tasks["controls"].results, **tasks[name].results})


def done(tasks: Mapping[str, Task]) -> list[str]:
    """The parts that have figures: those that are finished, once the controls are."""
    return [name for name in PARTS if name in tasks and "controls" in tasks]
