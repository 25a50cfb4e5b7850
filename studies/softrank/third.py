"""The third part of the study: one setting changed at a time. Its plans, and the page of results.

    python studies/softrank/third.py

writes both. All arms run on word problems at one learning rate on the same fresh seeds, so that
every part is compared with the same controls.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import noise  # noqa: F401 (registers the reward)
from corrections import GRPO, PAPER, at
from design import power
from measured import RESULTS, read_task
from second import MECHANISM, MECHANISM_RATE, SETTINGS, STEPS, common
from words import bullets, table, wrapped

from groupwise.experiments import Plan, make_plan
from groupwise.experiments.plan import toml

HERE = Path(__file__).parent
PLANS = HERE / "plans" / "third"
PAGE = HERE.parents[1] / "docs" / "studies" / "third-part.md"

RATE = MECHANISM_RATE
SEEDS = range(3000, 3008)
CONTROL_SEEDS = range(3000, 3012)
"""Four seeds more than the parts: the search for an estimator uses these controls too."""
MARGIN = 0.01
EVALUATED = 1024
ALPHA = 0.05
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
        unit: of the contrast.
    """

    says: str
    weights: Weights
    unit: str = "pp"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One setting that is changed.

    Attributes:
        title: its heading.
        question: what the part asks.
        arms: what is run beside the controls.
        primary: its primary contrasts.
        more: settings of every arm.
    """

    title: str
    question: str
    arms: tuple[Arm, ...]
    primary: tuple[Contrast, ...] = ()
    more: tuple[str, ...] = ()


def both(name: str, *settings: str) -> tuple[Arm, ...]:
    """SoftRank and GRPO with the same change."""
    return tuple(
        {"label": f"{arm}-{name}", "algorithm": arm, "set": list(settings)} for arm in (PAPER, GRPO)
    )


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
        unit="pp per doubling",
    )


def minus(first: str, second: str, *, says: str) -> Contrast:
    """One arm minus another."""
    return Contrast(says=says, weights={first: 1.0, second: -1.0})


PARTS = {
    "temperature": Part(
        title="Temperature",
        question="Does the area change with τ?",
        arms=tuple(
            {"label": tau_arm(t), "algorithm": PAPER, "set": [f"algorithm.advantage.tau={t:g}"]}
            for t in TAUS
            if t != PAPER_TAU
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
                "set": ["rewards.0.weight=2.0", 'combine=["weighted_sum", {name="shift", low=1.0}]'],
            },
            {
                "label": "softrank-raised",
                "algorithm": PAPER,
                "set": ['combine=["weighted_sum", {name="shift", low=-1.0}]'],
            },
        ),
        primary=(
            minus("softrank-signed", PAPER, says="SoftRank with rewards ±1 minus with 0/1"),
            minus("softrank-raised", PAPER, says="SoftRank with rewards 1/2 minus with 0/1"),
        ),
    ),
    "noise": Part(
        title="Noise in the rewards",
        question="Does SoftRank stay ahead of GRPO when 5, 10 or 20 % of the answers are misjudged?",
        arms=tuple(
            arm
            for share in NOISE
            for arm in both(
                f"noise-{share:g}",
                'rewards=[{name="exact_answer", style="answer_tag"}, '
                f'{{name="flipped", share={share:g}}}]',
            )
        ),
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
        primary=(lead("easy", "hard", says="SoftRank minus GRPO, mean over easy and hard"),),
    ),
    "long": Part(
        title="Longer runs",
        question=f"Is there a difference left after {LONG} steps? Secondary: no claim is made.",
        arms=both("long", f"steps={LONG}"),
    ),
}  # fmt: skip
"""In the order in which they are run."""


def plan(name: str) -> Plan:
    """The plan of a part, or of the controls."""
    if name == "controls":
        arms = tuple({"label": each, "algorithm": each} for each in (PAPER, GRPO, REINFORCE))
        part = Part(title="Controls", question="", arms=arms)
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


def family() -> int:
    """Number of primary contrasts."""
    return sum(len(part.primary) for part in PARTS.values())


def seconds_per_run() -> float:
    """What a run of the factorial took, which has the same task and steps."""
    task = read_task(MECHANISM)
    assert task is not None
    return sum(run.used("seconds") for run in task.runs) / len(task.runs)


def planned() -> str:
    """What is run, and what it will take."""
    rows = []
    for name in ("controls", *PARTS):
        made = plan(name)
        steps = [made.config(arm).steps for arm in made.arms]
        cost = [made.config(arm).update.epochs for arm in made.arms]
        hours = sum(
            seconds_per_run() * s / STEPS * (1 + e) / 2 for s, e in zip(steps, cost, strict=True)
        )
        hours *= len(made.seeds) / 3600
        rows.append(
            [
                "Controls" if name == "controls" else PARTS[name].title,
                ", ".join(f"`{arm.label}`" for arm in made.arms),
                f"{made.seeds[0]} to {made.seeds[-1]}",
                str(len(made.arms) * len(made.seeds)),
                f"{hours:.1f}",
            ]
        )
    return table(["part", "arms", "seeds", "runs", "core-hours, planned"], rows)


def powers() -> str:
    """The power of a contrast of two arms, from the second edition's deviations."""
    second, factorial = read_task("second-word-problems"), read_task(MECHANISM)
    assert second is not None and factorial is not None
    known = {
        f"{PAPER} − {GRPO}": second.contrast("area", at(PAPER, RATE), at(GRPO, RATE)),
        f"{PAPER} − {REINFORCE}": factorial.contrast("area", PAPER, REINFORCE),
    }
    rows = []
    for name, contrast in known.items():
        deviation = contrast.result.deviation
        for conditions in (1, 3):
            spread = deviation / math.sqrt(conditions)
            chances = [
                power(len(SEEDS), difference=d, deviation=spread, alpha=alpha)
                for alpha in (ALPHA, ALPHA / family())
                for d in (0.01, 0.02, 0.03)
            ]
            rows.append(
                [name, f"{100 * deviation:.1f} pp", str(conditions)]
                + [f"{chance:.2f}" for chance in chances]
            )
    head = ["contrast", "sd, one condition", "conditions averaged"]
    head += [f"{d} pp, α = .05" for d in (1, 2, 3)]
    head += [f"{d} pp, α = .05 / {family()}" for d in (1, 2, 3)]
    return table(head, rows)


def page() -> str:
    """The plan and the results as Markdown."""
    values = {
        "rate": f"{RATE:g}",
        "steps": str(STEPS),
        "evaluated": str(EVALUATED),
        "seeds": f"{SEEDS[0]} to {SEEDS[-1]}",
        "planned": planned(),
        "primary": bullets(
            [f"{part.title}: {each.says}" for part in PARTS.values() for each in part.primary]
        ),
        "family": str(family()),
        "margin": f"{100 * MARGIN:g}",
        "power": powers(),
    }
    text = Template((HERE / "third.md").read_text(encoding="utf-8")).substitute(values)
    return "\n".join(wrapped(line) for line in text.split("\n")).rstrip() + "\n"


def main() -> int:
    """Write the plans of parts without results, and the page."""
    PLANS.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("controls", *PARTS)):
        if not (RESULTS / f"third-{number}-{name}").exists():
            text = f"# Written by studies/softrank/third.py.\n\n{toml(plan(name))}"
            (PLANS / f"third-{number}-{name}.toml").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
