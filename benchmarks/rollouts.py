"""Tokens per second of rollouts: the group engine against transformers and vLLM.

    python benchmarks/rollouts.py --json benchmarks/results/rollouts.json

Peers are `generate`, `generate_batch` (continuous batching) and vLLM, the last one in an
environment of its own: .venv-vllm, or GROUPWISE_VLLM_PYTHON. All sides get the same weights,
prompts and lengths. Before anything is timed they decode greedily: `same_greedy` is the share of
tokens that come before a row's first difference from ours. Sampling is untruncated at temperature
1; vLLM returns neither text nor log-probabilities, the group engine returns both. Where more
prompts wait than are worth computing at once, every side but vLLM, which schedules by itself, first
searches for its fastest number of rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import harness
from harness import Report, Worker, of, ratios, say, spread
from shapes import SHAPES, random_prompts, save_model, word_problems_of_bundled

PEERS = ("generate", "generate_batch", "vllm")
VLLM_ROWS = 256
"""vLLM schedules by itself; this many sequences at once are its default."""
QUEUE_ROWS = (64, 128, 256, 512, 1024)
"""Batch sizes tried by every side where more rows wait than are worth computing at once."""
TUNING_PROMPTS = 128
COLUMNS = (
    "case", "peer", "precision", "ours_tokens_per_second", "peer_tokens_per_second", "speedup",
    "ours_rows", "peer_rows", "same_greedy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting. The shape "bundled" is the model in the package, with its own prompts, lengths and
    end token; for the others every completion has exactly `completion` tokens."""

    shape: str
    precision: str
    prompts: int
    group: int
    prompt: int
    completion: int

    @property
    def queue(self) -> bool:
        return self.shape == "bundled"


def _cases() -> dict[str, Case]:
    grid = {
        f"g{group}-p{prompt}-c{completion}": Case(
            shape="1m", precision="float32", prompts=8, group=group, prompt=prompt,
            completion=completion,
        )
        for group in (4, 8, 16)
        for prompt in (64, 256, 1024)
        for completion in (64, 256)
    }  # fmt: skip
    medium = Case(shape="42m", precision="float32", prompts=8, group=8, prompt=256, completion=128)
    card = {
        f"gpu-{shape}-g{group}": Case(
            shape=f"qwen2.5-{shape}", precision="bfloat16", prompts=256 // group, group=group,
            prompt=256, completion=512,
        )
        for shape in ("0.5b", "1.5b", "3b")
        for group in (8, 16)
    }  # fmt: skip
    return {
        "small-equal": Case(
            shape="1m", precision="float32", prompts=8, group=8, prompt=96, completion=64
        ),
        "embedded-queue": Case(
            shape="bundled", precision="float32", prompts=512, group=8, prompt=0, completion=48
        ),
        "medium-fp32": medium,
        "medium-bf16": replace(medium, precision="bfloat16"),
        **grid,
        **card,
    }


