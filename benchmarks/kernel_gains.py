"""What each kernel gains end to end: a step with all kernels against one without it, in turns.

    python benchmarks/kernel_gains.py --json benchmarks/results/kernels.json
    python benchmarks/kernel_gains.py --cases cpu-0.5b-fp32@32-tokens --without embedding,norm

Both sides are groupwise with the same weights, prompts and random numbers; one is told to leave out
a kernel, or all of them ("every kernel"), so that PyTorch computes in its place. `gain` is the time
without over the time with it. The first step of each side is not counted. A kernel that gains less
than 3 % in every case is not worth its code.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import harness
from harness import Report, of, ratios, say, spread
from step import CASES, Case, shrunk, specification

COLUMNS = (
    "case", "without", "with_seconds", "without_seconds", "gain", "rollout_gain", "update_gain",
)  # fmt: skip
EVERY = "every kernel"
STEPS = {
    **{name: CASES[name] for name in ("embedded", "medium-fp32", "medium-recommended",
                                      "medium-lora", "long-prompt-fp32", "cpu-0.5b-fp32",
                                      "cpu-0.5b-recommended")},
    **{f"{name}@32-tokens": replace(CASES[name], completion=32)
       for name in ("medium-fp32", "medium-recommended", "cpu-0.5b-fp32", "cpu-0.5b-recommended")},
}  # fmt: skip


def kernels_of(case: Case) -> dict[str, frozenset[str]]:
    """The kernels that a case can use, by name, each as what is left out without it."""
    from groupwise.kernels import onednn
    from groupwise.kernels.auto import CPP, GPU, KERNELS

    on_cpu = KERNELS - set(GPU)
    wanted = {"float32": CPP, "bfloat16": on_cpu}[case.precision]
    if not onednn.dtypes():
        wanted = wanted & CPP
    return {name: frozenset({name}) for name in sorted(wanted)} | {EVERY: on_cpu}


def measure(name: str, case: Case, options: Any, report: Report) -> None:
    """A case with every one of its kernels left out in turn; a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {**specification(case, folder, threads=options.threads), "settings": case.ours}
        asked = options.without and {options.without: frozenset(options.without.split(","))}
        for kernel, without in (asked or kernels_of(case)).items():
            say(f"{name} without {kernel}")
            report.add({"case": name, "without": kernel, **_pair(spec, without, options, report)})


def _pair(
    spec: dict[str, Any], without: frozenset[str], options: Any, report: Report
) -> dict[str, Any]:
    """The two sides, taking turns."""
    with ExitStack() as stack:
        workers = {}
        for side, left_out in (("with", frozenset()), ("without", without)):
            told = {**spec, "without": sorted(left_out)}
            workers[side], versions = harness.start(stack, "ours/step.py", told)
            report.version("ours", versions)
            workers[side].ask("step")
        answers = harness.turns(
            {side: lambda _, w=worker: w.ask("step") for side, worker in workers.items()},
            repeats=options.repeats,
        )
    stages = {side: [a["stages"] for a in answers[side]] for side in answers}
    gains = {
        f"{stage}_gain": statistics.median(
            _ratio(slow[stage], fast[stage])
            for slow, fast in zip(stages["without"], stages["with"], strict=True)
        )
        for stage in ("rollout", "update")
        if stage in stages["with"][0]
    }
    return {
        "with_seconds": statistics.median(of(answers["with"], "seconds")),
        "without_seconds": statistics.median(of(answers["without"], "seconds")),
        "with_range": spread(of(answers["with"], "seconds")),
        "without_range": spread(of(answers["without"], "seconds")),
        "gain": ratios(of(answers["without"], "seconds"), of(answers["with"], "seconds")),
        **gains,
    }


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")


def main() -> None:
    parser = harness.arguments(__doc__ or "", list(STEPS))
    parser.add_argument("--without", help="leave out these kernels together, separated by commas")
    options = parser.parse_args()
    default = ["embedded", "medium-fp32@32-tokens", "medium-recommended@32-tokens"]
    names = harness.chosen(options, list(STEPS), default)
    report = Report("kernels", options)
    for name in names:
        measure(name, shrunk(STEPS[name]) if options.quick else STEPS[name], options, report)
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
