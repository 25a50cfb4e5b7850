"""A whole RL step: generation, rewards, update; ours against TRL's GRPOTrainer.

    python benchmarks/step.py --json benchmarks/results/step.json

TRL has an environment of its own: .venv-trl, or GROUPWISE_TRL_PYTHON; cases with LoRA need peft in
it, and those with weights in 4 bits bitsandbytes on both sides. Both sides get the same weights,
prompts, reward function, lengths and learning rate, and the same loss (the row `grpo@trl` of the
table of algorithms). Memory is the peak of each process above what it held with its libraries
imported and no model loaded. The first two steps of each side are not counted: in the second one,
memory grows once more, because the optimizer made its moments at the end of the first.

The cases named cpu-0.5b-… have the shape of Qwen2.5-0.5B, 2 prompts of 256 tokens and 8 answers of
64 each; those ending in @4x16 have 4 prompts and 16 answers each. In cpu-0.5b-nf4, adapters are
trained on weights in 4 bits. Their sides are never in memory together; run them by name:
`--cases cpu-0.5b-fp32,…`.

With `--busy N`, both sides are measured beside N processes that never wait; such cases end in
"beside N".

The cases named gpu-… are for a card of 80 GB, whose larger microbatches ours uses. In @liger, TRL
computes with Liger's kernels, without checkpointing and 16 rows per pass.

The cases ending in @one-pass give TRL its whole batch at once; in all others it takes 8 rows per
pass, its default. "recommended" is bfloat16 with float32 masters here, and TRL's defaults there:
bfloat16 autocast and gradient checkpointing; or float32 without checkpointing, its fastest, where
PyTorch has no fast products of bfloat16. `computed_share` is the share of completions that our
update computes: those of a group with equal rewards have no gradient and are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import harness
from groupwise.kernels import onednn
from harness import Report, of, ratios, say, spread
from shapes import ON_A_GPU, SHAPES, as_text, random_prompts, save_model, word_problems_of_bundled

COLUMNS = (
    "case", "precision", "ours_seconds", "peer_seconds", "speedup", "ours_peak_mb", "peer_peak_mb",
    "memory_ratio", "ours_tokens", "peer_tokens", "logprob_gap", "computed_share", "stages",
)  # fmt: skip
FP32 = {"bf16": False, "gradient_checkpointing": False}
UNCOUNTED = 2
"""Steps of each side before those that count."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting.

    Attributes:
        precision: of our weights in the computation; masters are float32.
        ours: sections of our configuration that differ from its defaults.
        peer: settings of GRPOConfig that differ from its defaults, and `rows_per_pass`.
        rank: of a LoRA adapter that is trained in place of the weights, on both sides.
        quantized: weights in 4 bits (NF4), on both sides.
        apart: the two sides are never in memory at the same time: every turn loads its side, takes
            the steps that are not counted and then one that is.
    """

    shape: str
    precision: str
    prompts: int
    group: int
    prompt: int
    completion: int
    ours: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    quantized: bool = False
    apart: bool = False


def _cases() -> dict[str, Case]:
    embedded = Case(
        shape="bundled", precision="float32", prompts=16, group=8, prompt=0, completion=48,
        peer={**FP32, "rows_per_pass": 128},
    )  # fmt: skip
    medium = Case(
        shape="42m", precision="float32", prompts=8, group=8, prompt=129, completion=128, peer=FP32
    )
    long = replace(medium, group=16, prompt=512)
    fast = torch.bfloat16 in onednn.dtypes()
    recommended = {"precision": "bfloat16", "peer": {} if fast else FP32}
    half = Case(
        shape="qwen2.5-0.5b", precision="float32", prompts=2, group=8, prompt=256, completion=64,
        peer=FP32, apart=True,
    )  # fmt: skip
    card = {
        f"gpu-{shape}-g{group}": Case(
            shape=f"qwen2.5-{shape}", precision="bfloat16", prompts=128 // group, group=group,
            prompt=256, completion=512, ours={"update": {"tokens_per_microbatch": tokens}},
        )
        for shape, tokens in ON_A_GPU.items()
        for group in (8, 16)
    }  # fmt: skip
    liger = {"use_liger_kernel": True, "gradient_checkpointing": False, "rows_per_pass": 16}
    return {
        "embedded": embedded,
        "embedded@8-rows": replace(embedded, peer=FP32),
        "medium-fp32": medium,
        "medium-fp32@one-pass": replace(medium, peer={**FP32, "rows_per_pass": 64}),
        "medium-recommended": replace(medium, **recommended),
        "medium-recommended@one-pass": replace(
            medium, precision="bfloat16", peer={**recommended["peer"], "rows_per_pass": 64}
        ),
        "medium-recommended@no-checkpointing": replace(
            medium, precision="bfloat16", peer={"gradient_checkpointing": False}
        ),
        "long-prompt-fp32": long,
        "long-prompt-recommended": replace(long, **recommended),
        "medium-lora": replace(medium, **recommended, rank=16),
        "cpu-0.5b-fp32": half,
        "cpu-0.5b-recommended": replace(half, **recommended),
        "cpu-0.5b-recommended@4x16": replace(half, **recommended, prompts=4, group=16),
        "cpu-0.5b-lora": replace(half, **recommended, rank=16),
        "cpu-0.5b-lora@4x16": replace(half, **recommended, rank=16, prompts=4, group=16),
        "cpu-0.5b-nf4": replace(half, **recommended, rank=16, quantized=True),
        **card,
        "gpu-0.5b-g8@liger": replace(card["gpu-0.5b-g8"], peer=liger),
        "gpu-1.5b-g8-lora": replace(card["gpu-1.5b-g8"], rank=16),
        "gpu-3b-g8-qlora": replace(card["gpu-3b-g8"], rank=16, quantized=True),
    }


CASES = _cases()


def shrunk(case: Case) -> Case:
    if case.shape == "bundled":  # Small as it is, and fewer answers would hold no right one.
        return case
    return replace(
        case,
        shape="1m-vocab-152k" if case.apart else case.shape,
        prompts=2,
        group=2,
        prompt=min(case.prompt, 16),
        completion=min(case.completion, 8),
        peer={k: v for k, v in case.peer.items() if k != "rows_per_pass"} | {"rows_per_pass": 2},
    )


def specification(case: Case, folder: str, *, threads: int) -> dict[str, Any]:
    """What both sides are told."""
    common = {
        "precision": case.precision,
        "group": case.group,
        "max_tokens": case.completion,
        "learning_rate": 1e-6,  # so small that the lengths of completions stay what they are
        "threads": threads,
        "seed": 0,
        "rank": case.rank,
        "quantized": case.quantized,
    }
    if case.shape == "bundled":
        problems = word_problems_of_bundled(case.prompts)
        return common | {
            "model": problems.folder,
            "endless": False,
            "prompts": problems.texts,
            "answers": problems.answers,
            "first": problems.tokens[0],
            "reward": "tagged_answer",
        }
    shape = SHAPES[case.shape]
    prompts = random_prompts(shape, count=case.prompts, tokens=case.prompt)
    return common | {
        "model": save_model(shape, folder),
        "endless": True,
        "prompts": [as_text(tokens) for tokens in prompts],
        "answers": [""] * case.prompts,
        "first": prompts[0],
        "reward": "checksum",
    }


def measure(
    name: str, case: Case, peer_python: Path, options: argparse.Namespace, report: Report
) -> dict[str, Any]:
    """One case on both sides, each in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        spec = specification(case, folder, threads=options.threads)
        sides = {
            "ours": _Side("ours/step.py", {**spec, "settings": case.ours}, sys.executable),
            "peer": _Side("peers/trl_step.py", {**spec, "settings": case.peer}, peer_python),
        }
        asked = {"prompt": spec["first"], "completions": [[5, 7, 11, 13], [17, 19, 23, 29]]}
        run = _apart if case.apart else _together
        logprobs, first, answers = run(sides, asked, options.repeats, report)
    gap = _gap(logprobs["ours"], logprobs["peer"])
    peaks = {side: max(of([first[side], *answers[side]], "peak_mb")) for side in answers}
    return {
        "case": name,
        "precision": case.precision,
        "peer_settings": case.peer,
        "ours_seconds": statistics.median(of(answers["ours"], "seconds")),
        "peer_seconds": statistics.median(of(answers["peer"], "seconds")),
        "ours_range": spread(of(answers["ours"], "seconds")),
        "peer_range": spread(of(answers["peer"], "seconds")),
        "speedup": ratios(of(answers["peer"], "seconds"), of(answers["ours"], "seconds")),
        "ours_peak_mb": peaks["ours"],
        "peer_peak_mb": peaks["peer"],
        "memory_ratio": peaks["ours"] / peaks["peer"],
        "logprob_gap": gap,
        "ours_tokens": statistics.median(of(answers["ours"], "tokens")),
        "peer_tokens": statistics.median(of(answers["peer"], "tokens")),
        "computed_share": statistics.median(of(answers["ours"], "computed_share")),
        "first_over_later": first["ours"]["seconds"]
        / statistics.median(of(answers["ours"], "seconds")),
        "first_seconds": {side: first[side]["seconds"] for side in first},
        "stages": {side: harness.stages(answers[side]) for side in answers},
        "repeats": answers,
    }


