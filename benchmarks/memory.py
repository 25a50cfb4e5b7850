"""The memory that `groupwise doctor` plans for a run, beside what the run then takes.

    python benchmarks/memory.py --json benchmarks/results/memory.json

`tensors` is the most that torch's allocator had given out at one time: the quantity that is
planned. `resident` is, on a CPU, the most memory of the process above what it held after a step of
a model of 1 M parameters, which loads what libraries load when they are first used; it has the gaps
of the heap as well. The first step makes the optimizer's moments, the second has them from its
start; both are in `resident`, and a third one is traced. Every case is a fresh process.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import harness
from harness import Report, say
from shapes import SHAPES, as_text, save_model

COLUMNS = (
    "case", "plan_mb", "tensors_mb", "resident_mb", "plan_over_tensors", "resident_over_plan",
    "phase", "parts_mb",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run; `settings` are sections of its recipe."""

    shape: str = "42m"
    prompts: int = 8
    prompt: int = 65
    group: int = 4
    completion: int = 64
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


def _cases() -> dict[str, Case]:
    base = Case()
    lora = {"adapter": {"rank": 16}}
    bf16 = {"dtype": "bfloat16"}
    qlora = {"model": {**lora, **bf16, "quantization": "nf4"}}
    card = Case(shape="qwen2.5-3b", prompt=256, group=8, completion=512)
    half = Case(shape="qwen2.5-0.5b", prompts=2, prompt=256, group=8, completion=64)
    plain = {"algorithm": {"name": "dr_grpo"}}  # without a reference, as in step.py
    low = {"optimizer": {"name": "adamw_8bit"}}
    return {
        "full-fp32": base,
        "full-bf16": replace(base, settings={"model": bf16}),
        "lora-fp32": replace(base, settings={"model": lora}),
        "lora-bf16": replace(base, settings={"model": {**lora, **bf16}}),
        "checkpointing": replace(base, settings={"update": {"gradient_checkpointing": True}}),
        "one-microbatch": replace(base, settings={"update": {"tokens_per_microbatch": 4096}}),
        "adamw-8bit": replace(base, settings={"optimizer": {"name": "adamw_8bit"}}),
        "cpu-0.5b-fp32": replace(half, settings=plain),
        "cpu-0.5b-recommended": replace(half, settings={**plain, "model": bf16}),
        "cpu-0.5b-8bit": replace(half, settings={**plain, "model": bf16, **low}),
        "cpu-0.5b-lora": replace(half, settings={**plain, "model": {**lora, **bf16}}),
        "cpu-0.5b-nf4": replace(half, settings={**plain, **qlora}),
        "cpu-0.5b-nf4@768": replace(
            half, settings={**plain, **qlora, "update": {"tokens_per_microbatch": 768}}
        ),
        "gpu-qlora-3b": replace(
            card, settings={**qlora, "update": {"gradient_checkpointing": True}}
        ),
        "gpu-lora-3b": replace(card, settings={"model": {**lora, **bf16}}),
    }


CASES = _cases()


def shrunk(case: Case) -> Case:
    return replace(case, shape="1m", prompts=2, group=2, prompt=16, completion=8)


def main() -> None:
    default = [name for name in CASES if not name.startswith(("cpu-", "gpu-"))]
    parser = harness.arguments(__doc__ or "", list(CASES))
    parser.set_defaults(repeats=1)
    options = parser.parse_args()
    report = Report("memory", options)
    for name in harness.chosen(options, list(CASES), default):
        say(name)
        case = shrunk(CASES[name]) if options.quick else CASES[name]
        # Words that the small model has, too.
        prompt = as_text([2 + place % 8 for place in range(case.prompt)])
        with ExitStack() as stack:
            folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
            spec = {
                "model": save_model(SHAPES[case.shape], folders[0]),
                "small": save_model(SHAPES["1m"], folders[1]),
                "prompts": [prompt] * case.prompts,
                "prompt": case.prompt,
                "group": case.group,
                "max_tokens": case.completion,
                "threads": options.threads,
                "settings": case.settings,
            }
            worker, versions = harness.start(stack, "ours/memory.py", spec)
            report.version("ours", versions)
            found = {**worker.ask("plan"), **worker.ask("measured")}
        found["plan_over_tensors"] = found["plan_mb"] / found["tensors_mb"]
        if "resident_mb" in found:
            found["resident_over_plan"] = found["resident_mb"] / found["plan_mb"]
        report.add({"case": name, **found})
    report.close(COLUMNS)


if __name__ == "__main__":
    main()