CASES = _cases()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on disk and what the sides must know about it."""

    folder: str
    context: int
    ends: list[int]


def model_of(case: Case, folder: str) -> Model:
    if case.queue:
        bundled = word_problems_of_bundled(1)
        return Model(folder=bundled.folder, context=bundled.context, ends=bundled.ends)
    shape = SHAPES[case.shape]
    return Model(folder=save_model(shape, folder), context=shape.context, ends=[])


def prompts_of(case: Case) -> list[list[int]]:
    if case.queue:
        return word_problems_of_bundled(case.prompts).tokens
    return random_prompts(SHAPES[case.shape], count=case.prompts, tokens=case.prompt)


def shrunk(case: Case) -> Case:
    return replace(
        case,
        prompts=min(case.prompts, 16 if case.queue else 2),
        group=min(case.group, 2),
        prompt=min(case.prompt, 16),
        completion=min(case.completion, 8),
    )


def workers(
    stack: ExitStack, model: Model, case: Case, options: argparse.Namespace, report: Report
) -> dict[str, Worker]:
    """A worker of every side that can be started here, "ours" first."""
    spec = {
        "model": model.folder,
        "precision": case.precision,
        "endless": not model.ends,
        "threads": options.threads,
        "context": model.context,
        "rows": VLLM_ROWS,
    }
    wanted = ["ours", *options.peers.split(",")]
    started: dict[str, Worker] = {}
    for side in wanted:
        python: Any = sys.executable
        if side == "vllm":
            python = harness.environment("vllm", "GROUPWISE_VLLM_PYTHON", ".venv-vllm")
            if python is None:
                continue
        script = {"ours": "ours/rollouts.py", "vllm": "peers/vllm_rollouts.py"}.get(
            side, "peers/transformers_rollouts.py"
        )
        batching = {"batching": side == "generate_batch"}
        try:
            started[side], versions = harness.start(
                stack, script, {**spec, **batching}, python=python
            )
            report.version(side, versions)
        except harness.WorkerError as error:
            if side == "ours":
                raise
            say(f"{side}: left out, {error}")
    return started


def measure(
    name: str, case: Case, model: Model, sides: dict[str, Worker], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One case on every side."""
    prompts = prompts_of(case)
    common = {"group": case.group, "max_tokens": case.completion, "ends": model.ends}
    greedy = {
        side: worker.ask(
            "run", **{**common, "group": 1}, prompts=prompts[:4], rows=64, seed=0, greedy=True
        )["completions"]
        for side, worker in sides.items()
    }
    rows = {side: _rows(worker, side, case, prompts, common) for side, worker in sides.items()}
    for side, worker in sides.items():  # a search for the batch size has warmed up already
        if not case.queue or side == "vllm":
            worker.ask("run", **common, prompts=prompts, rows=rows[side], seed=0)

    def turn(side: str) -> Callable[[int], dict[str, Any]]:
        return lambda repeat: sides[side].ask(
            "run", **common, prompts=prompts, rows=rows[side], seed=repeat + 1
        )

    answers = harness.turns({side: turn(side) for side in sides}, repeats=options.repeats)
    rates = {
        side: [a["tokens"] / a["seconds"] for a in answered] for side, answered in answers.items()
    }
    return [
        {
            "case": name,
            "peer": peer,
            "precision": case.precision,
            "ours_seconds": statistics.median(of(answers["ours"], "seconds")),
            "peer_seconds": statistics.median(of(answers[peer], "seconds")),
            "ours_tokens_per_second": spread(rates["ours"]),
            "peer_tokens_per_second": spread(rates[peer]),
            "speedup": ratios(rates["ours"], rates[peer]),
            "ours_rows": rows["ours"],
            "peer_rows": rows[peer],
            "ours_peak_mb": max(of(answers["ours"], "peak_mb")),
            "peer_peak_mb": max(of(answers[peer], "peak_mb")),
            "same_greedy": _agreement(greedy["ours"], greedy[peer]),
            "stages": {},
            "repeats": {"ours": answers["ours"], "peer": answers[peer]},
        }
        for peer in sides
        if peer != "ours"
    ]


def measured(
    name: str, case: Case, model: Model, sides: dict[str, Worker], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One case on every side that lives through it; a peer that does not is left out from then
    on."""
    while len(sides) > 1:
        try:
            return measure(name, case, model, sides, options)
        except harness.WorkerError as error:
            dead = [side for side, worker in sides.items() if worker.process.poll() is not None]
            if "ours" in dead or not dead:
                raise
            for side in dead:
                del sides[side]
            say(f"{', '.join(dead)}: left out from {name} on, {error}")
    return []


def _rows(
    worker: Worker, side: str, case: Case, prompts: list[list[int]], common: dict[str, Any]
) -> int:
    """How many rows a side computes at once: all, or for a queue the fastest on its first
    prompts."""
    if side == "vllm":
        return VLLM_ROWS
    whole = case.prompts * case.group
    if not case.queue:
        return whole
    tried = {}
    for rows in sorted({min(rows, whole) for rows in QUEUE_ROWS}):
        answers = [
            worker.ask("run", **common, prompts=prompts[:TUNING_PROMPTS], rows=rows, seed=0)
            for _ in range(2)
        ]
        tried[rows] = max(a["tokens"] / a["seconds"] for a in answers)
    return max(tried, key=lambda rows: tried[rows])


def _agreement(ours: list[list[int]], peers: list[list[int]]) -> float:
    """Share of greedy tokens that stand before the first difference of their row."""
    same, total = 0, 0
    for a, b in zip(ours, peers, strict=True):
        total += max(len(a), len(b))
        for x, y in zip(a, b, strict=False):
            if x != y:
                break
            same += 1
    return same / total


def main() -> None:
    default = [name for name in CASES if not name.startswith("gpu-")]
    parser = harness.arguments(__doc__ or "", list(CASES))
    parser.add_argument("--peers", default=",".join(PEERS), help="of " + ", ".join(PEERS))
    options = parser.parse_args()
    if unknown := set(options.peers.split(",")) - set(PEERS):
        raise SystemExit(f"--peers: no {sorted(unknown)[0]!r}. Known: {', '.join(PEERS)}.")
    names = harness.chosen(options, list(CASES), default)
    cases = {name: shrunk(CASES[name]) if options.quick else CASES[name] for name in names}
    report = Report("rollouts", options)
    kinds = dict.fromkeys((case.shape, case.precision) for case in cases.values())
    for shape, precision in kinds:
        members = {n: c for n, c in cases.items() if (c.shape, c.precision) == (shape, precision)}
        first = next(iter(members.values()))
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = model_of(first, folder)
            sides = workers(stack, model, first, options, report)
            for name, case in members.items():
                say(name)
                for row in measured(name, case, model, sides, options):
                    report.add(row)
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