@dataclass(frozen=True)
class _Side:
    """One side of a comparison: its script, what it is told, and its Python."""

    script: str
    spec: dict[str, Any]
    python: str | Path

    def start(self, stack: ExitStack, name: str, report: Report) -> harness.Worker:
        """A worker of this side that has loaded its model."""
        worker, versions = harness.start(stack, self.script, self.spec, python=self.python)
        report.version({"peer": "trl"}.get(name, name), versions)
        return worker


Answers = dict[str, list[dict[str, Any]]]
Found = tuple[dict[str, list[list[float]]], dict[str, dict[str, Any]], Answers]
"""Log-probabilities before training, the first step, and the counted steps of each side."""


def _together(
    sides: dict[str, _Side], asked: dict[str, Any], repeats: int, report: Report
) -> Found:
    """Both sides loaded once, taking turns."""
    with ExitStack() as stack:
        workers = {name: side.start(stack, name, report) for name, side in sides.items()}
        logprobs = {n: w.ask("logprobs", **asked)["logprobs"] for n, w in workers.items()}
        first = {name: _warm_up(worker) for name, worker in workers.items()}
        answers = harness.turns(
            {name: lambda _, w=worker: w.ask("step") for name, worker in workers.items()},
            repeats=repeats,
        )
    return logprobs, first, answers


