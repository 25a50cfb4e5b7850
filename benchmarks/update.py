"""The update and the decoding step alone, beside the least time this machine could take.

    python benchmarks/update.py --json benchmarks/results/update.json

The bound of an update is the time of its matrix products: 6 FLOP per weight of the layers and
unique token (each prompt once), and 6 per weight of the head and predicted token, at the rate of
the best large matrix product in the same precision, threads and process. `with_attention` is the
time over a bound with the products of attention as well: 12 FLOP per layer, number of a query and
pair of tokens of which one attends to the other. The bound of a decoding step is the larger of its
matrix products at that rate and of reading the weights once at the rate of a large copy; the sum of
the two stands beside it. Norms, sampling, the optimizer and the reading of cached keys and values
are in the time and in no bound. The rates are measured anew before every repeat.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import harness
from harness import Report, of, ratios, say, spread
from shapes import ON_A_GPU, SHAPES, random_prompts, save_model

COLUMNS = (
    "case", "precision", "ours_seconds", "bound_seconds", "over_bound", "with_attention",
    "over_sum", "unique_tokens", "peak_gflops", "bandwidth_gb_s", "ours_peak_mb",
    "logits_peak_mb", "largest_buffer_mb", "whole_logits_mb",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting; `what` is measured: "update", "decode" or "logits_peak"."""

    what: str
    precision: str
    prompt: int
    group: int
    completion: int
    shape: str = "42m"
    prompts: int = 8
    tokens_per_microbatch: int | None = None


def _cases() -> dict[str, Case]:
    update = Case(what="update", precision="float32", prompt=129, group=8, completion=128)
    long = replace(update, prompt=512, group=16)
    decode = Case(what="decode", precision="float32", prompt=256, group=8, completion=128)
    bf16 = {"precision": "bfloat16"}
    return {
        "update-fp32": update,
        "update-bf16": replace(update, **bf16),
        "long-prompt-fp32": long,
        "long-prompt-bf16": replace(long, **bf16),
        "decode-fp32": decode,
        "decode-bf16": replace(decode, **bf16),
        "vocab-152k": Case(
            what="logits_peak", shape="42m-vocab-152k", precision="float32", prompts=4, prompt=64,
            group=8, completion=128,
        ),
        **{
            f"gpu-{what}-{shape}": Case(
                what=what, shape=f"qwen2.5-{shape}", precision="bfloat16", prompts=16, prompt=256,
                group=8, completion=512, tokens_per_microbatch=tokens,
            )
            for what in ("update", "decode")
            for shape, tokens in ON_A_GPU.items()
        },
    }  # fmt: skip


CASES = _cases()


def shrunk(case: Case) -> Case:
    shape = "1m-vocab-152k" if case.what == "logits_peak" else "1m"
    return replace(case, shape=shape, prompts=2, group=2, prompt=16, completion=8)


def measure(name: str, case: Case, options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """One case in a fresh process."""
    shape = SHAPES[case.shape]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        spec = {
            "model": save_model(shape, folder),
            "precision": case.precision,
            "threads": options.threads,
            "prompts": random_prompts(shape, count=case.prompts, tokens=case.prompt),
            "group": case.group,
            "completion": case.completion,
            "tokens_per_microbatch": case.tokens_per_microbatch,
        }
        worker, versions = harness.start(stack, "ours/update.py", spec)
        report.version("ours", versions)
        common = {"case": name, "precision": case.precision}
        if case.what == "logits_peak":
            answer = worker.ask("logits_peak")
            named = {"ours_seconds": answer.pop("seconds"), "ours_peak_mb": answer.pop("peak_mb")}
            return {**common, **named, **answer}
        work = worker.ask("work")
        sizes = {
            "size": 256 if options.quick else 4096,
            "bytes_": 2**20 if options.quick else 2**28,
        }
        worker.ask(case.what)
        peaks, answers = [], []
        for _ in range(options.repeats):
            peaks.append(worker.ask("peaks", **sizes))
            answers.append(worker.ask(case.what))
    return {**common, **_against_bound(case.what, work, peaks, answers)}


def _against_bound(
    what: str, work: dict[str, Any], peaks: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Each repeat's time over the bound at the rates measured just before it."""
    products = [work[f"{what}_flops"] / peak["flops"] for peak in peaks]
    reads = [work["decode_bytes"] / peak["bandwidth"] for peak in peaks]
    bound = products
    if what == "decode":
        bound = [max(a, b) for a, b in zip(products, reads, strict=True)]
    seconds = of(answers, "seconds")
    row = {
        "ours_seconds": statistics.median(seconds),
        "bound_seconds": statistics.median(bound),
        "over_bound": ratios(seconds, bound),
        "unique_tokens": work["unique_tokens"],
        "peak_gflops": spread([peak["flops"] / 1e9 for peak in peaks]),
        "ours_peak_mb": max(of(answers, "peak_mb")),
        "stages": harness.stages(answers),
        "repeats": {"ours": answers, "machine": peaks},
    }
    if what == "update":
        attention = [work["attention_flops"] / peak["flops"] for peak in peaks]
        whole = [a + b for a, b in zip(products, attention, strict=True)]
        row["with_attention"] = ratios(seconds, whole)
    if what == "decode":
        row["over_sum"] = ratios(seconds, [a + b for a, b in zip(products, reads, strict=True)])
        row["bandwidth_gb_s"] = spread([peak["bandwidth"] / 1e9 for peak in peaks])
    return row


def main() -> None:
    default = [name for name in CASES if not name.startswith("gpu-")]
    options = harness.arguments(__doc__ or "", list(CASES)).parse_args()
    report = Report("update", options)
    for name in harness.chosen(options, list(CASES), default):
        say(name)
        case = shrunk(CASES[name]) if options.quick else CASES[name]
        report.add(measure(name, case, options, report))
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
