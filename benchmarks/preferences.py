"""Preference and reward-model steps against TRL's trainers, in turns on the same tokens.

    python benchmarks/preferences.py --json benchmarks/results/preferences.json

Prompts of 512 tokens and answers of 128. With K answers TRL computes every pair as two whole
sequences; groupwise computes the prompt once and every answer once. TRL runs with reference
log-probabilities given and with the best of several numbers of pairs at once, found first.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
from harness import Report, of, ratios, say
from shapes import SHAPES, random_prompts, save_model

COLUMNS = (
    "case",
    "ours_seconds",
    "trl_seconds",
    "speedup",
    "ours_peak_mb",
    "trl_peak_mb",
    "loss_gap",
)
MICROBATCHES = (1, 2, 4)
GAP = 1e-4
"""By how much the losses of the first step may differ."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`what` is "dpo" or "reward"; `answers` to each prompt."""

    what: str
    answers: int
    prompts: int
    prompt: int = 512
    completion: int = 128
    shape: str = "42m"


CASES = {
    "dpo-2": Case(what="dpo", answers=2, prompts=8),
    "reward-2": Case(what="reward", answers=2, prompts=8),
    "reward-8": Case(what="reward", answers=8, prompts=2),
}


def measure(
    name: str, case: Case, peer_python: Path, options: argparse.Namespace, report: Report
) -> dict[str, Any]:
    """Both sides in processes of their own."""
    shape = SHAPES[case.shape]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        flat = random_prompts(
            shape, count=case.prompts * case.answers, tokens=case.completion, seed=1
        )
        spec = {
            "model": save_model(shape, folder),
            "threads": options.threads,
            "what": case.what,
            "prompts": random_prompts(shape, count=case.prompts, tokens=case.prompt),
            "answers": [
                flat[i * case.answers : (i + 1) * case.answers] for i in range(case.prompts)
            ],
        }
        ours, version = harness.start(stack, "ours/preferences.py", spec)
        report.version("ours", version)
        loss, gap = ours.ask("step")["loss"], 0.0
        trl, best = None, float("inf")
        for size in (1,) if options.quick else MICROBATCHES:
            peer, version = harness.start(
                stack,
                "peers/trl_preferences.py",
                {**spec, "microbatch": size},
                python=peer_python,
            )
            report.version("trl", version)
            gap = max(gap, abs(peer.ask("step")["loss"] - loss))
            seconds = peer.ask("step")["seconds"]
            say(f"  TRL with {size} pairs at once: {seconds:.2f} s")
            if seconds < best:
                trl, best = peer, seconds
        assert trl is not None
        if gap > GAP:
            raise SystemExit(f"{name}: the losses of the first step differ by {gap:.2g}.")
        chosen = trl
        found = harness.turns(
            {"ours": lambda _: ours.ask("step"), "trl": lambda _: chosen.ask("step")},
            repeats=options.repeats,
        )
    seconds = {side: of(answers, "seconds") for side, answers in found.items()}
    return {
        "case": name,
        "ours_seconds": harness.spread(seconds["ours"]),
        "trl_seconds": harness.spread(seconds["trl"]),
        "speedup": ratios(seconds["trl"], seconds["ours"]),
        "ours_peak_mb": max(of(found["ours"], "peak_mb")),
        "trl_peak_mb": max(of(found["trl"], "peak_mb")),
        "loss_gap": gap,
        "repeats": found,
    }


def main() -> None:
    options = harness.arguments(__doc__ or "", list(CASES)).parse_args()
    python = harness.environment("trl", "GROUPWISE_TRL_PYTHON", ".venv-trl")
    if python is None:
        raise SystemExit(1)
    report = Report("preferences", options)
    for name in harness.chosen(options, list(CASES), list(CASES)):
        say(name)
        case = CASES[name]
        if options.quick:
            case = replace(case, shape="1m", prompts=2, prompt=16, completion=8)
        report.add(measure(name, case, python, options, report))
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
