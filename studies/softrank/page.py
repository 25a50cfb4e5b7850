"""The page of the study, made from the stored results alone.

    python studies/softrank/page.py

fills the numbers, tables and verdicts into `page.md` and writes `docs/studies/softrank.md`;
`figures.py` draws its pictures.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import torch
from corrections import (
    GRPO,
    MATCHED,
    PAPER,
    control_rows,
    control_sentences,
    equal_rates,
    equal_rates_section,
    errata,
    power_of,
    rates_of,
)
from measured import HELD_OUT, RESULTS, Task, corrected, read_task
from practice import advice
from safetensors import safe_open
from words import bullets, listed, percent, picture, points, ratio, table, wrapped

import groupwise
from groupwise.algorithms.advantages.softrank import softrank
from groupwise.evaluation import Contrast, sentence

TEMPLATE = Path(__file__).with_name("page.md")
PAGE = Path(__file__).parents[2] / "docs" / "studies" / "softrank.md"

TASKS = {"word-problems": "Word problems", "lists": "Lists", "long-answers": "Long answers"}
"""Folders of results, and the tasks in words; each may have a folder NAME-candidates beside it."""
SHARPENING = "sharpening"
CANDIDATES = ("log_odds", "softrank_two_sided")
WHILE_TRAINING = ("area", "steps_to_threshold", "oscillation", "final")
CLAIMED = (*WHILE_TRAINING, *HELD_OUT)
NEEDED = 3
"""Tasks on which a candidate must win."""
NOT_RUN = "Not run yet."

Tasks = Mapping[str, Task]


def read_tasks() -> dict[str, Task]:
    """The tasks that have results."""
    read = {name: read_task(name, f"{name}-candidates") for name in TASKS}
    return {name: task for name, task in read.items() if task is not None}


def page(tasks: Tasks) -> str:
    """The whole page as Markdown."""
    blocks = {name.replace("-", "_"): NOT_RUN for name in TASKS}
    blocks |= {
        name.replace("-", "_"): about(name, task, claims(tasks)[name])
        for name, task in tasks.items()
    }
    blocks |= protocol(tasks)
    blocks |= {
        "short": short(tasks),
        "shares": shares(tasks),
        "variance": variance(),
        "advice": advice(),
        "faster": claim(tasks, "steps_to_threshold"),
        "steadier": claim(tasks, "oscillation"),
        "relatives": relatives(tasks),
        "norms": norms(tasks),
        "candidates": candidates(tasks),
        "tried": tried(),
        "sharpening": sharpening(),
        "controls": f"{control_rows()}\n\n{bullets(control_sentences())}",
        "errata": bullets(errata(tasks)),
        "equal_rates": equal_rates_section(),
        "power": bullets(power_of(tasks)) or NOT_RUN,
        "tuned": tuned(tasks),
        "parameters": f"{_parameters() / 1e6:.2f}",
        "softmax_share": f"{_softmax_share():.2f}".lstrip("0"),
    }
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(blocks)
    return "\n".join(wrapped(line) for line in text.split("\n"))


def claims(tasks: Tasks) -> dict[str, list[Contrast]]:
    """Every contrast that the verdicts on the claims rest on, by task, corrected together."""
    pairs = [
        (name, task.contrast(figure, first, GRPO))
        for name, task in tasks.items()
        for first in (PAPER, MATCHED)
        if {first, GRPO} <= {*task.arms}
        for figure in CLAIMED
    ]
    done = corrected(contrast for _, contrast in pairs)
    found: dict[str, list[Contrast]] = {name: [] for name in tasks}
    for (name, _), contrast in zip(pairs, done, strict=True):
        found[name].append(contrast)
    return found


def winners(tasks: Tasks) -> dict[str, list[str]]:
    """By candidate, the tasks on which its area is above those of GRPO and of the paper's SoftRank,
    with 95 % paired intervals that exclude 0."""
    return {
        candidate: [
            name
            for name, task in tasks.items()
            if {candidate, GRPO, PAPER} <= {*task.arms}
            and all(
                task.contrast("area", candidate, other).result.difference.low > 0
                for other in (GRPO, PAPER)
            )
        ]
        for candidate in CANDIDATES
    }


def short(tasks: Tasks) -> str:
    """The verdicts that matter most, one line each."""
    lines = []
    for name, contrasts in claims(tasks).items():
        for arm in (PAPER, MATCHED):
            mine = [c for c in contrasts if c.first == arm and c.figure.key in WHILE_TRAINING]
            if not mine:
                continue
            said = "; ".join(sentence(c) for c in mine if c.distinct)
            alike = f"{arm} and {GRPO} are not distinguishable while training"
            rates = rates_of(tasks[name], arm, GRPO)
            note = f" (at different learning rates, {rates}: no evidence for the algorithm)"
            lines.append(f"{TASKS[name]}: {said or alike}{note if said and rates else ''}.")
    lines += [f"Lists at equal learning rates: {line}" for line in equal_rates((PAPER,))]
    lines += control_sentences()
    lines += causes(tasks)
    return bullets([*lines, *verdicts_on_candidates(tasks)]) or NOT_RUN


def protocol(tasks: Tasks) -> dict[str, str]:
    """What all plans have in common, read from the first."""
    if not tasks:
        return dict.fromkeys(("seeds", "steps", "prompts", "group", "rates", "tuning_seeds"), "?")
    plan = next(iter(tasks.values())).plan
    config, tuning = plan.config(plan.arms[0]), plan.tuning
    return {
        "seeds": str(len(plan.seeds)),
        "steps": str(config.steps),
        "prompts": str(config.prompts_per_step),
        "group": str(config.group_size),
        "rates": str(len(tuning.learning_rates) if tuning else 1),
        "tuning_seeds": listed([str(seed) for seed in tuning.seeds]) if tuning else "none",
    }


def about(name: str, task: Task, contrasts: Sequence[Contrast]) -> str:
    """Base, curves, figures and verdicts of a task."""
    base = ", ".join(f"{_title(figure)} {100 * task.base(figure):.1f} %" for figure in HELD_OUT)
    title = TASKS.get(name, name)
    missing = len(task.plan.seeds) - task.seeds
    so_far = f" **Provisional: {missing} of {len(task.plan.seeds)} seeds are missing.**"
    return "\n\n".join(
        [
            f"Before training, on held-out problems: {base}.{so_far if missing else ''}",
            picture(f"softrank-{name}", alt=f"Learning curves: {title.lower()}"),
            figures(task),
            told(contrasts),
        ]
    )


def figures(task: Task) -> str:
    """The table of a task: an arm a row, means over seeds with their intervals."""
    head = ["arm", "learning rate", f"{task.plan.metric} over training"]
    head += [f"steps to {100 * task.plan.threshold:g} %", "final"]
    head += [*map(_title, HELD_OUT), "entropy, last", "thousand tokens"]
    rows = []
    for arm in task.arms:
        missed = sum(not curve.reached for curve in task.summaries(arm).values())
        rows.append(
            [
                arm,
                f"{task.rate(arm):g}" + (" (edge)" if arm in task.edges else ""),
                percent(task.mean(arm, "area")),
                f"{task.mean(arm, 'steps_to_threshold').value:.1f}"
                + (f" ({missed} never)" if missed else ""),
                *(percent(task.mean(arm, figure)) for figure in ("final", *HELD_OUT)),
                f"{task.last(arm, 'entropy'):.3f}",
                f"{task.tokens(arm) / 1000:.1f}",
            ]
        )
    return table(head, rows)


def told(contrasts: Sequence[Contrast]) -> str:
    """Contrasts as sentences: differences first, then what is not distinguishable."""
    distinct = [f"{sentence(c)}." for c in contrasts if c.distinct]
    open_ = [f"{sentence(c)}." for c in contrasts if not c.distinct]
    return bullets([*distinct, *open_])


def shares(tasks: Tasks) -> str:
    """Whose advantages are positive, negative or 0, and what that says of C1 and C2."""
    rows, said = [], []
    for name, task in tasks.items():
        if not {GRPO, PAPER} <= {*task.arms}:
            continue
        for arm in (GRPO, PAPER):
            positive, some = _signs(task, arm)
            parts = [f"{100 * x:.1f} %" for x in (positive, some - positive, 1 - some)]
            effective = task.over_training(arm, "effective_samples")
            rows.append([TASKS[name], arm, *parts, f"{effective:.2f}"])
        (up, some), (_, contributes) = _signs(task, GRPO), _signs(task, PAPER)
        said.append(
            f"{TASKS[name]}: of GRPO's answers with a signal {100 * up / some:.0f} % are pushed "
            f"up, so C1 {_holds(up < some / 2)}; {100 * contributes:.0f} % of SoftRank's answers "
            f"have an advantage other than 0 (GRPO: {100 * some:.0f} %), so C2 "
            f"{_holds(contributes > 0.99)}."
        )
    if not rows:
        return NOT_RUN
    head = ["task", "arm", "positive", "negative", "zero", "effective samples per group"]
    return f"{table(head, rows)}\n\n{bullets(said)}"


def variance() -> str:
    """Signal and noise of the gradient at the base policy, where they were measured."""
    rows, said = [], []
    for name, title in TASKS.items():
        path = RESULTS / name / "variance.json"
        if not path.exists():
            continue
        found = {e["name"]: e for e in json.loads(path.read_text(encoding="utf-8"))["estimators"]}
        for each in found.values():
            noise = "no signal" if each["noise"] is None else f"{each['noise']:.2f}"
            cells = [ratio(each[key]) for key in ("signal_to_noise", "step_cosine")]
            rows.append([title, each["name"], noise, *cells])
        ours, theirs = (found[key]["noise"] for key in (PAPER, "zscore"))
        more = "less" if ours < theirs else "more"
        said.append(
            f"{title}: relative to its mean, the gradient of {PAPER} varies {more} than that of "
            f"{GRPO} (zscore), {ours:.2f} against {theirs:.2f}; no paired test was planned, so C3 "
            f"is {'not decided' if more == 'less' else 'not shown'}."
        )
    if not rows:
        return NOT_RUN
    head = ["task", "advantage", "tr Cov / ‖mean‖²", "signal to noise of a step"]
    shown = table([*head, "cosine of a step to ∇E[r]"], rows)
    return f"At the base policy, all on the same answers:\n\n{shown}\n\n{bullets(said)}"


def claim(tasks: Tasks, figure: str) -> str:
    """The verdict on a claim that a figure is lower."""
    lines = []
    for name, contrasts in claims(tasks).items():
        for c in (c for c in contrasts if c.figure.key == figure):
            verdict = "the claim is not supported"
            if c.distinct and (rates := rates_of(tasks[name], c.first, c.second)):
                verdict = f"the rates differ ({rates}), so this says nothing of the claim"
            elif c.distinct:
                lower = c.result.difference.value < 0
                verdict = "the claim holds" if lower else "the opposite of the claim holds"
            lines.append(f"{TASKS[name]}: {sentence(c)}: {verdict}.")
    return bullets(lines) or NOT_RUN


def relatives(tasks: Tasks) -> str:
    """SoftRank at matched scale against the arms that theory says it resembles."""
    arms = ("maxrl", "reinforce", "dr_grpo", GRPO)
    rows = [
        [TASKS[name], _title(figure), *(points(c.result.difference) for c in found)]
        for name, task in tasks.items()
        if {MATCHED, *arms} <= {*task.arms}
        for figure in ("area", "final", "sampled")
        for found in [[task.contrast(figure, MATCHED, arm) for arm in arms]]
    ]
    if not rows:
        return NOT_RUN
    shown = table(["task", "figure", *(f"− {arm}" for arm in arms)], rows)
    return f"{shown}\n\n{bullets(causes(tasks))}"


def causes(tasks: Tasks) -> list[str]:
    """SoftRank at matched scale against its relatives with and without a baseline."""
    named = [
        name for name, task in tasks.items() if {MATCHED, "reinforce", "maxrl"} <= {*task.arms}
    ]
    pairs = [(name, other) for name in named for other in ("reinforce", "maxrl")]
    done = corrected(tasks[name].contrast("area", MATCHED, other) for name, other in pairs)
    found = dict(zip(pairs, done, strict=True))
    said = []
    for name in named:
        plain, based = found[name, "reinforce"], found[name, "maxrl"]
        rates = [rates_of(tasks[name], MATCHED, other) for other in ("maxrl", "reinforce")]
        note = f" (learning rates differ: {'; '.join(filter(None, rates))})" if any(rates) else ""
        said.append(f"{TASKS[name]}: {sentence(based)}; {sentence(plain)}{note}.")
    return said


def norms(tasks: Tasks) -> str:
    """How far the norm of the gradient falls while a run learns."""
    arms = list(dict.fromkeys(arm for task in tasks.values() for arm in task.arms))
    rows = []
    for name, task in tasks.items():
        ratios = {a: task.last(a, "grad_norm") / task.first(a, "grad_norm") for a in task.arms}
        rows.append([TASKS[name], *(f"{ratios[a]:.2f}" if a in ratios else "" for a in arms)])
    return table(["task", *arms], rows) if rows else NOT_RUN


def candidates(tasks: Tasks) -> str:
    """Candidates against every other arm, and whether the rule is met."""
    others = (GRPO, PAPER, MATCHED, "dr_grpo", "maxrl", "reinforce")
    rows = []
    for name, task in tasks.items():
        for candidate in CANDIDATES:
            if candidate in task.arms:
                cells = [task.contrast("area", candidate, o).result.difference for o in others]
                rows.append([TASKS[name], candidate, *map(points, cells)])
    if not rows:
        return NOT_RUN
    shown = table(["task", "candidate", *(f"− {other}" for other in others)], rows)
    return f"{shown}\n\n{bullets(verdicts_on_candidates(tasks))}"


def verdicts_on_candidates(tasks: Tasks) -> list[str]:
    """One sentence for every candidate that was run."""
    said = []
    for candidate, won in winners(tasks).items():
        if runs := [name for name, task in tasks.items() if candidate in task.arms]:
            on = f" ({listed([TASKS[name].lower() for name in won])})" if won else ""
            met = "is met" if len(won) >= NEEDED else "is not met"
            said.append(
                f"`{candidate}` is above both {GRPO} and {PAPER} on {len(won)} of {len(runs)} "
                f"tasks{on}: the rule {met}{_candidate_rates(tasks, candidate)}."
            )
    return said


def _candidate_rates(tasks: Tasks, candidate: str) -> str:
    """Where a candidate was run at another learning rate than the arms it is compared with."""
    differ = [
        f"{TASKS[name].lower()}: {rates}"
        for name, task in tasks.items()
        if {candidate, GRPO, PAPER} <= {*task.arms}
        for other in (GRPO, PAPER)
        if (rates := rates_of(task, candidate, other))
    ]
    return f" (at learning rates that differ; {'; '.join(differ)})" if differ else ""


def tried() -> str:
    """What was tried on seeds of its own before the candidates were chosen."""
    path = RESULTS / "design.json"
    if not path.exists():
        return ""
    design = json.loads(path.read_text(encoding="utf-8"))
    rows = [[row["arm"], f"{row['rate']:g}", row["area"], row["sampled"]] for row in design["rows"]]
    return f"{design['about']}\n\n" + table(
        ["advantage", "learning rate", "accuracy over training", "sampled"], rows
    )


def sharpening() -> str:
    """The control with a base whose greedy answer is right."""
    task = read_task(SHARPENING)
    if task is None:
        return NOT_RUN
    pairs = [(arm, figure) for arm in task.arms if arm != GRPO for figure in CLAIMED]
    return about(SHARPENING, task, corrected(task.contrast(f, arm, GRPO) for arm, f in pairs))


def tuned(tasks: Tasks) -> str:
    """What tuning saw: mean area by arm and learning rate."""
    rates = sorted({float(r) for t in tasks.values() for a in t.tuning.values() for r in a})
    rows = [
        [
            TASKS[name],
            arm,
            *(_area(areas.get(f"{rate:g}"), chosen=rate == task.rate(arm)) for rate in rates),
        ]
        for name, task in tasks.items()
        for arm, areas in task.tuning.items()
        if arm in task.arms
    ]
    return table(["task", "arm", *(f"{rate:g}" for rate in rates)], rows) if rows else NOT_RUN


def _area(value: float | None, *, chosen: bool) -> str:
    """A mean area of the tuning runs in percent; the chosen one in bold."""
    if value is None:
        return ""
    return f"**{100 * value:.1f}**" if chosen else f"{100 * value:.1f}"


def _parameters() -> int:
    """Number of weights of the bundled model."""
    path = Path(groupwise.__file__).parent / "assets/word-problems-base/model.safetensors"
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _softmax_share() -> float:
    """Least sum of SoftRank's advantages in a mixed group of eight 0/1 rewards."""
    rewards = torch.tensor([[1.0] * right + [0.0] * (8 - right) for right in range(1, 8)])
    return float(softrank(rewards).sum(1).min())


def _signs(task: Task, arm: str) -> tuple[float, float]:
    """Share of positive advantages, and of those other than 0."""
    return task.over_training(arm, "positive_share"), task.over_training(arm, "nonzero_share")


def _holds(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _title(figure: str) -> str:
    return {"pass_at_8": "pass@8", "area": "over training"}.get(figure, figure)


def main() -> int:
    """Write the page; `figures.py` draws its pictures."""
    tasks = read_tasks()
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(tasks), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
