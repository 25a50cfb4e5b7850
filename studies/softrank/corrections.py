"""What the first edition got wrong, with the runs at equal learning rates and the controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from measured import Task, corrected, read_task
from words import listed, percent, points, rounded, signed, table

from groupwise.evaluation import Contrast, sentence

EQUAL_RATES = "lists-equal-rates"
PAPER, MATCHED, GRPO = "softrank", "softrank_matched", "grpo"
MARGINS = {"area": 0.01, "steps_to_threshold": 1.0}
"""Margins of equivalence, from the plan of the runs at equal rates."""
CONTROLS = ("shuffled", "constant")

Tasks = Mapping[str, Task]


def at(arm: str, rate: float) -> str:
    """Name of an arm at a learning rate, in the plan of the runs at equal rates."""
    return f"{arm}@{rate:g}"


def rates_of(task: Task, first: str, second: str) -> str:
    """The learning rates of two arms, where they differ."""
    rates = f"{first} at {task.rate(first):g}, {second} at {task.rate(second):g}"
    return "" if task.same_rate(first, second) else rates


def equal_rates(arms: Sequence[str] = (PAPER, MATCHED)) -> list[str]:
    """SoftRank against GRPO on lists at equal learning rates, one line for each figure and rate."""
    task = read_task(EQUAL_RATES)
    if task is None:
        return []
    rates = sorted({task.rate(arm) for arm in task.arms})
    pairs = [
        (figure, rate, arm) for rate in rates for arm in (PAPER, MATCHED) for figure in MARGINS
    ]
    done = corrected(task.contrast(f, at(arm, r), at(GRPO, r)) for f, r, arm in pairs)
    lines = []
    for (figure, rate, arm), contrast in zip(pairs, done, strict=True):
        if arm not in arms:
            continue
        if not contrast.result.difference.known:
            lines.append(f"{contrast.first} and {contrast.second}: {_the_same(contrast)}.")
            continue
        margin = MARGINS[figure]
        test = task.equivalence(figure, at(arm, rate), at(GRPO, rate), margin=margin)
        unit = f"{100 * margin:g} pp" if figure == "area" else f"{margin:g} step"
        shown = "equivalent" if test.equivalent else "equivalence is not shown"
        lines.append(f"{sentence(contrast)}; {shown} with a margin of {unit} ({_p(test.p)}).")
    return lines


def _the_same(contrast: Contrast) -> str:
    """What can be said where the difference is the same in every seed."""
    size = rounded(contrast.result.difference.value)
    count = contrast.result.seeds
    return f"{contrast.figure.name} differ by {size} in each of {count} seeds, so there is no test"


def equal_rates_section() -> str:
    """The table and sentences of the runs at equal rates."""
    task = read_task(EQUAL_RATES)
    if task is None:
        return "Not run yet."
    metric = task.plan.metric
    rows = [
        [
            arm.partition("@")[0],
            f"{task.rate(arm):g}",
            percent(task.mean(arm, "area")),
            f"{task.mean(arm, 'steps_to_threshold').value:.1f}",
            points(task.mean(arm, "oscillation")).replace("+", ""),
            percent(task.mean(arm, "final")),
        ]
        for arm in sorted(task.arms, key=lambda arm: (task.rate(arm), arm))
    ]
    head = ["arm", "learning rate", f"{metric} over training"]
    head += [f"steps to {100 * task.plan.threshold:g} %", "oscillation, pp", "final"]
    lines = "\n".join(f"* {line}" for line in equal_rates())
    seeds = f"{task.seeds} seeds that no other run uses, all arms from one base model:"
    return f"{seeds}\n\n{table(head, rows)}\n\n{lines}"


def errata(tasks: Tasks) -> list[str]:
    """What the first edition said and should not have, with the numbers that it said it with."""
    said = []
    if (task := tasks.get("lists")) and {PAPER, GRPO} <= {*task.arms}:
        earlier = -task.contrast("steps_to_threshold", PAPER, GRPO).result.difference.value
        repeated = read_task(EQUAL_RATES)
        now = "The repetition at equal rates is under way"
        if repeated is not None:
            steps = {
                r: repeated.contrast("steps_to_threshold", at(PAPER, r), at(GRPO, r))
                for r in sorted({repeated.rate(arm) for arm in repeated.arms})
            }
            now = "Repeated at equal rates, the differences are " + listed(
                [
                    f"{signed(c.result.difference, digits=1)} steps at {rate:g}"
                    for rate, c in steps.items()
                ]
            )
        said.append(
            f'Lists: "{PAPER} reaches 70 % earlier than {GRPO} by {rounded(earlier)} steps: the '
            'claim holds" was the learning rate. Tuning on two seeds, over a grid whose areas '
            f"are not monotone, had given {rates_of(task, PAPER, GRPO)}. {now}."
        )
    return [
        *said,
        'Lists: "oscillates more" was the slope of the curve. Oscillation was the spread of the '
        "differences between steps, which a steep curve has without oscillating; it is now "
        "measured around the mean curve of each arm.",
        'Word problems: "what makes the difference is the missing baseline, not the softmax" '
        "inferred equality from a difference that was not significant. Equality takes a test of "
        "equivalence with a margin fixed beforehand; the first edition had fixed none.",
        "C3 was said not to hold because two intervals overlap. Overlap of separate intervals "
        "decides nothing about a paired difference; the page now says that C3 is not shown.",
        "The summary named the arm with the highest mean for each task without a test, and left "
        "out the controls, which show SoftRank moving under rewards without information.",
    ]


def power_of(tasks: Tasks) -> list[str]:
    """How likely the first edition was to see a difference of one point."""
    from design import power, seeds_needed

    lines = []
    for name, task in tasks.items():
        if not {PAPER, GRPO} <= {*task.arms}:
            continue
        contrast = task.contrast("area", PAPER, GRPO).result
        if not contrast.difference.known:
            continue
        chance = power(contrast.seeds, difference=0.01, deviation=contrast.deviation)
        need = seeds_needed(difference=0.01, deviation=contrast.deviation)
        lines.append(
            f"{name.replace('-', ' ').capitalize()}: paired differences of the area have a "
            f"standard deviation of {100 * contrast.deviation:.1f} pp, so {contrast.seeds} seeds "
            f"see a true difference of 1 pp with a probability of {chance:.2f}, before any "
            f"correction; {need} seeds would see it with .80."
        )
    return lines


def control_tasks() -> dict[str, Sequence[Task]]:
    """By kind of reward, the runs of the first edition and, once all are in, those that repeat
    them."""
    found = {
        name: [
            task
            for each in (name, f"{name}-repeated")
            if (task := read_task(each)) and task.seeds == len(task.plan.seeds)
        ]
        for name in CONTROLS
    }
    return {name: tasks for name, tasks in found.items() if tasks}


def control_rows() -> str:
    """Change of accuracy and entropy under rewards that carry no information."""
    rows = [
        [
            name,
            f"{task.plan.seeds[0]} to {task.plan.seeds[-1]}",
            arm,
            points(task.change(arm, "accuracy")) + " pp",
            signed(task.change(arm, "entropy"), digits=3),
        ]
        for name, both in control_tasks().items()
        for task in both
        for arm in task.arms
    ]
    head = ["reward", "seeds", "arm", "accuracy", "entropy, nats per token"]
    return table(head, rows) if rows else "Not run yet."


def control_sentences() -> list[str]:
    """Which arms move under rewards without information, from the runs with the most seeds."""
    lines = []
    for name, both in control_tasks().items():
        task = max(both, key=lambda each: each.seeds)
        changes = {arm: task.change(arm, "accuracy") for arm in task.arms}
        moved = [arm for arm, change in changes.items() if change.excludes(0.0)]
        told = listed([f"{arm} {points(changes[arm])} pp" for arm in task.arms])
        verdict = (
            f"the intervals of {listed(moved)} exclude 0" if moved else "all intervals include 0"
        )
        lines.append(
            f"{name.capitalize()} rewards ({task.seeds} seeds): accuracy changes by {told}; "
            f"{verdict}."
        )
    return lines


def _p(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {value:.3f}".replace("= 0.", "= .")