def _apart(sides: dict[str, _Side], asked: dict[str, Any], repeats: int, report: Report) -> Found:
    """One side in memory at a time: its process ends when the turn of the other one comes."""
    logprobs: dict[str, list[list[float]]] = {}
    first: dict[str, dict[str, Any]] = {}
    running: dict[str, harness.Worker] = {}
    with ExitStack() as stack:

        def turn(name: str) -> dict[str, Any]:
            if name not in running:
                stack.close()
                running.clear()
                running[name] = worker = sides[name].start(stack, name, report)
                if name not in logprobs:
                    logprobs[name] = worker.ask("logprobs", **asked)["logprobs"]
                first[name] = _warm_up(worker)
            return running[name].ask("step")

        answers = harness.turns(
            {name: lambda _, n=name: turn(n) for name in sides}, repeats=repeats
        )
    return logprobs, first, answers


def _warm_up(worker: harness.Worker) -> dict[str, Any]:
    """Take the steps that are not counted, and return the first."""
    first = worker.ask("step")
    for _ in range(UNCOUNTED - 1):
        worker.ask("step")
    return first


def _gap(ours: list[list[float]], peers: list[list[float]]) -> float:
    """Largest difference of a token's log-probability before training."""
    pairs = zip(sum(ours, []), sum(peers, []), strict=True)
    return max(abs(a - b) for a, b in pairs)


def main() -> None:
    # Those of half a billion parameters take the better part of an hour each.
    default = [name for name in CASES if not name.startswith(("gpu-", "cpu-0.5b"))]
    options = harness.arguments(__doc__ or "", list(CASES)).parse_args()
    names = harness.chosen(options, list(CASES), default)
    python = harness.environment("trl", "GROUPWISE_TRL_PYTHON", ".venv-trl")
    if python is None:
        raise SystemExit(1)
    report, failed = Report("step", options), []
    for name in names:
        say(name)
        case = shrunk(CASES[name]) if options.quick else CASES[name]
        try:
            with harness.busy(options.busy):
                found = measure(name, case, python, options, report)
            beside = {"case": f"{name} beside {options.busy}"} if options.busy else {}
            report.add({**found, **beside})
        except harness.WorkerError as error:
            failed.append(name)
            say(f"{name}: not measured, {error}")
    report.close(COLUMNS)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
