"""What several processes cost: steps of a run on Ray with one rank and one replica, against those
of one process.

    python benchmarks/cluster.py --json benchmarks/results/cluster.json

Both sides take the same steps of the recipe `word-problems` and take turns. `cpu` is CPU seconds
per step by kind of process, Ray's own among them, and `cpu_ratio` the quotient of their sums: on a
busy machine it says more than the time. The first three steps do not count.

    demo         the recipe as it is
    demo-scorer  with a reward worker on this machine, against one in a scorer process
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from typing import Any

import harness
from harness import Report, of, ratios, say, spread

CASES: dict[str, tuple[list[str], list[str]]] = {
    "demo": ([], ["cluster.replicas=1"]),
    "demo-scorer": (["reward_pool.workers=1"], ["cluster.replicas=1", "cluster.scorers=1"]),
}
"""Settings of the run in one process, and those of the run on Ray."""
COLUMNS = (
    "case", "cluster_seconds", "alone_seconds", "ratio", "cpu", "alone_cpu", "cpu_ratio", "stages",
)  # fmt: skip
STEPS = ["steps=10000", "evaluation.every_steps=0", "checkpoint.every_steps=0"]
WARM_UP = 3


def total(answers: list[dict[str, Any]]) -> list[float]:
    """CPU seconds of each step, all processes together."""
    return [sum(answer["cpu"].values()) for answer in answers]


def by_kind(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Mean CPU seconds per step of every kind of process: the clock counts in hundredths."""
    return {kind: statistics.mean(a["cpu"][kind] for a in answers) for kind in answers[-1]["cpu"]}


def measure(case: str, options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """One case."""
    settings = dict(zip(("alone", "cluster"), CASES[case], strict=True))
    recipes = {"alone": "word-problems", "cluster": "word-problems-ray"}
    with ExitStack() as stack:
        workers = {}
        for name, recipe in recipes.items():
            small = ["sampling.max_tokens=8"] if options.quick else []
            spec = {
                "recipe": recipe,
                "settings": [*STEPS, *settings[name], *small],
                "threads": options.threads,
            }
            workers[name], versions = harness.start(stack, "ours/demo.py", spec)
            report.version("ours", versions)
        sides = {name: lambda _, name=name: workers[name].ask("step") for name in workers}
        answers = harness.turns(sides, repeats=WARM_UP + options.repeats)
    alone, cluster = (answers[name][WARM_UP:] for name in ("alone", "cluster"))
    return {
        "cluster_seconds": spread(of(cluster, "seconds")),
        "alone_seconds": spread(of(alone, "seconds")),
        "ratio": ratios(of(cluster, "seconds"), of(alone, "seconds")),
        "cpu": by_kind(cluster),
        "alone_cpu": statistics.mean(total(alone)),
        "cpu_ratio": statistics.mean(total(cluster)) / statistics.mean(total(alone)),
        "stages": harness.stages(cluster),
        "repeats": {"cluster": cluster, "alone": alone},
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "", list(CASES))
    parser.set_defaults(repeats=30, threads=1)
    options = parser.parse_args()
    report = Report("cluster", options)
    for case in harness.chosen(options, list(CASES), list(CASES)):
        say(case)
        report.add({"case": case, **measure(case, options, report)})
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
